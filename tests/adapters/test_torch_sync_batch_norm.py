"""SyncBatchNorm is BatchNorm on the batches of all ranks joined; average_buffers makes buffers equal."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.testing import World, worlds


def _start() -> tuple[int, int]:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(5)
    return hvd.rank(), hvd.size()


def _close(found: Any, wanted: Any, **tolerance: float) -> None:
    torch.testing.assert_close(found, wanted, **tolerance)


def _own(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[hvd.rank()]


def equals_the_joined_batch() -> None:
    rank, size = _start()
    cases: list[tuple[list[int], tuple[int, ...], dict[str, Any]]] = [
        ([4] * size, (3,), {}),
        ([1] * size, (3,), {}),
        ([2, 0, 5][:size], (3, 4), {"momentum": 0.3}),
        ([1, 6, 0][:size], (2, 3, 2), {"eps": 0.1}),
        ([0, 1, 1][:size], (2, 3, 1), {"affine": False}),
        ([3, 1, 2][:size], (2, 2, 2, 2), {"momentum": None}),
        ([3, 1, 2][:size], (4, 2), {"track_running_stats": False}),
    ]
    for counts, shape, options in cases:
        if sum(counts) < 2:
            continue
        joined = torch.nn.SyncBatchNorm(shape[0], **options).double()
        if joined.affine:
            torch.nn.init.normal_(joined.weight)
            torch.nn.init.normal_(joined.bias)
        ours = hvd.SyncBatchNorm(shape[0], **options).double()
        ours.load_state_dict(joined.state_dict())
        for _ in range(3):
            # Far from zero, where a difference of sums of squares would be lost.
            everything = torch.randn(sum(counts), *shape, dtype=torch.float64) * 3 + 1e5
            upstream = torch.randn_like(everything)
            whole = everything.clone().requires_grad_()
            wanted = joined(whole)
            (wanted * upstream).sum().backward()
            mine = _own(list(everything.split(counts))).clone().requires_grad_()
            found = ours(mine)
            (found * _own(list(upstream.split(counts)))).sum().backward()
            _close(found, _own(list(wanted.split(counts))), rtol=1e-6, atol=1e-6)
            _close(mine.grad, _own(list(whole.grad.split(counts))), rtol=1e-6, atol=1e-6)
        _close(dict(ours.named_buffers()), dict(joined.named_buffers()))
        if joined.affine:
            for own, total in ((ours.weight.grad, joined.weight.grad), (ours.bias.grad, joined.bias.grad)):
                _close(hvd.allreduce(own, op=hvd.Sum), total, rtol=1e-6, atol=1e-6)
        for buffer in ours.buffers():
            assert torch.equal(hvd.broadcast(buffer, 0), buffer), "differs between ranks"
        ours.eval()
        joined.eval()
        if rank == 0:  # in evaluation nobody waits for anybody
            _close(ours(everything), joined(everything), rtol=1e-6, atol=1e-6)


def one_rank_needs_no_gradient_of_its_input() -> None:
    """As where the layer below is frozen there: the others still need what it adds to the sums."""
    rank, size = _start()
    everything, upstream = torch.randn(2 * size, 3), torch.randn(2 * size, 3)
    whole = everything.clone().requires_grad_()
    (torch.nn.BatchNorm1d(3)(whole) * upstream).sum().backward()
    mine = everything[2 * rank : 2 * rank + 2].clone().requires_grad_(rank != size - 1 or size == 1)
    (hvd.SyncBatchNorm(3)(mine) * upstream[2 * rank : 2 * rank + 2]).sum().backward()
    assert whole.grad is not None
    if mine.requires_grad:
        _close(mine.grad, whole.grad[2 * rank : 2 * rank + 2])
    hvd.barrier()


def other_dtypes_and_layouts() -> None:
    rank, size = _start()
    whole = torch.randn(4 * size, 3, 5, 5) + 10
    wanted = torch.nn.BatchNorm2d(3)(whole).split(4)[rank]
    mine = whole.split(4)[rank]
    _close(hvd.SyncBatchNorm(3)(mine), wanted, rtol=1e-4, atol=1e-4)
    last = mine.to(memory_format=torch.channels_last).requires_grad_()
    found = hvd.SyncBatchNorm(3)(last)
    found.square().sum().backward()
    _close(found, wanted, rtol=1e-4, atol=1e-4)
    half = mine.bfloat16().requires_grad_()
    found = hvd.SyncBatchNorm(3)(half)
    found.sum().backward()
    assert found.dtype is half.grad.dtype is torch.bfloat16
    _close(found.float(), wanted, rtol=0.1, atol=0.1)
    with torch.no_grad():
        _close(hvd.SyncBatchNorm(3)(mine), wanted, rtol=1e-4, atol=1e-4)


def refuses() -> None:
    rank, _ = _start()
    layer = hvd.SyncBatchNorm(3)
    with pytest.raises(InvalidArgumentError, match="Received"):
        layer(torch.zeros(3))
    with pytest.raises(ValueError, match="more than one value"):
        layer(torch.zeros(1 if rank == 0 else 0, 3))
    empty = layer(torch.zeros(0, 3))
    assert empty.shape == (0, 3)
    assert not layer.num_batches_tracked
    with pytest.raises(InvalidArgumentError, match="run the model once"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())


def converts() -> None:
    _start()
    shared = torch.nn.BatchNorm1d(4, momentum=None, eps=0.5)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), shared, torch.nn.Sequential(torch.nn.BatchNorm1d(4, affine=False)), shared
    )
    model(torch.randn(4, 4))
    model[2].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    new = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert new is model
    assert type(model[1]) is type(model[2][0]) is hvd.SyncBatchNorm
    assert model[1] is model[3]
    assert (model[1].eps, model[1].momentum, model[1].training) == (0.5, None, True)
    assert (model[2][0].affine, model[2][0].training) == (False, False)
    _close(dict(model.state_dict()), dict(before))
    assert optimizer.param_groups[0]["params"][2] is model[1].weight
    copied = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert copied(torch.randn(2, 4)).shape == (2, 4)
    alone = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm2d(2))
    assert isinstance(alone, hvd.SyncBatchNorm)


def trains_as_one_process() -> None:
    """Uneven batches: each loss is the rank's share of the common mean, times the number of ranks."""
    _, size = _start()
    counts = [3, 1, 2][:size]

    def build(norm: Any) -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(2, 4), norm(4), torch.nn.Linear(4, 1)).double()

    joined, ours = build(torch.nn.BatchNorm1d), build(hvd.SyncBatchNorm)
    plain = torch.optim.SGD(joined.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters())
    for _ in range(5):
        data = torch.randn(sum(counts), 2, dtype=torch.float64)
        plain.zero_grad()
        joined(data).square().mean().backward()
        plain.step()
        optimizer.zero_grad()
        (ours(_own(list(data.split(counts)))).square().sum() * (size / sum(counts))).backward()
        optimizer.step()
    _close(dict(ours.state_dict()), dict(joined.state_dict()))


def buffers_become_equal() -> None:
    rank, size = _start()
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(2))
    for _ in range(rank + 1):
        model[0](torch.randn(4, 3) + rank)
    means = list(torch.arange(2.0 * size).reshape(size, 2))
    model[1].running_mean.copy_(means[rank])
    model.register_buffer("flags", torch.tensor([rank == 1, False]))
    model.register_buffer("short", torch.full((2,), float(rank), dtype=torch.bfloat16), persistent=False)
    hvd.average_buffers(model)
    _close(model[1].running_mean, torch.stack(means).mean(0))
    assert int(model[0].num_batches_tracked) == size
    assert model.flags.tolist() == [size > 1, False]
    assert model.short.tolist() == [(size - 1) / 2] * 2
    for buffer in model.buffers():
        assert torch.equal(hvd.broadcast(buffer, 0), buffer)
    hvd.average_buffers(torch.nn.Linear(2, 2))
    if size > 1:
        with pytest.raises(MismatchError, match="running_mean"):
            hvd.average_buffers(torch.nn.BatchNorm1d(2 + rank))


def _run_all() -> None:
    equals_the_joined_batch()
    one_rank_needs_no_gradient_of_its_input()
    other_dtypes_and_layouts()
    converts()
    trains_as_one_process()
    buffers_become_equal()
    if hvd.size() > 1:
        refuses()


@pytest.mark.parametrize("world", worlds(shm=(1, 2, 3)), ids=str)
def test_sync_batch_norm(world: World) -> None:
    world.run(_run_all)
