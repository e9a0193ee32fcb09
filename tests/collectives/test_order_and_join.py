"""Any order, any thread, any number of batches."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvdp as hvd
import hvdp.torch
from hvdp.errors import InvalidArgumentError
from hvdp.testing import World, worlds

NAMES, THREADS, TIMES = 200, 4, 50


def _in_threads(works: list[Callable[[], None]]) -> None:
    faults: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as fault:  # noqa: BLE001 - handed to the main thread
            faults.append(fault)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def _two_hundred_names() -> None:
    """Each rank shuffles the names anew each time, and deals them to its threads as they fall."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) // 2

    def work(turn: int, numbers: list[int]) -> None:
        handles = [
            (
                n,
                hvd.allreduce_async(
                    np.full(n % 5 + 1, (rank + 1.0) * n + turn), op=hvd.Sum, name=f"tensor {n}"
                ),
            )
            for n in numbers
        ]
        for number, handle in handles:
            assert handle.wait().tolist() == [total * number + size * turn] * (number % 5 + 1)

    for turn in range(TIMES):
        numbers = list(range(NAMES))
        random.Random(rank * TIMES + turn).shuffle(numbers)
        hands = [numbers[first::THREADS] for first in range(THREADS)]
        _in_threads([lambda hand=hand, turn=turn: work(turn, hand) for hand in hands])


@pytest.mark.parametrize("world", worlds(shm=(4,)), ids=str)
def test_any_order_from_any_thread(world: World) -> None:
    world.run(_two_hundred_names, timeout=110)


def _first_call_from_a_thread() -> float:
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(3.0)  # what is tested is a peer that comes late
    found: list[float] = []
    _in_threads([lambda: found.append(float(hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum)))])
    return found[0]


@pytest.mark.parametrize("world", worlds(shm=(2,), mpi=(2,)), ids=str)
def test_the_first_call_from_a_thread_with_a_late_peer(world: World) -> None:
    assert world.run(_first_call_from_a_thread) == [3.0, 3.0]


BATCHES = [[3, 7, 10, 10], [0, 2, 5, 1]]


def _everything_with_uneven_batches() -> list[int]:
    hvd.init()
    return [_uneven_batches(batches) for batches in BATCHES]


def _with_factors(values: list[float]) -> None:
    """A rank that has joined gives nothing that a factor could change."""
    for dtype in (np.float16, np.float32, np.int32):
        mine = np.full((hvd.size(), 2), hvd.rank() + 1, dtype)
        for op, fold in ((hvd.Product, np.prod), (hvd.Min, np.min), (hvd.Max, np.max), (hvd.Sum, np.sum)):
            for factor in (2.0, -1.0):
                wanted = fold(np.array(values) * factor) * 3
                found = hvd.allreduce(mine, op=op, prescale_factor=factor, postscale_factor=3.0)
                np.testing.assert_array_equal(found, np.full(mine.shape, wanted, dtype), strict=True)
                row = hvd.reducescatter(mine, op=op, prescale_factor=factor, postscale_factor=3.0)
                np.testing.assert_array_equal(row, np.full((1, 2), wanted, dtype), strict=True)


def _on_torch(active: list[int]) -> None:
    """Dtypes of which what a joined rank stands for could show: bounds, a truth, a rounding, a phase."""
    hvd, rank = hvdp.torch, hvdp.rank()
    values = [r + 1 for r in active]
    folds = {"Sum": sum, "Min": min, "Max": max, "Product": math.prod}
    for dtype in (torch.uint8, torch.bfloat16):
        mine = torch.full((3,), rank + 1, dtype=dtype)
        for op, fold in folds.items():
            found = hvd.allreduce(mine, op=getattr(hvd, op))
            assert torch.equal(found, torch.full((3,), fold(values), dtype=dtype))
        mean = sum(values) / len(values)
        wanted = torch.full((3,), math.floor(mean) if dtype is torch.uint8 else mean, dtype=dtype)
        torch.testing.assert_close(hvd.allreduce(mine), wanted)
    even = [r % 2 == 0 for r in active]
    truths = torch.tensor([True, False, rank % 2 == 0])
    for op, fold in {"Sum": any, "Max": any, "Min": all, "Product": all}.items():
        found = hvd.allreduce(truths, op=getattr(hvd, op))
        assert torch.equal(found, torch.tensor([True, False, fold(even)]))
    phases = [complex(value, 1) for value in values]
    mine = torch.full((3,), complex(rank + 1, 1), dtype=torch.complex64)
    for op, number in (
        ("Sum", sum(phases)),
        ("Average", sum(phases) / len(phases)),
        ("Product", math.prod(phases)),
    ):
        found = hvd.allreduce(mine, op=getattr(hvd, op))
        torch.testing.assert_close(found, torch.full((3,), number, dtype=torch.complex64))
    for tensor, each in ((truths[2:], even), (mine[:1], phases)):
        assert hvd.allgather(tensor).tolist() == each


def _uneven_batches(batches: list[int]) -> int:
    """Everything that a rank without data may be asked for, by the ranks that still have some."""
    rank, size = hvd.rank(), hvd.size()
    for step in range(batches[rank]):
        active = [r for r in range(size) if step < batches[r]]
        values = [r + 1.0 for r in active]
        for count in (2, 20_000):
            mine = np.full(count, rank + 1.0)
            for op, wanted in (
                (hvd.Average, sum(values) / len(values)),
                (hvd.Sum, sum(values)),
                (hvd.Min, min(values)),
                (hvd.Max, max(values)),
                (hvd.Product, float(np.prod(values))),
            ):
                found = hvd.allreduce(mine, op=op, name=f"{op.name} {count}")
                np.testing.assert_allclose(found, np.full(count, wanted), rtol=1e-12)
        _with_factors(values)
        _on_torch(active)
        whole = hvd.allreduce(np.array([rank + 1]), op=hvd.Average)
        assert whole.tolist() == [sum(r + 1 for r in active) // len(active)]
        assert hvd.allgather(np.array([rank, step])).tolist() == [n for r in active for n in (r, step)]
        assert hvd.broadcast(rank, active[-1]) == active[-1]
        assert hvd.allgather_object(rank) == active
        rows = hvd.reducescatter(np.full((size, 2), rank + 1.0), op=hvd.Sum)
        assert rows.tolist() == [[sum(values)] * 2]
        entries = torch.full((1, 2), rank + 1.0).to_sparse()
        for op, divisor in ((hvd.Sum, 1), (hvd.Average, len(values))):
            found = hvdp.torch.sparse_allreduce_async(entries, None, op).wait()
            assert found.to_dense().flatten().tolist() == pytest.approx([sum(values) / divisor] * 2)
        hvd.barrier()
    last = hvd.join()
    assert hvd.allreduce(1.0, op=hvd.Sum, name="after") == size, "all take part again"
    return last


@pytest.mark.parametrize("world", worlds(shm=(4,), mpi=(4,)), ids=str)
def test_join_with_uneven_batches(world: World) -> None:
    found = world.run(_everything_with_uneven_batches)
    assert found == [found[0]] * 4
    for batches, last in zip(BATCHES, found[0], strict=True):
        assert batches[last] == max(batches)


def _join_again_and_again() -> list[int]:
    hvd.init()
    lasts = []
    for turn in range(8):
        for _ in range((hvd.rank() + turn) % hvd.size()):
            hvd.allreduce(1.0, name="one")
        lasts.append(hvd.join())
    return lasts


@pytest.mark.parametrize("world", worlds(shm=(1, 3), mpi=(2,)), ids=str)
def test_the_last_to_join_is_told_every_time(world: World) -> None:
    size = world.size
    assert world.run(_join_again_and_again) == [[(size - 1 - turn) % size for turn in range(8)]] * size


def _what_needs_everybody() -> None:
    """Calls that make no sense without the joined rank are errors on the ranks that make them."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if rank:
        for call in (
            lambda: hvd.broadcast(np.zeros(2), 0, name="x"),
            lambda: hvd.alltoall(np.zeros(size), name="x"),
            lambda: hvd.add_process_set([0, 1]),
        ):
            with pytest.raises(InvalidArgumentError, match=r"needs rank 0, which called join\(\)"):
                call()
            assert hvd.allreduce(1.0, op=hvd.Sum) == size - 1
    assert hvd.join() != 0


@pytest.mark.parametrize("world", worlds(shm=(3,)), ids=str)
def test_what_needs_everybody_is_an_error_after_a_join(world: World) -> None:
    world.run(_what_needs_everybody)


def _train_twice() -> list[Any]:
    hvd.init()
    return [_train_with_uneven_batches(batches) for batches in BATCHES]


def _train_with_uneven_batches(batches: list[int]) -> list[Any]:
    """Each batch's gradient is rank + 1 everywhere; the last to join has seen every step."""
    rank, size = hvd.rank(), hvd.size()
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = hvdp.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    steps = []
    for step in range(batches[rank]):
        active = [r for r in range(size) if step < batches[r]]
        optimizer.zero_grad()
        sum((parameter * (rank + 1)).sum() for parameter in model.parameters()).backward()
        mean = sum(r + 1 for r in active) / len(active)
        steps.append(all(torch.allclose(p.grad, torch.tensor(mean)) for p in model.parameters()))
        optimizer.step()
    last = hvdp.torch.join()
    hvdp.torch.broadcast_parameters(model.state_dict(), root_rank=last)
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (values == values[0]).all()
    return [last, all(steps), float(values[0])]


@pytest.mark.parametrize("world", worlds(shm=(4,), mpi=(4,)), ids=str)
def test_training_with_uneven_batches(world: World) -> None:
    found = world.run(_train_twice, env={"HVDP_FUSION_THRESHOLD": "1000"})
    for number, batches in enumerate(BATCHES):
        total = 0.0
        for step in range(max(batches)):
            active = [rank + 1 for rank, count in enumerate(batches) if step < count]
            total -= sum(active) / len(active)
        for last, right, value in (each[number] for each in found):
            assert right
            assert batches[last] == max(batches)
            assert value == pytest.approx(total, rel=1e-6)
