"""Word vectors with sparse gradients, through the real launcher and with small settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_word2vec.py"
SMALL = "--width 8 --words 150 --text-bytes 80000 --lr 2e-2 --batch-size 256 --show self int nothing_like_it"
LAST_LINE = re.compile(
    r"\[0\]<stdout>:loss (?P<loss>\d+\.\d{4})  pairs/s (?P<speed>\d+)  ranks (?P<ranks>\d+)"
)


def run(*arguments: object, ranks: int = 2) -> str:
    """The job's standard output."""
    command = [sys.executable, "-m", "hvdp.launch", "-np", str(ranks), sys.executable, str(SCRIPT)]
    command += [*SMALL.split(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"epoch \d+/\d+  loss (\d+\.\d{4})", output)]


def test_it_learns_and_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    output = run("--epochs", 4, "--checkpoint", whole)
    first, *_, last = losses(output)
    assert last < first < 6 * 0.6932  # six times log 2 where nothing is known yet
    found = LAST_LINE.fullmatch(output.splitlines()[-1])
    assert found is not None, output
    assert float(found["loss"]) == last
    assert int(found["speed"]) > 0
    assert found["ranks"] == "2"
    for word in ("self", "int"):
        (near,) = re.findall(rf"<stdout>:{word}: (.+)", output)
        assert len(set(near.split(", ")) - {word}) == 5
    assert "nothing_like_it" not in output

    run("--epochs", 2, "--checkpoint", parts)
    resumed = run("--epochs", 4, "--checkpoint", parts, "--resume")
    assert losses(resumed) == losses(output)[2:]
    expected, other = (torch.load(path, weights_only=True) for path in (whole, parts))
    assert other["epochs"] == expected["epochs"] == 4
    for name, tensor in expected["model"].items():
        assert torch.equal(other["model"][name], tensor), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.pt", "whole.pt"]

    finished = run("--epochs", 4, "--checkpoint", whole, "--resume", ranks=1)
    assert re.findall("self: .+", finished) == re.findall("self: .+", output)
    assert f"loss {last:.4f}  pairs/s 0  ranks 1" in finished
