"""Gradients of the synchronous torch collectives: those of the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError
from hvdp.testing import World, worlds

ITEMS = torch.arange(6.0).reshape(2, 3) + 1


def _gradient(call: Callable[[Any], Any], leaf: torch.Tensor, weight: Any) -> torch.Tensor:
    """Of the sum of what `call` returns, times this rank's weight, with respect to `leaf`."""
    leaf = leaf.clone().requires_grad_()
    result = call(leaf)
    assert result.requires_grad
    (result * weight).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == leaf.dtype
    return leaf.grad


def _is(found: torch.Tensor, wanted: Any) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=found.dtype).expand_as(found))


def _place() -> tuple[int, int, int]:
    hvd.init()
    return hvd.rank(), hvd.size(), hvd.size() * (hvd.size() + 1) // 2


def reductions() -> None:
    rank, size, total = _place()
    weight = ITEMS * (rank + 1)
    _is(_gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), ITEMS, weight), ITEMS * total)
    _is(_gradient(lambda x: hvd.allreduce(x, average=False, name="x"), ITEMS, weight), ITEMS * total)
    _is(_gradient(hvd.allreduce, ITEMS, weight), ITEMS * total / size)
    _is(
        _gradient(
            lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5), ITEMS, weight
        ),
        ITEMS * total * 1.5,
    )
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        _is(
            _gradient(lambda x, c=compression: hvd.allreduce(x, compression=c), ITEMS, weight),
            ITEMS * total / size,
        )
    _is(
        _gradient(lambda x: sum(hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)), ITEMS, weight),
        ITEMS * total * 3,
    )
    # Members of a group that have other dtypes, one of which has no gradient.
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        whole = torch.full((3,), rank + 1)
        found = []

        def mixed(x: torch.Tensor, op: Any = op, whole: Any = whole, found: Any = found) -> Any:
            found[:] = hvd.grouped_allreduce([x, whole, x.double() * 2, x.bfloat16() * 4], op=op)
            return found[0] + found[2].float() + found[3].float()

        _is(_gradient(mixed, ITEMS, weight), ITEMS * 7 * total / divisor)
        assert [t.dtype for t in found] == [torch.float32, torch.int64, torch.float64, torch.bfloat16]
        assert [t.requires_grad for t in found] == [True, False, True, True]
        assert found[1].tolist() == [total // divisor] * 3
    _is(_gradient(lambda x: hvd.allreduce(x.t(), op=hvd.Sum).t(), ITEMS, weight), ITEMS * total)
    narrow = _gradient(lambda x: hvd.allreduce(x.bfloat16(), op=hvd.Sum).float(), ITEMS, weight)
    _is(narrow, ITEMS * total)


def rows() -> None:
    rank, size, total = _place()
    mine = torch.ones(rank + 1, 2)
    weight = torch.arange(total * 2.0).reshape(total, 2)
    start = rank * (rank + 1) // 2
    own = weight[start : start + rank + 1] * total
    _is(_gradient(hvd.allgather, mine, weight * (rank + 1)), own)
    _is(_gradient(lambda x: hvd.allgather(x[0, 0]), mine, rank + 1.0)[0, 0], total)
    _is(
        _gradient(lambda x: torch.cat(hvd.grouped_allgather([x, x * 3], name="rows")), mine, rank + 1.0),
        4 * total,
    )
    for root in range(size):
        found = _gradient(lambda x, root=root: hvd.broadcast(x, root), ITEMS, ITEMS * (rank + 1))
        _is(found, ITEMS * total if rank == root else 0.0)
    to = torch.arange(size, dtype=torch.float32).repeat_interleave(2).reshape(-1, 1)
    _is(_gradient(hvd.alltoall, torch.ones(2 * size, 3), rank + 1.0), to + 1)
    splits = [(rank + other) % 3 for other in range(size)]
    to = torch.arange(size, dtype=torch.float32).repeat_interleave(torch.tensor(splits)).reshape(-1, 1)
    found = _gradient(lambda x: hvd.alltoall(x, splits, name="a")[0], torch.ones(sum(splits), 3), rank + 1.0)
    _is(found, to + 1)


def scattered_rows() -> None:
    rank, size, _ = _place()
    count = 2 * size + 1  # the first rank gets a row more
    owner = torch.cat([torch.zeros(1), torch.arange(size).repeat_interleave(2)]).sort().values.reshape(-1, 1)
    mine = torch.ones(count, 2)
    _is(_gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), mine, rank + 1.0), owner + 1)
    _is(_gradient(hvd.reducescatter, mine, rank + 1.0), (owner + 1) / size)
    scaled = _gradient(
        lambda x: hvd.reducescatter(x, prescale_factor=3.0, postscale_factor=2.0), mine, rank + 1.0
    )
    _is(scaled, (owner + 1) * 6 / size)
    grouped = _gradient(lambda x: sum(hvd.grouped_reducescatter([x, x * 4], op=hvd.Sum)), mine, rank + 1.0)
    _is(grouped, (owner + 1) * 5)


def process_sets() -> None:
    rank, size, _ = _place()
    some = hvd.add_process_set(range(1, size))
    if not some.included():
        return
    total = size * (size + 1) // 2 - 1
    weight = ITEMS * (rank + 1)
    mean = _gradient(lambda x: hvd.allreduce(x, process_set=some), ITEMS, weight)
    _is(mean, ITEMS * total / (size - 1))
    _is(_gradient(lambda x: hvd.allgather(x, process_set=some), ITEMS, rank + 1.0), total)
    sent = _gradient(lambda x: hvd.broadcast(x, size - 1, process_set=some), ITEMS, weight)
    _is(sent, ITEMS * total if rank == size - 1 else 0.0)
    back = _gradient(lambda x: hvd.alltoall(x, process_set=some), torch.ones(size - 1, 1), rank + 1.0)
    _is(back, torch.arange(2.0, size + 1).reshape(-1, 1))
    apart = _gradient(lambda x: hvd.reducescatter(x, process_set=some), torch.ones(size - 1, 1), rank + 1.0)
    _is(apart, torch.arange(2.0, size + 1).reshape(-1, 1) / (size - 1))


def like_one_process() -> None:
    """A chain of collectives, and the same mathematics on all ranks' tensors in one process."""
    rank, size, _ = _place()
    leaves = [
        torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(r)).requires_grad_()
        for r in range(size)
    ]
    sums = torch.stack([leaf.tanh() for leaf in leaves]).mean(0)
    gathered = torch.cat([(leaf * sums).exp()[: r + 1] for r, leaf in enumerate(leaves)])
    losses = [(gathered * gathered.sum() * (r + 1)).sum() + (sums[r] * leaves[0]).sum() for r in range(size)]
    (wanted,) = torch.autograd.grad(torch.stack(losses).sum(), [leaves[rank]])
    mine = leaves[rank].detach().clone().requires_grad_()
    mean = hvd.allreduce(mine.tanh())
    rows = hvd.allgather((mine * mean).exp()[: rank + 1])
    own = hvd.reducescatter(mine.tanh())
    loss = (rows * rows.sum() * (rank + 1)).sum() + (own * hvd.broadcast(mine, 0)).sum()
    loss.backward()
    torch.testing.assert_close(mine.grad, wanted)


def without() -> None:
    """Ops that have no gradient say so in backward, on all ranks; the next call works."""
    rank, size, _ = _place()
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        leaf = torch.full((2,), rank + 1.0, requires_grad=True)
        for result in (hvd.allreduce(leaf, op=op), hvd.grouped_allreduce([leaf], op=op)[0]):
            with pytest.raises(InvalidArgumentError, match=f"op {op.name} has no gradient; detach"):
                result.sum().backward()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size] * 2
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(leaf).requires_grad
    assert not hvd.allreduce(leaf.detach()).requires_grad
    assert not hvd.allreduce_async(leaf).wait().requires_grad


def sparse() -> None:
    rank, size, total = _place()
    indices = torch.tensor([[0, rank + 1, rank + 1], [1, 2, 2]])
    mine = torch.sparse_coo_tensor(indices, [1.0, 2.0, 3.0], (size + 2, 3)) * (rank + 1)
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        found = hvd.sparse_allreduce_async(mine, "sparse", op).wait()
        wanted = torch.zeros(size + 2, 3)
        wanted[0, 1] = total / divisor
        wanted[range(1, size + 1), 2] = 5 * torch.arange(1.0, size + 1) / divisor
        assert found.is_coalesced()
        _is(found.to_dense(), wanted)
    some = mine if rank == size - 1 else torch.sparse_coo_tensor(size=(size + 2, 3))
    found = hvd.synchronize(hvd.sparse_allreduce_async(some, None, hvd.Sum))
    assert found.to_dense().sum() == 6.0 * size


def sparse_as_dense() -> None:
    """Entries are averaged, rounded and bounded by the rules of dense values."""
    rank, size, _ = _place()
    for first, others, dtype, op, wanted in (
        (1, 2, torch.int64, hvd.Average, (2 * size - 1) // size),
        (-1, -2, torch.int8, hvd.Average, (1 - 2 * size) // size),
        (200, 200, torch.uint8, hvd.Average, 200),
        (True, True, torch.bool, hvd.Sum, True),
        (40000.0, 40000.0, torch.float16, hvd.Average, 40000.0),
        (2048.0, 1.0, torch.float16, hvd.Sum, torch.tensor(2047.0 + size).half().item()),
        (256.0, 1.0, torch.bfloat16, hvd.Sum, torch.tensor(255.0 + size).bfloat16().item()),
        (3e38, 3e38, torch.float32, hvd.Average, torch.tensor(3e38).item()),
        (1 + 1j, 1j, torch.complex64, hvd.Sum, 1 + size * 1j),
    ):
        mine = torch.sparse_coo_tensor([[1]], torch.tensor([others if rank else first], dtype=dtype), (2,))
        found = hvd.sparse_allreduce_async(mine, "sparse", op).wait()
        assert found.dtype is dtype
        assert found.is_coalesced()
        assert found.to_dense().tolist() == [0, wanted]
    flag = torch.sparse_coo_tensor([[1]], torch.tensor([True]), (2,))
    with pytest.raises(InvalidArgumentError, match="op Average has no meaning for dtype bool"):
        hvd.sparse_allreduce_async(flag, "sparse", hvd.Average).wait()


def beside_a_joined_rank() -> None:
    """Its rows are not there, and nobody's loss has its share."""
    rank, size, total = _place()
    if rank:
        start, rows = rank * (rank + 1) // 2 - 1, total - 1
        weight = torch.arange(float(rows)).reshape(-1, 1)
        for gather in (hvd.allgather, lambda x: hvd.grouped_allgather([x])[0]):
            found = _gradient(gather, torch.ones(rank + 1, 2), weight)
            _is(found, weight[start : start + rank + 1] * (size - 1))
        owner = torch.arange(float(size)).reshape(-1, 1)
        for op, divisor in ((hvd.Sum, 1), (hvd.Average, size - 1)):
            found = _gradient(lambda x, op=op: hvd.reducescatter(x, op=op), torch.ones(size, 2), rank + 1.0)
            _is(found, (owner + 1) * (owner > 0) / divisor)
    hvd.join()


CASES = [
    reductions,
    rows,
    scattered_rows,
    process_sets,
    like_one_process,
    without,
    sparse,
    sparse_as_dense,
    beside_a_joined_rank,
]


def _run_all() -> None:
    for case in CASES:
        case()


@pytest.mark.parametrize("world", worlds(shm=(2, 3), mpi=(2,)), ids=str)
def test_gradients(world: World) -> None:
    world.run(_run_all)
