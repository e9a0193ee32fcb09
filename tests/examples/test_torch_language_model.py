"""The small GPT, through the real launcher and with small settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_language_model.py"
SMALL = (
    "--width 16 --layers 2 --heads 2 --context 16 --text-bytes 40000 --lr 8e-3 --warmup 4 --report-every 8"
)
LAST_LINE = re.compile(
    r"\[0\]<stdout>:perplexity (?P<perplexity>\d+\.\d\d)  tokens/s (?P<speed>\d+)  ranks (?P<ranks>\d+)"
)


def run(*arguments: object, ranks: int = 2) -> str:
    """The job's standard output."""
    command = [sys.executable, "-m", "hvdp.launch", "-np", str(ranks), sys.executable, str(SCRIPT)]
    command += [*SMALL.split(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def perplexities(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"step .* perplexity (\d+\.\d\d)", output)]


def test_it_learns_and_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    output = run("--steps", 16, "--checkpoint", whole)
    first, *_, last = perplexities(output)
    assert first > 150  # of 256 bytes: nothing is known yet
    assert last < 40
    found = LAST_LINE.fullmatch(output.splitlines()[-1])
    assert found is not None, output
    assert float(found["perplexity"]) == last
    assert int(found["speed"]) > 0
    assert found["ranks"] == "2"

    run("--steps", 8, "--checkpoint", parts)
    resumed = run("--steps", 16, "--checkpoint", parts, "--resume")
    assert perplexities(resumed) == perplexities(output)[1:]
    expected, other = (torch.load(path, weights_only=True) for path in (whole, parts))
    assert other["steps"] == expected["steps"] == 16
    for name, tensor in expected["model"].items():
        assert torch.equal(other["model"][name], tensor), name
    for number, state in expected["optimizer"]["state"].items():
        for name, tensor in state.items():
            assert torch.equal(other["optimizer"]["state"][number][name], tensor), (number, name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.pt", "whole.pt"]

    # Each byte of the validation text is counted once, on 3 ranks as on 2.
    finished = run("--steps", 16, "--checkpoint", whole, "--resume", ranks=3)
    assert perplexities(finished) == pytest.approx([last], abs=0.011)
    assert "tokens/s 0  ranks 3" in finished


def test_bfloat16_and_more_passes_learn_too() -> None:
    output = run("--steps", 16, "--bf16", "--accumulate", 4)
    assert perplexities(output)[-1] < 40


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--heads", "3"], "--heads must divide --width. Received: 3 and 128"),
        (["--text-bytes", "100"], "--text-bytes 100 leaves a rank without a window of 128"),
    ],
)
def test_wrong_flags_are_explained(arguments: list[str], complaint: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
