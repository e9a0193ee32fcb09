"""The memory benchmark runs, and a second copy of the gradients would show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"


def test_gradients_live_in_the_buckets_alone(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    command = [sys.executable, str(SCRIPT), "-np", "2", "--quick", "--json", str(file)]
    command += ["--only", "equal", "--contenders", "hvdp", "ddp"]
    env = {**os.environ, "HVDP_FUSION_THRESHOLD": "1000000"}  # small beside the small model
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["setting"]["ranks"] == 2
    (result,) = report["results"]
    assert result["gradient_bytes"] == 2 * 4 * result["parameters"]
    added = result["added_over_gradients"]
    assert added.keys() == result["over_rest_over_gradients"].keys() == result["ranks"].keys()
    assert added.keys() == {"hvdp", "ddp"}
    # A second copy makes it 2; the first plan once left one with the C library, freed but kept.
    assert 0.8 < added["hvdp"] < 1.6
    assert "hvdp" in done.stdout
