"""The Keras benchmark runs with all its contenders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "keras_step.py"


def test_all_contenders_take_part(tmp_path: Path) -> None:
    results = tmp_path / "keras_step.json"
    command = [sys.executable, str(SCRIPT), "-np", "2", "--quick", "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(results.read_text())
    assert report["step_s"].keys() == {"keras", "hvdp", "by hand", "keras loop", "hvdp loop", "mirrored"}
    assert all(seconds > 0 for seconds in report["step_s"].values())
