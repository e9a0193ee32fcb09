"""Ranks' lines arrive whole, with their rank, in order."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from hvdp.launch.lines import LineBuffer
from hvdp.testing import run_script

LAUNCH = [sys.executable, "-m", "hvdp.launch"]


def test_every_line_has_its_rank_and_stream(start, how) -> None:
    running = start("print('out', rank); print('err', rank, file=sys.stderr)", flags=how)
    assert running.end() == 0
    assert sorted(running.out) == ["[0]<stdout>:out 0", "[1]<stdout>:out 1"]
    assert sorted(line for line in running.err if line.startswith("[")) == [
        "[0]<stderr>:err 0",
        "[1]<stderr>:err 1",
    ]


def test_big_lines_of_four_ranks_do_not_tear(start, how) -> None:
    body = """
for i in range(40):
    sys.stdout.write(f"{i} " + "äöü€🚀"[(rank + i) % 5] * 30011 + "\\n")
"""
    running = start(body, np=4, flags=how)
    assert running.end() == 0
    seen = Counter()
    for line in running.out:
        match = re.fullmatch(r"\[(\d)\]<stdout>:(\d+) ((.)\4*)", line)
        assert match, line[:100]
        assert len(match[3]) == 30011
        # Each rank's lines keep their order.
        assert int(match[2]) == seen[match[1]]
        seen[match[1]] += 1
    assert seen == Counter({str(rank): 40 for rank in range(4)})


def test_a_slow_reader_loses_nothing(tmp_path: Path) -> None:
    program = "for i in range(30000): print('line', i)"
    with subprocess.Popen(
        [*LAUNCH, "-np", "2", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        # One rank has long ended while the pipe to us is still full.
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert len(lines) == 60000


def test_last_line_without_an_end_gets_one(start, how) -> None:
    running = start("sys.stdout.write(f'bye {rank}')", flags=how)
    assert running.end() == 0
    assert sorted(running.out) == ["[0]<stdout>:bye 0", "[1]<stdout>:bye 1"]


def test_progress_bars_show_their_last_state(start) -> None:
    running = start("sys.stdout.write(''.join(f'\\r{i}%' for i in range(101)) + '\\n')", np=1)
    assert running.end() == 0
    assert running.out[-1] == "[0]<stdout>:100%"
    assert len(running.out) < 10


def test_timestamps(start) -> None:
    running = start("print('x')", np=1, flags=("-prefix-timestamp",))
    assert running.end() == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\[0\]<stdout>:x", running.out[0])


def test_output_filename_gets_everything(start, how, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    body = "print('é', rank); sys.stdout.flush()\nif rank == 1: raise ValueError('mine')"
    running = start(body, np=2, flags=(*how, "--output-filename", str(folder)))
    assert running.end() == 1
    assert (folder / "rank.0" / "stdout").read_text() == "é 0\n"
    assert (folder / "rank.1" / "stdout").read_text() == "é 1\n"
    assert (folder / "rank.0" / "stderr").read_text() == ""
    assert (folder / "rank.1" / "stderr").read_text().rstrip().endswith("ValueError: mine")


def test_output_folders_sort(start, tmp_path: Path) -> None:
    running = start("", np=11, flags=("--output-filename", str(tmp_path)))
    assert running.end() == 0
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {f"rank.{rank:02d}" for rank in range(11)}


def test_a_closed_pipe_ends_the_job() -> None:
    program = "import itertools\nfor i in itertools.count(): print(i)"
    with subprocess.Popen(
        [*LAUNCH, "-np", "2", sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode().splitlines()
        assert process.wait(10) == 128 + signal.SIGPIPE
    assert said[-1] == "hvdprun: stopped the job: the reader of its output has gone"


def test_started_with_closed_descriptors(tmp_path: Path) -> None:
    command = [*LAUNCH, "-np", "2", "--output-filename", tmp_path, sys.executable, "-c", "print('x')"]
    done = run_script(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], timeout=20)
    assert done.status == 0
    assert (tmp_path / "rank.1" / "stdout").read_text() == "x\n"


def test_lines_are_bounded_and_split_no_character() -> None:
    buffer = LineBuffer(longest=10)
    pieces = buffer.feed("€".encode() * 7) + buffer.close()
    assert b"".join(pieces).decode() == "€" * 7
    assert all(len(piece) <= 10 and piece.decode() for piece in pieces)


def test_lines_cut_anywhere_are_the_same_lines() -> None:
    text = b"one\r\ntwo\n\n10%\r20%\r\nlast"
    for cut in range(len(text)):
        buffer = LineBuffer()
        lines = buffer.feed(text[:cut]) + buffer.feed(text[cut:]) + buffer.close()
        assert lines == [b"one", b"two", b"", b"20%", b"last"]
