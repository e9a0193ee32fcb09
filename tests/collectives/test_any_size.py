"""Tests that hold for any number of ranks. Run this file alone, or every rank of it with

mpiexec -n 2 python -m pytest tests/collectives/test_any_size.py
horovodrun -np 2 python -m pytest tests/collectives/test_any_size.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hvdp as hvd
import hvdp.torch
from hvdp.errors import InvalidArgumentError, MismatchError


@pytest.fixture(scope="module", autouse=True)
def _job() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(params=["numpy", "torch"])
def ones(request: pytest.FixtureRequest) -> Any:
    """A maker of float32 tensors full of a number, and the module for them."""
    if request.param == "numpy":
        return hvd, lambda shape, value=1.0: np.full(shape, value, np.float32)
    return hvdp.torch, lambda shape, value=1.0: torch.full(shape, float(value))


def _list(tensor: Any) -> Any:
    return np.asarray(tensor).tolist()


def test_the_size_is_the_launchers() -> None:
    assert hvd.size() == int(os.environ.get("HVDP_TEST_SIZE", hvd.size()))
    assert sorted(hvd.allgather_object(hvd.rank())) == list(range(hvd.size()))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (100, 90), (300_001,)], ids=str)
def test_reductions(ones: Any, shape: tuple[int, ...]) -> None:
    module, make = ones
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    wanted = {"Sum": total, "Average": total / size, "Min": 1.0, "Max": float(size)}
    for op, value in wanted.items():
        for name in (None, f"{op} {shape}"):
            found = module.allreduce(make(shape, rank + 1.0), op=getattr(module, op), name=name)
            np.testing.assert_allclose(np.asarray(found), np.full(shape, value, np.float32), rtol=1e-6)
    place = make(shape, rank + 1.0)
    assert module.allreduce_(place, op=module.Sum) is place
    np.testing.assert_array_equal(np.asarray(place), np.full(shape, total, np.float32))


def test_movements(ones: Any) -> None:
    module, make = ones
    rank, size = hvd.rank(), hvd.size()
    assert _list(module.allgather(make((rank + 1,), rank))) == [
        float(r) for r in range(size) for _ in range(r + 1)
    ]
    for root in range(size):
        assert _list(module.broadcast(make((2,), rank), root)) == [root] * 2
    assert _list(module.alltoall(make((size,), rank))) == list(range(size))
    rows, received = module.alltoall(make((size * (rank + 1),), rank), [rank + 1] * size)
    assert _list(rows) == [float(r) for r in range(size) for _ in range(r + 1)]
    assert _list(received) == [r + 1 for r in range(size)]
    shares = [(size + 1) // size + (r < (size + 1) % size) for r in range(size)]
    assert _list(module.reducescatter(make((size + 1,)), op=module.Sum)) == [size] * shares[rank]
    first, second = module.grouped_allreduce([make((2,)), make((3,), 2.0)], op=module.Sum)
    assert (_list(first), _list(second)) == ([size] * 2, [2 * size] * 3)


def test_names_in_any_order(ones: Any) -> None:
    module, make = ones
    numbers = np.random.default_rng(hvd.rank()).permutation(50).tolist()
    handles = {n: module.allreduce_async(make((n,), n), op=module.Sum, name=f"any {n}") for n in numbers}
    for number, handle in handles.items():
        assert _list(module.synchronize(handle)) == [number * hvd.size()] * number


def test_process_sets(ones: Any) -> None:
    module, make = ones
    for last in range(hvd.size()):
        some = hvd.add_process_set(range(last + 1))
        if some.included():
            assert _list(module.allreduce(make((2,)), op=module.Sum, process_set=some)) == [last + 1] * 2
        else:
            with pytest.raises(InvalidArgumentError, match="not a member"):
                module.allreduce(make((2,)), process_set=some)
        hvd.remove_process_set(some)


def test_join(ones: Any) -> None:
    module, make = ones
    rank, size = hvd.rank(), hvd.size()
    for step in range(2 * rank):
        active = [r for r in range(size) if step < 2 * r]
        assert _list(module.allreduce(make((), rank), name="uneven")) == pytest.approx(
            sum(active) / len(active)
        )
    assert hvd.join() == size - 1


def test_errors_come_on_all_ranks_and_the_next_call_works(ones: Any) -> None:
    module, make = ones
    rank, size = hvd.rank(), hvd.size()
    if size > 1:
        with pytest.raises(MismatchError, match="shape is"):
            module.allreduce(make((2 + (rank == 0),)), name="shape")
    with pytest.raises(InvalidArgumentError, match="root_rank must be"):
        module.broadcast(make((2,)), size, name="root")
    with pytest.raises(InvalidArgumentError, match="a scalar"):
        module.reducescatter(make(()), name="scalar")
    assert _list(module.allreduce(make((2,)), op=module.Sum, name="shape")) == [size] * 2


def test_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    leaf = torch.ones(3, requires_grad=True)
    (hvdp.torch.allreduce(leaf, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert leaf.grad.tolist() == [size * (size + 1) / 2] * 3
