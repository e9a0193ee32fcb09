"""The test kit itself: values come back, and failures tell of every rank."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import psutil
import pytest

import hvdp
from hvdp.launch.environments import detect
from hvdp.testing import RanksFailed, run_ranks

OFFSET = 10


def _place(factor: int) -> tuple[int, int]:
    place = detect(os.environ)
    return place.rank * factor + OFFSET, place.size


def test_values_come_back_in_rank_order() -> None:
    assert run_ranks(_place, 3, 2) == [(10, 3), (12, 3), (14, 3)]


def test_closures_and_mpi(mpiexec: str) -> None:
    base = 5
    assert run_ranks(lambda: detect(os.environ).rank + base, 2, mpi=True) == [5, 6]


def test_variables_are_passed() -> None:
    assert run_ranks(lambda: os.environ["FLAVOUR"], 1, env={"FLAVOUR": "plum"}) == ["plum"]


def _fail() -> str:
    rank = detect(os.environ).rank
    if rank == 1:
        raise ValueError("from rank one")
    if rank == 2:
        os._exit(3)
    return "fine"


@pytest.mark.parametrize("warm", [False, True])
def test_failures_tell_of_every_rank(warm: bool) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_fail, 3, warm=warm)
    text = str(caught.value)
    assert "_fail() on 3 ranks failed" in text
    assert "rank 0: returned 'fine'" in text
    assert "ValueError: from rank one" in text
    assert "rank 2: ended without a result" in text


def _hang_here() -> None:
    if detect(os.environ).rank == 1:
        time.sleep(60)


@pytest.mark.parametrize("warm", [False, True])
def test_time_limit_dumps_stacks(warm: bool) -> None:
    if warm:
        run_ranks(_place, 2, 0, warm=True)
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_hang_here, 2, timeout=2, warm=warm)
    assert time.monotonic() - began < 10
    text = str(caught.value)
    assert "did not end within 2 s" in text
    assert "rank 1, stacks at the time limit" in text
    assert "in _hang_here" in text
    assert "rank 0: returned None" in text


def _whose_child() -> tuple[int, int, str]:
    os.environ["MARK"] = os.environ.get("MARK", "") + "x"
    hvdp.init()
    total = int(hvdp.allreduce(np.array(hvdp.rank() + 1), op=hvdp.Sum))
    return os.getppid(), total, os.environ["MARK"] + os.environ.get("HVDP_LOG_LEVEL", "")


def test_warm_ranks_make_every_call_in_a_fresh_child() -> None:
    first = run_ranks(_whose_child, 2, warm=True)
    second = run_ranks(_whose_child, 2, warm=True, env={"HVDP_LOG_LEVEL": "ERROR"})
    assert [parent for parent, *_ in first] == [parent for parent, *_ in second]
    assert [rest for _, *rest in first] == [[3, "x"]] * 2
    assert [rest for _, *rest in second] == [[3, "xERROR"]] * 2


def _killed() -> None:
    if detect(os.environ).rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_after_a_kill_there_are_new_warm_ranks() -> None:
    (before, *_), _ = run_ranks(_whose_child, 2, warm=True)
    with pytest.raises(RanksFailed, match="killed by signal 9"):
        run_ranks(_killed, 2, warm=True)
    (after, *_), _ = run_ranks(_whose_child, 2, warm=True)
    assert before != after
    assert not psutil.pid_exists(before)
