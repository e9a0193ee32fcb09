"""The timeline: what is in it, from when to when, and that nothing spoils it."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdp as hvd
from hvdp.errors import InvalidArgumentError
from hvdp.testing import World, run_script, worlds


def _some_calls(name: str) -> None:
    for count in (10, 100_000):
        hvd.allreduce(np.ones(count, np.float32), name=f"{name} {count}")
    hvd.allgather(np.zeros((hvd.rank() + 1, 4), np.int64), name=f"{name} rows")
    hvd.barrier()


def _record_in_the_middle(folder: str) -> None:
    hvd.init()
    some = hvd.add_process_set([0, 1])
    if hvd.rank() == 0:
        with pytest.raises(InvalidArgumentError, match="the timeline cannot be written to"):
            hvd.start_timeline(f"{folder}/no/such/folder")
    _some_calls("before")
    for number in range(2):
        hvd.start_timeline(f"{folder}/{number}.json", mark_cycles=number == 1)
        hvd.barrier()
        _some_calls(f"during {number}")
        if some.included():
            hvd.allreduce(np.ones(3), name="in a set", process_set=some)
        hvd.barrier()
        if number:
            hvd.stop_timeline()
        hvd.barrier()
    _some_calls("after")


def _slices(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


@pytest.mark.parametrize("world", worlds(shm=(3,), mpi=(2,)), ids=str)
def test_from_start_to_stop(world: World, tmp_path: Path) -> None:
    world.run(_record_in_the_middle, str(tmp_path))
    for number in range(2):
        path = tmp_path / f"{number}.json"
        events = json.loads(path.read_text())
        names = {event["name"] for event in _slices(path)}
        assert {
            f"during {number} 10",
            f"during {number} 100000",
            f"during {number} rows",
            "in a set",
        } <= names
        assert not {name for name in names if name.startswith(("before", "after", f"during {1 - number}"))}
        lanes = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in events
            if event["name"] == "thread_name"
        }
        ranks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert ranks == {rank: f"rank {rank}" for rank in range(world.size)}
        sets = {(rank, 0) for rank in range(world.size)} | {(rank, _apart(world.size)) for rank in range(2)}
        assert lanes == {(rank, number): f"process set {number}" for rank, number in sets}
        _check_slices(_slices(path), number, world.size)
        assert any(event["ph"] == "i" and event["name"] == "round" for event in events) == (number == 1)


def _apart(size: int) -> int:
    """The number of the set of ranks 0 and 1, which of two ranks is that of all."""
    return 0 if size == 2 else 1


def _check_slices(slices: list[dict[str, Any]], number: int, size: int) -> None:
    """Each operation is two on every member's lane, one after the other, with its bytes."""
    nbytes = {f"during {number} 10": 40, f"during {number} 100000": 400_000, "in a set": 24}
    for rank in range(size):
        mine = [event for event in slices if event["pid"] == rank]
        for name, count in (*nbytes.items(), (f"during {number} rows", 32 * (rank + 1))):
            found = [event for event in mine if event["name"] == name]
            if name == "in a set" and rank > 1:
                assert not found
                continue
            agree, run = found
            assert (agree["args"]["phase"], agree["cat"]) == ("agree", "agree")
            assert (
                run["args"]["phase"] == run["cat"] == ("allgather" if name.endswith("rows") else "allreduce")
            )
            assert agree["args"]["bytes"] == run["args"]["bytes"] == count
            assert agree["tid"] == run["tid"] == (_apart(size) if name == "in a set" else 0)
            assert agree["dur"] >= 0
            assert run["dur"] > 0
            assert agree["ts"] >= 0
            assert run["ts"] == pytest.approx(agree["ts"] + agree["dur"], abs=0.01)


PROGRAM = """
import os, signal
import numpy as np
import hvdp as hvd

hvd.init()
for step in range(1000):
    handles = [hvd.allreduce_async(np.ones(n), name=f"tensor {n}") for n in range(50)]
    if hvd.rank() == WHO and step == STEP:
        os.kill(os.getpid(), signal.SIGKILL)
    for handle in handles:
        handle.wait()
"""


@pytest.mark.parametrize(("who", "step"), [(0, 3), (0, 17), (1, 8)])
def test_a_killed_rank_leaves_complete_json(who: int, step: int, tmp_path: Path) -> None:
    script, trace = tmp_path / "killed.py", tmp_path / "trace.json"
    script.write_text(PROGRAM.replace("WHO", str(who)).replace("STEP", str(step)))
    done = run_script(
        [sys.executable, "-m", "hvdp.launch", "-np", "2", sys.executable, script],
        env={"HOROVOD_TIMELINE": str(trace), "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
    )
    assert done.status == 137, done.stderr
    found = _slices(trace)
    for rank in range(2):
        count = sum(event["pid"] == rank and event["name"] == "tensor 49" for event in found)
        # The last step or two of the other rank's may not have reached the one that writes.
        assert 2 * (step - 2) <= count <= 2 * (step + 1)
    assert any(event["ph"] == "i" for event in json.loads(trace.read_text()))


def _events_now(path: str) -> list[object]:
    """Complete between two writes; whoever reads in the middle of one looks again."""
    for _ in range(10):
        with contextlib.suppress(json.JSONDecodeError):
            events: list[object] = json.loads(Path(path).read_text())
            return events
    raise AssertionError(f"never complete: {Path(path).read_text()[-300:]}")


def _read_while_running(path: str) -> int:
    hvd.init()
    lengths = []
    for step in range(30):
        hvd.allreduce(np.ones(10), name=f"step {step}")
        hvd.barrier()
        if hvd.rank() == 0:
            lengths.append(len(_events_now(path)))
        hvd.barrier()
    assert lengths == sorted(lengths)
    return len(set(lengths))


def test_the_file_is_complete_while_the_job_runs(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.json")
    first, _ = World("shm", 2).run(_read_while_running, path, env={"HVDP_TIMELINE": path})
    assert first > 20
    assert {f"step {step}" for step in range(30)} <= {event["name"] for event in _slices(Path(path))}
