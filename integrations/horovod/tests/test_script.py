"""Old scripts and old commands, on real ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hvdp
from hvdp.testing import run_script

SCRIPT = Path(__file__).with_name("old_script.py")
KERAS_SCRIPT = Path(__file__).with_name("old_keras_script.py")


@pytest.mark.parametrize(
    ("launcher", "option"),
    [("hvdp.launch", "--batch-size=16"), ("horovod.runner.launch", "--fp16-allreduce")],
)
def test_an_old_script_trains_on_two_ranks(launcher: str, option: str) -> None:
    done = run_script([sys.executable, "-m", launcher, "-np", "2", sys.executable, SCRIPT, option])
    assert done.status == 0, done.stderr
    assert "horovod 0.28.1 ranks 2 same True falls True" in done.stdout


def test_an_old_script_runs_without_a_launcher() -> None:
    done = run_script([sys.executable, SCRIPT, "--epochs", "1"])
    assert done.status == 0, done.stderr
    assert "ranks 1 same True" in done.stdout


@pytest.mark.parametrize("module", ["keras", "tensorflow.keras"])
def test_an_old_keras_script_trains_on_two_ranks(module: str) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    done = run_script([sys.executable, "-m", "hvdp.launch", "-np", "2", sys.executable, KERAS_SCRIPT, module])
    assert done.status == 0, done.stderr
    assert "ranks 2 same True losses 1 falls True" in done.stdout


def test_the_launcher_under_its_old_module_name_is_hvdps() -> None:
    done = run_script([sys.executable, "-m", "horovod.runner.launch", "--version"])
    assert (done.status, done.stdout) == (0, f"{hvdp.__version__}\n"), done.stderr
