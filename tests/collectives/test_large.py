"""More than 2 GiB in one tensor, where counts no longer fit 32 bits."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

import hvdp as hvd
from hvdp.testing import World, worlds

COUNT = (1 << 31) + (1 << 27) + 3
NEEDED = 12 << 30  # bytes: a tensor on each of 2 ranks, a result, and what the transport takes
PART = 1 << 26


def _all_are(array: np.ndarray, value: int) -> bool:
    """Without another array of that size."""
    return all((array[start : start + PART] == value).all() for start in range(0, array.size, PART))


def _in_place_and_gathered() -> None:
    hvd.init()
    mine = np.full(COUNT, hvd.rank() + 1, np.uint8)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert _all_are(mine, 3)
    mine[-1] = 7 + hvd.rank()
    hvd.broadcast_(mine, 1)
    assert mine[-1] == 8
    assert _all_are(mine[:-1], 3)
    rows = mine[: COUNT // 2 + hvd.rank()]
    rows[...] = hvd.rank()
    gathered = hvd.allgather(rows)
    assert gathered.size == 2 * (COUNT // 2) + 1
    assert _all_are(gathered[: COUNT // 2], 0)
    assert _all_are(gathered[COUNT // 2 :], 1)


@pytest.mark.parametrize("world", worlds(shm=(2,), mpi=(2,)), ids=str)
def test_more_than_two_gibibytes(world: World) -> None:
    free = psutil.virtual_memory().available
    if free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of memory, {free >> 30} GiB are free")
    world.run(_in_place_and_gathered, timeout=110)
