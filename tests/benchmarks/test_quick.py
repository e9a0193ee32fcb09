"""The benchmarks run, agree on sums, and write what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, results: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), "-np", "2", "--quick", "--json", str(results)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    report: dict[str, Any] = json.loads(results.read_text())
    assert report["setting"]["ranks"] == 2
    assert report["setting"]["quick"] is True
    return report


def test_allreduce(tmp_path: Path) -> None:
    report = run("allreduce.py", tmp_path / "allreduce.json")
    assert [result["bytes"] for result in report["results"]] == [1 << 10, 1 << 20]
    for result in report["results"]:
        assert {"hvdp", "gloo", "mpi"} <= result["median_s"].keys()
        assert all(seconds > 0 for seconds in result["median_s"].values())
        assert result["peer_over_hvdp"]["hvdp"] == 1.0


def test_train_step(tmp_path: Path) -> None:
    report = run("train_step.py", tmp_path / "step.json", "--only", "transformer", "convnet")
    assert [result["model"] for result in report["results"]] == ["transformer", "convnet"]
    for result in report["results"]:
        assert {"none", "hvdp", "ddp"} <= result["step_s"].keys()
        assert {"hvdp", "ddp"} <= result["added_s"].keys()


@pytest.mark.parametrize("script", ["allreduce.py", "train_step.py"])
def test_help_says_what_it_measures(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "--quick" in done.stdout
    assert "in one run" in done.stdout
