"""Splits, shapes and process sets that hypothesis draws; all ranks get the same examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hvdp as hvd
from hvdp.testing import World, worlds

EXAMPLES = 60
DTYPES = st.sampled_from(["uint8", "int32", "float16", "float64", "complex64"])
RESTS = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def _drawn(strategy: st.SearchStrategy[Any]) -> list[Any]:
    """The same ones every time. Drawn here and not by the ranks, which could not shrink in step."""
    found: list[Any] = []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    assert len(found) >= EXAMPLES // 2
    return found


def _cases(size: int) -> st.SearchStrategy[Any]:
    """Rows by source and destination, what a row is, and a process set."""
    rows = st.one_of(st.integers(0, 3), st.integers(0, 3000))
    matrix = st.lists(st.lists(rows, min_size=size, max_size=size), min_size=size, max_size=size)
    members = st.sets(st.integers(0, size - 1), min_size=1).map(sorted)
    return st.tuples(matrix, RESTS, DTYPES, members, st.integers(0, size - 1))


def _values(rank: int, to: int, rows: int, rest: tuple[int, ...], dtype: str) -> Any:
    items = np.arange(rows * math.prod(rest)).reshape(rows, *rest) % 5
    return (items + rank * 11 + to * 3).astype(dtype)


def _same(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(found, wanted, strict=True)


def _check(case: Any) -> None:
    matrix, rest, dtype, members, root = case
    rank, size = hvd.rank(), hvd.size()
    process_set = hvd.add_process_set(members)
    if rank in members:
        own, count = members.index(rank), len(members)
        counts = [matrix[source][:count] for source in members]
        sent = [_values(rank, to, rows, rest, dtype) for to, rows in enumerate(counts[own])]
        rows, received = hvd.alltoall(np.concatenate(sent), counts[own], process_set=process_set)
        parts = [_values(s, own, counts[i][own], rest, dtype) for i, s in enumerate(members)]
        _same(rows, np.concatenate(parts))
        assert received.tolist() == [line[own] for line in counts]
        gathered = hvd.allgather(_values(rank, 0, counts[own][0], rest, dtype), process_set=process_set)
        _same(
            gathered,
            np.concatenate([_values(s, 0, counts[i][0], rest, dtype) for i, s in enumerate(members)]),
        )
        first = matrix[0][0]
        base = _values(0, 0, first, rest, dtype)
        shared = hvd.reducescatter(base * (own + 1), op=hvd.Sum, process_set=process_set)
        shares = [first // count + (i < first % count) for i in range(count)]
        start = sum(shares[:own])
        total = (base * sum(range(1, count + 1))).astype(dtype)
        _same(shared, total[start : start + shares[own]])
        reduced = hvd.allreduce(base * (own + 1), op=hvd.Sum, process_set=process_set)
        _same(reduced, total)
        source = members[root % count]
        sent_by_root = hvd.broadcast(base + rank, source, process_set=process_set)
        _same(sent_by_root, (base + source).astype(sent_by_root.dtype))
    assert hvd.allreduce(1, op=hvd.Sum) == size
    hvd.remove_process_set(process_set)


def _check_all(cases: list[Any]) -> None:
    hvd.init()
    for case in cases:
        _check_or_tell(case)


def _check_or_tell(case: Any) -> None:
    try:
        _check(case)
    except Exception as error:
        raise AssertionError(f"rank {hvd.rank()} failed with {case}") from error


@pytest.mark.parametrize("world", worlds(shm=(2, 4), mpi=(3,)), ids=str)
def test_drawn_shapes_splits_and_sets(world: World) -> None:
    world.run(_check_all, _drawn(_cases(world.size)), timeout=100)
