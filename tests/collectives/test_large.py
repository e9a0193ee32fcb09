"""More than 2 GiB in one tensor, where counts no longer fit 32 bits."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

import hvdp as hvd
from hvdp.testing import World, worlds

COUNT = (1 << 31) + (1 << 27) + 3
NEEDED = 12 << 30  # bytes: a tensor on each of 2 ranks, one result at a time, and what the transport takes
PART = 1 << 26


def _all_are(array: np.ndarray, value: int) -> bool:
    """Without another array of that size."""
    return all((array[start : start + PART] == value).all() for start in range(0, array.size, PART))


def _every_way() -> None:
    hvd.init()
    mine = np.full(COUNT, hvd.rank() + 1, np.uint8)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert _all_are(mine, 3)
    mine[-1] = 7 + hvd.rank()
    hvd.broadcast_(mine, 1)
    assert mine[-1] == 8
    assert _all_are(mine[:-1], 3)
    mine[0] = hvd.rank()
    # In one direction only: more new memory would take most of the time.
    sent, splits = (mine[:1], [1, 0]) if hvd.rank() else (mine, [0, COUNT])
    exchanged, received = hvd.alltoall(sent, splits)
    assert received.tolist() == ([COUNT, 0] if hvd.rank() else [0, 1])
    assert exchanged[0] == 1 - hvd.rank()
    if hvd.rank():
        assert exchanged[-1] == 8
        assert _all_are(exchanged[1:-1], 3)
    del exchanged
    shared = hvd.reducescatter(mine, op=hvd.Sum)
    assert shared.size == COUNT // 2 + (hvd.rank() == 0)
    assert (shared[0], shared[-1]) == ((1, 6) if hvd.rank() == 0 else (6, 16))
    assert _all_are(shared[1:-1], 6)
    del shared
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
    world.run(_every_way, timeout=110)
