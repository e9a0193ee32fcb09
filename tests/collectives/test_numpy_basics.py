"""The collectives on NumPy arrays against closed forms, on real ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hvdp as hvd
from hvdp.errors import InvalidArgumentError, MismatchError, NotInitializedError
from hvdp.testing import World, worlds

every_world = pytest.mark.parametrize("world", worlds(shm=(1, 2, 3, 4), mpi=(2, 3)), ids=str)
pairs = pytest.mark.parametrize("world", worlds(shm=(2,), mpi=(2,)), ids=str)


def _same(found: Any, wanted: Any, dtype: Any) -> None:
    """Values, shape and dtype."""
    np.testing.assert_array_equal(found, np.asarray(wanted, dtype), strict=True)


def _place() -> tuple[int, int]:
    """Rank and size, after `init`."""
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    return hvd.rank(), hvd.size()


def _reductions() -> None:
    rank, size = _place()
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    total, items = size * (size + 1) // 2, np.arange(6.0).reshape(2, 3)
    for dtype in (np.float16, np.float32, np.float64, np.complex64):
        mine = (items * (rank + 1)).astype(dtype)
        kept = mine.copy()
        _same(hvd.allreduce(mine, op=hvd.Sum), items * total, dtype)
        _same(hvd.allreduce(mine, average=False), items * total, dtype)
        average = hvd.allreduce(mine)
        assert average.dtype == dtype
        np.testing.assert_allclose(average, items * total / size, rtol=1e-3)
        np.testing.assert_array_equal(mine, kept)
    for dtype in (np.int8, np.uint8, np.int32, np.int64):
        mine = (items * (rank + 1)).astype(dtype)
        _same(hvd.allreduce(mine, op=hvd.Sum), items * total, dtype)
        _same(hvd.allreduce(mine), items * total // size, dtype)
    mine = items * (rank + 1)
    _same(hvd.allreduce(mine, op=hvd.Min), items, np.float64)
    _same(hvd.allreduce(mine, op=hvd.Max), items * size, np.float64)
    _same(
        hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), items * total * 2, float
    )
    _same(hvd.allreduce(np.full(5, 2), op=hvd.Product), np.full(5, 2**size), np.int64)
    _same(hvd.allreduce([rank == 0, False], op=hvd.Sum), [True, False], bool)
    _same(hvd.allreduce([rank == 0, True], op=hvd.Min), [size == 1, True], bool)
    _same(hvd.allreduce(float(rank), op=hvd.Sum), total - size, float)
    _same(hvd.allreduce([[1, 2]], op=hvd.Sum), [[size, 2 * size]], np.int64)
    _same(hvd.allreduce(np.empty((3, 0), np.float32)), np.empty((3, 0)), np.float32)
    for count in (8191, 8193, 600_001):
        _same(
            hvd.allreduce(np.full(count, rank + 1, np.float32), op=hvd.Sum), np.full(count, total), np.float32
        )
    place = np.full(4, rank, np.float32)
    assert hvd.allreduce_(place, op=hvd.Sum, name="in place") is place
    _same(place, np.full(4, total - size), np.float32)
    handles = [hvd.allreduce_async(np.full(i, rank + 1.0), op=hvd.Sum) for i in range(20)]
    other = hvd.allreduce_async_(place, op=hvd.Max)
    for count, handle in enumerate(handles):
        _same(hvd.synchronize(handle), np.full(count, total), float)
        assert hvd.poll(handle)
        _same(handle.wait(), np.full(count, total), float)
    assert hvd.synchronize(other) is place


def _movements() -> None:
    rank, size = _place()
    for root in range(size):
        mine = np.full((2, 2), rank, np.int16)
        _same(hvd.broadcast(mine, root), np.full((2, 2), root), np.int16)
        _same(mine, np.full((2, 2), rank), np.int16)
        assert hvd.broadcast_(mine, root_rank=root, name=f"from {root}") is mine
        _same(mine, np.full((2, 2), root), np.int16)
        _same(hvd.synchronize(hvd.broadcast_async(float(rank), root)), root, float)
        assert hvd.synchronize(hvd.broadcast_async_(mine, root)) is mine
        _same(hvd.broadcast(np.full(700_001, rank, np.float64), root), np.full(700_001, root), float)
    rows = [np.full((r, 3), r) for r in range(size)]
    _same(hvd.allgather(rows[rank]), np.concatenate(rows), np.int64)
    _same(hvd.allgather(np.float32(rank)), np.arange(size), np.float32)
    _same(hvd.synchronize(hvd.allgather_async([rank, rank])), np.repeat(np.arange(size), 2), np.int64)
    _same(hvd.allgather(np.zeros((0, 2), np.uint8)), np.zeros((0, 2)), np.uint8)
    _same(hvd.allgather(np.zeros((2, 0))), np.zeros((2 * size, 0)), float)
    ones = np.repeat(np.arange(size) == 1, 2)
    _same(hvd.allgather(np.full((3, 2), rank == 1)[::2]), np.stack([ones, ones], axis=1), bool)
    assert hvd.allgather_object({"rank": rank, "more": [None] * rank}) == [
        {"rank": r, "more": [None] * r} for r in range(size)
    ]
    for root in range(size):
        sent = {"root": root, "call": lambda x, root=root: x + root}
        found = hvd.broadcast_object(sent if rank == root else None, root_rank=root, name="object")
        assert found["root"] == root
        assert found["call"](1) == root + 1
        assert (found is sent) == (rank == root)
    hvd.barrier()


def _layouts() -> None:
    """In place, whatever the memory order; what lies between the items is left alone."""
    rank, size = _place()
    total = size * (size + 1) // 2
    base = np.arange(24.0).reshape(4, 6)
    views: list[Callable[[Any], Any]] = [
        lambda a: a.T,
        lambda a: a[::2, 1::3],
        lambda a: a[:, 2],
        lambda a: a[::-1],
        lambda a: np.asfortranarray(a)[1:3],
        lambda a: a.reshape(2, 2, 6).transpose(2, 0, 1),
    ]
    for number, view in enumerate(views):
        for call, factor in ((lambda t: hvd.allreduce_(t, op=hvd.Sum), total), (_from_last, size)):
            whole = base * (rank + 1)
            part = view(whole)
            strides = part.strides
            assert call(part) is part
            assert part.strides == strides
            np.testing.assert_array_equal(part, view(base) * factor, err_msg=f"view {number}")
            untouched = np.ones(whole.shape, bool)
            view(untouched)[...] = False
            if np.shares_memory(part, whole):
                np.testing.assert_array_equal(whole[untouched], (base * (rank + 1))[untouched])


def _from_last(tensor: Any) -> Any:
    return hvd.broadcast_(tensor, hvd.size() - 1)


def _errors() -> list[str]:
    rank, size = _place()
    odd = rank == size - 1
    frozen = np.zeros(2)
    frozen.flags.writeable = not odd
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (MismatchError, lambda: hvd.allreduce(np.zeros(2 + odd), name="shape")),
        (MismatchError, lambda: hvd.allreduce(np.zeros(2, "f4" if odd else "f8"), name="dtype")),
        (MismatchError, lambda: hvd.allreduce(np.zeros(2), op=hvd.Max if odd else hvd.Sum, name="op")),
        (MismatchError, lambda: hvd.allreduce(np.zeros(2), prescale_factor=1.0 + odd, name="factor")),
        (MismatchError, lambda: hvd.broadcast(np.zeros(2), root_rank=int(odd), name="root")),
        (MismatchError, lambda: hvd.allgather(np.zeros((1, 2 + odd)), name="columns")),
        (InvalidArgumentError, lambda: hvd.broadcast(np.zeros(2), root_rank=size, name="no such root")),
        (InvalidArgumentError, lambda: hvd.allreduce(np.array(["a"] if odd else [1.0]), name="text")),
        (InvalidArgumentError, lambda: hvd.allreduce(np.zeros(2, bool), name="average of bools")),
        (InvalidArgumentError, lambda: hvd.allreduce_(frozen, name="read-only")),
        (InvalidArgumentError, lambda: hvd.allgather_object(threading.Lock() if odd else 1)),
        (InvalidArgumentError, lambda: hvd.broadcast_object(threading.Lock(), root_rank=size - 1)),
    ]
    texts = []
    for number, (kind, call) in enumerate(wrong):
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind
        texts.append(str(caught.value))
        _same(hvd.allreduce(np.ones(3), op=hvd.Sum, name=f"after {number}"), [size] * 3, float)
    return texts


def _one_name_twice() -> None:
    rank, size = _place()
    if rank == 0:
        first = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="twice")
        with pytest.raises(InvalidArgumentError, match=r"rank 0 submitted allreduce 'twice' while one"):
            hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="twice")
    hvd.barrier()
    if rank:
        first = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="twice")
    _same(first.wait(), [size] * 3, float)


@every_world
def test_reductions(world: World) -> None:
    world.run(_reductions)


@every_world
def test_movements_and_objects(world: World) -> None:
    world.run(_movements)


@every_world
def test_memory_order_is_kept_in_place(world: World) -> None:
    world.run(_layouts)


@pytest.mark.parametrize("world", worlds(shm=(2, 3), mpi=(2,)), ids=str)
def test_an_error_comes_on_all_ranks_alike_and_the_next_call_works(world: World) -> None:
    first, *others = world.run(_errors)
    assert all(texts == first for texts in others)
    last = world.size - 1
    values = "rank 0" if world.size == 2 else "ranks 0, 1"
    shape, dtype, op, factor, root, columns, no_root, text, bools, frozen, unpicklable, _ = first
    assert f"'shape': shape is (2,) on {values}, (3,) on rank {last}." in shape
    assert f"dtype is float64 on {values}, float32 on rank {last}." in dtype
    assert f"op is Sum on {values}, Max on rank {last}." in op
    assert f"prescale_factor is 1.0 on {values}, 2.0 on rank {last}." in factor
    assert f"root_rank is 0 on {values}, 1 on rank {last}." in root
    assert f"shape is (2,) on {values}, (3,) on rank {last}." in columns
    assert "root_rank must be one of the ranks" in no_root
    assert text.startswith(f"rank {last}: ")
    assert "cannot carry" in text
    assert "op Average has no meaning for dtype bool" in bools
    assert frozen.startswith(f"rank {last}: ")
    assert "read-only" in frozen
    assert f"the object of rank {last} cannot be pickled" in unpicklable


@pairs
def test_one_name_twice_at_a_time_is_refused(world: World) -> None:
    world.run(_one_name_twice)


_ARRAY = np.zeros(2)
_CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"), ()),
    **dict.fromkeys(("is_homogeneous", "barrier"), ()),
    **dict.fromkeys(("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"), (_ARRAY,)),
    **dict.fromkeys(("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"), (_ARRAY, 0)),
    **dict.fromkeys(("allgather", "allgather_async"), (_ARRAY,)),
    **dict.fromkeys(("broadcast_object", "allgather_object"), (None,)),
}


@pytest.mark.parametrize("name", _CALLS)
def test_before_init_every_call_says_so_in_one_line(name: str) -> None:
    with pytest.raises(NotInitializedError) as caught:
        getattr(hvd, name)(*_CALLS[name])
    text = str(caught.value)
    assert text.startswith("hvdp is not initialised: call hvd.init() before hvd.")
    assert "\n" not in text
    assert not hvd.is_initialized()
    hvd.shutdown()
