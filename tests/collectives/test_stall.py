"""Tensors that some ranks do not submit are reported once, and end the job where that was asked for."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import hvdp as hvd
from hvdp.errors import HorovodInternalError
from hvdp.testing import World, run_script, worlds

EVERY_SECOND = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}


class _Heard(logging.Handler):
    """What hvdp has logged; `wait` returns once a text has been."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._news = threading.Condition()
        logging.getLogger("hvdp").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        with self._news:
            self.texts.append(f"{record.levelname} {record.getMessage()}")
            self._news.notify_all()

    def wait(self, text: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: any(text in heard for heard in self.texts), 20), self.texts


def _stall_again_and_again() -> list[str]:
    """Rank 1 holds two tensors back, the second one for longer than the first warning took.

    Then rank 0 does, which watches all the same, and then a member of a set that it is not in.
    """
    hvd.init()
    rank, heard, handles = hvd.rank(), _Heard(), []
    for name in ("first", "second"):
        if rank != 1:
            handles.append(hvd.allreduce_async(np.ones(2), op=hvd.Sum, name=name))
        if rank == 0:
            heard.wait(repr(name))
        hvd.barrier()
    if rank == 1:
        handles = [hvd.allreduce_async(np.ones(2), op=hvd.Sum, name=name) for name in ("first", "second")]
    for handle in handles:
        assert handle.wait().tolist() == [hvd.size()] * 2
    _hold_back(heard, 0, "third", hvd.global_process_set)
    if hvd.size() > 2:
        _hold_back(heard, 2, "fourth", hvd.add_process_set([1, 2]))
    return heard.texts


def _hold_back(heard: _Heard, late: int, name: str, members: hvd.ProcessSet) -> None:
    rank = hvd.rank()
    mine = members.included()
    if mine and rank != late:
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name=name, process_set=members)
    if rank == 0:
        heard.wait(repr(name))
    hvd.barrier()
    if rank == late:
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name=name, process_set=members)
    if mine:
        assert handle.wait().tolist() == [members.size()] * 2
    hvd.barrier()


@pytest.mark.parametrize("world", worlds(shm=(3,), mpi=(2,)), ids=str)
def test_one_warning_a_tensor_on_rank_0(world: World) -> None:
    first, *others = world.run(_stall_again_and_again, env=EVERY_SECOND)
    assert others == [[]] * (world.size - 1)
    but_1, but_0 = ("rank 0", "rank 1") if world.size == 2 else ("ranks 0, 2", "ranks 1, 2")
    wanted = [("'first'", but_1, 1), ("'second'", but_1, 1), ("'third'", but_0, 0)]
    if world.size > 2:
        wanted.append(("'fourth' in process set 1", "rank 1", 2))
    # The barriers that some ranks wait at meanwhile are held back, too.
    told = [text for text in first if "allreduce" in text]
    assert len(told) == len(wanted), told
    for text, (what, present, late) in zip(told, wanted, strict=True):
        assert re.match(r"WARNING stalled for [1-4] s: allreduce ", text), text
        assert f": allreduce {what} was submitted by {present} and not by rank {late}. " in text


def _silent() -> list[str]:
    hvd.init()
    heard = _Heard()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(np.ones(2), name="late")
        time.sleep(2.5)  # there is no event to wait for: nothing must happen
        assert not handle.poll()
    hvd.barrier()
    if hvd.rank():
        handle = hvd.allreduce_async(np.ones(2), name="late")
    handle.wait()
    return heard.texts


def test_the_watch_can_be_disabled() -> None:
    found = World("shm", 2).run(_silent, env={**EVERY_SECOND, "HOROVOD_STALL_CHECK_DISABLE": "1"})
    assert found == [[], []]


def _until_the_end() -> str:
    """Rank 1 waits for something else, and is told as the others are."""
    hvd.init()
    handle = hvd.allreduce_async(np.ones(2), name="other" if hvd.rank() == 1 else "late")
    with pytest.raises(HorovodInternalError) as caught:
        handle.wait()
    return str(caught.value)


@pytest.mark.parametrize("world", worlds(shm=(3,), mpi=(2,)), ids=str)
def test_a_long_stall_ends_all_ranks(world: World) -> None:
    found = world.run(_until_the_end, env={**EVERY_SECOND, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"})
    assert found == [found[0]] * world.size
    assert re.match(
        r"stalled for [2-6] s, more than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: allreduce '", found[0]
    )
    assert "was submitted by " in found[0]
    assert " and not by " in found[0]


PROGRAM = """
import threading
import numpy as np
import hvdp as hvd

hvd.init()
hvd.allreduce(np.ones(2), name="together")
if hvd.rank() == 0:
    hvd.allreduce(np.ones(2), name="rank 0 alone")
threading.Event().wait()
"""


def test_the_report_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "stall.py"
    script.write_text(PROGRAM)
    env = {**EVERY_SECOND, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    done = run_script([sys.executable, "-m", "hvdp.launch", "-np", "2", sys.executable, script], env=env)
    assert not done.timed_out
    assert done.status != 0
    report = r"stalled for \d+ s, more than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: allreduce 'rank 0 alone' "
    assert re.search(report + "was submitted by rank 0 and not by rank 1", done.stderr), done.stderr
    assert re.search(r"hvdp: stalled for 1 s: allreduce 'rank 0 alone'", done.stderr), done.stderr
