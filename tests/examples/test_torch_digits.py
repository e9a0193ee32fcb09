"""The README's first job, through the real launcher."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_digits.py"
LAST_LINE = re.compile(
    r"test accuracy (?P<accuracy>\d\.\d{4})  images/s (?P<speed>\d+)  ranks (?P<ranks>\d+)"
)


def run(ranks: int, *arguments: object) -> str:
    """The job's standard output."""
    script = [sys.executable, str(SCRIPT), *map(str, arguments)]
    command = [sys.executable, "-m", "hvdp.launch", "-np", str(ranks), *script] if ranks > 1 else script
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result(output: str) -> tuple[float, int]:
    """Accuracy and number of ranks, from the last line of rank 0 and no other."""
    lines = [line for line in output.splitlines() if "test accuracy" in line]
    assert len(lines) == 1, output
    found = LAST_LINE.search(lines[0])
    assert found is not None, lines[0]
    return float(found["accuracy"]), int(found["ranks"])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_learns_on_any_number_of_ranks(ranks: int) -> None:
    output = run(ranks)
    accuracy, reported = result(output)
    assert accuracy >= 0.97
    assert reported == ranks
    assert "\x1b" not in output  # no bar where there is no terminal
    assert len(re.findall(r"epoch \d+/12 ", output)) == 3  # and rank 0 alone reports


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    run(2, "--epochs", 4, "--checkpoint", whole)
    run(2, "--epochs", 2, "--checkpoint", parts)
    resumed = run(2, "--epochs", 4, "--checkpoint", parts, "--resume")
    assert "loss" in resumed
    expected, found = (torch.load(path, weights_only=True) for path in (whole, parts))
    assert found["epochs"] == expected["epochs"] == 4
    assert found["model"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    rates = [group["lr"] for group in found["optimizer"]["param_groups"]]
    assert rates == [group["lr"] for group in expected["optimizer"]["param_groups"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.pt", "whole.pt"]


def test_resuming_a_finished_run_only_tests(tmp_path: Path) -> None:
    file = tmp_path / "digits.pt"
    first = result(run(1, "--epochs", 2, "--checkpoint", file))
    again = run(1, "--epochs", 2, "--checkpoint", file, "--resume")
    assert result(again) == first
    assert "images/s 0 " in again


def test_a_checkpoint_may_be_resumed_on_other_ranks(tmp_path: Path) -> None:
    """The rate follows the ranks of the run, not those of the checkpoint."""
    file = tmp_path / "digits.pt"
    run(1, "--epochs", 4, "--checkpoint", file)
    run(2, "--epochs", 5, "--checkpoint", file, "--resume")
    (group,) = torch.load(file, weights_only=True)["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.04)


def test_resuming_before_the_first_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    output = run(1, "--epochs", 1, "--checkpoint", tmp_path / "none.pt", "--resume")
    assert "starting from the beginning" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--resume"], "--resume needs --checkpoint FILE"),
        (["--batch-size", "0"], "--batch-size: must be at least 1. Received: 0"),
        (["--epochs", "-3"], "--epochs: must be at least 1. Received: -3"),
    ],
)
def test_wrong_flags_are_explained(arguments: list[str], complaint: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_gets_a_progress_bar() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--epochs", "1"],
        stdout=theirs,
        env={**os.environ, "TERM": "xterm"},
    ) as job:
        os.close(theirs)
        shown = _read_all(ours)
    assert job.returncode == 0
    assert "\x1b[" in shown
    assert "100%" in shown
    assert "test accuracy" in shown.splitlines()[-1]


def _read_all(descriptor: int) -> str:
    shown = b""
    with open(descriptor, "rb", buffering=0) as terminal:
        try:
            while piece := terminal.read(4096):
                shown += piece
        except OSError:  # Linux reports a closed terminal this way
            pass
    return shown.decode()
