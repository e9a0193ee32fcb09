"""The test kit itself: values come back, and failures tell of every rank."""

from __future__ import annotations

import os
import time

import pytest

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


def test_failures_tell_of_every_rank() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_fail, 3)
    text = str(caught.value)
    assert "_fail() on 3 ranks failed" in text
    assert "rank 0: returned 'fine'" in text
    assert "ValueError: from rank one" in text
    assert "rank 2: ended without a result" in text


def _hang_here() -> None:
    if detect(os.environ).rank == 1:
        time.sleep(60)


def test_time_limit_dumps_stacks() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_hang_here, 2, timeout=2)
    assert time.monotonic() - began < 10
    text = str(caught.value)
    assert "did not end within 2 s" in text
    assert "rank 1, stacks at the time limit" in text
    assert "in _hang_here" in text
    assert "rank 0: returned None" in text
