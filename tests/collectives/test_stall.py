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


def _stall_twice() -> list[str]:
    """Rank 1 holds two tensors back, the second one for longer than the first warning took."""
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
    return heard.texts


@pytest.mark.parametrize("world", worlds(shm=(3,), mpi=(2,)), ids=str)
def test_one_warning_a_tensor_on_rank_0(world: World) -> None:
    first, *others = world.run(_stall_twice, env=EVERY_SECOND)
    assert others == [[]] * (world.size - 1)
    names = [re.search(r"'([^']+)'", text).group(1) for text in first]
    # The barriers that the other ranks wait at meanwhile are held back, too, by rank 0.
    assert [name for name in names if name in ("first", "second")] == ["first", "second"]
    for text in first:
        if "allreduce" in text:
            present = "rank 0" if world.size == 2 else "ranks 0, 2"
            assert re.match(
                r"WARNING stalled for [1-4] s: allreduce '(first|second)' was submitted by ", text
            )
            assert f"was submitted by {present} and not by rank 1. " in text


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
