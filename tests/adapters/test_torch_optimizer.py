"""DistributedOptimizer: when gradients are averaged, and everything that may be odd about them.

Starting torch on several ranks takes seconds, so one launch runs many cases.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import hvdp.torch as hvd
from hvdp.testing import World, worlds

SMALL_BUCKETS = {"HVDP_FUSION_THRESHOLD": "200"}


def _start() -> tuple[int, int, float]:
    """Rank, size, and the average of rank + 1 over the ranks."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    hvd.init()
    return hvd.rank(), hvd.size(), (hvd.size() + 1) / 2


def _sgd(model: torch.nn.Module, **options: Any) -> Any:
    """Plain steps of rate 1, so that a step subtracts the gradient."""
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **options
    )


def _stack(layers: int = 4) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(layers)))


def _is(found: torch.Tensor | None, wanted: torch.Tensor | float) -> None:
    assert found is not None
    torch.testing.assert_close(found, torch.as_tensor(wanted).expand_as(found).to(found.dtype))


def averages_when_backward_returns() -> None:
    rank, _, mean = _start()
    model = _stack().double()
    plain = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert optimizer is inner
    assert isinstance(optimizer, torch.optim.SGD)
    data = torch.randn(7, 5, dtype=torch.float64)
    for to_none in (True, False, True, False):
        optimizer.zero_grad(set_to_none=to_none)
        plain.zero_grad()
        (model(data).square().sum() * (rank + 1)).backward()
        (plain(data).square().sum() * mean).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            _is(ours.grad, theirs.grad)
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                theirs -= 0.01 * theirs.grad
                _is(ours, theirs)


def sums_where_asked() -> None:
    rank, size, mean = _start()
    model = _stack(2)
    optimizer = _sgd(model, op=hvd.Sum)
    for _ in range(3):
        optimizer.zero_grad()
        sum((p * (rank + 1)).sum() for p in model.parameters()).backward()
        for parameter in model.parameters():
            _is(parameter.grad, mean * size)
        optimizer.step()


def reduces_while_backward_goes_on() -> None:
    # Here, because a function is sent to the ranks together with the objects that it names.
    from hvdp._core.runtime import runtime

    _start()
    model, events = _stack(6), []
    optimizer = _sgd(model)
    engine = runtime.require("a test")
    submit = engine.submit

    def recording(*operations: Any) -> Any:
        events.extend(operation.signature.name for operation in operations)
        return submit(*operations)

    engine.submit = recording  # type: ignore[method-assign]
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    for step in range(3):
        events.clear()
        optimizer.zero_grad()
        model(torch.randn(2, 5)).sum().backward()
        if step:
            buckets = [event for event in events if event.startswith("gradients.")]
            assert len(buckets) == len(set(buckets)) >= 3, events
            assert events.index("first layer") >= len(buckets) - 1, f"all came at the end: {events}"
        optimizer.step()
    engine.submit = submit  # type: ignore[method-assign]


def parameters_that_some_ranks_do_not_use() -> None:
    rank, size, mean = _start()
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.ones(4)) for name in ("everybody", "last", "nobody", "sometimes")}
    )
    optimizer = _sgd(model)
    for turn in range(4):
        optimizer.zero_grad()
        loss = model["everybody"].sum() * (rank + 1)
        if rank == size - 1:
            loss = loss + model["last"].sum() * 6
        if turn % 2:
            loss = loss + model["sometimes"].sum()
        loss.backward()
        _is(model["everybody"].grad, mean)
        _is(model["last"].grad, 6 / size)
        assert model["nobody"].grad is None
        if turn % 2:
            _is(model["sometimes"].grad, 1.0)
        else:
            assert model["sometimes"].grad is None
        before = model["nobody"].detach().clone()
        optimizer.step()
        assert torch.equal(model["nobody"], before)


def accumulates() -> None:
    rank, _, mean = _start()
    model = _stack(3)
    optimizer = _sgd(model, backward_passes_per_step=3)

    def passes(*factors: float) -> None:
        for factor in factors:
            sum((p * (factor * (rank + 1))).sum() for p in model.parameters()).backward()

    for window in range(3):
        optimizer.zero_grad(set_to_none=bool(window % 2))
        passes(1, 10)
        for parameter in model.parameters():
            _is(parameter.grad, 11.0 * (rank + 1))
        passes(100)
        for parameter in model.parameters():
            _is(parameter.grad, 111 * mean)
        optimizer.step()
    # The last window of an epoch is often not full.
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    passes(1, 2)
    optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        _is(parameter.grad, 3 * mean)
        _is(parameter, old - 3 * mean)
    optimizer.zero_grad()
    passes(1, 2)
    _is(next(model.parameters()).grad, 3.0 * (rank + 1))
    passes(3)
    _is(next(model.parameters()).grad, 6 * mean)
    optimizer.step()
    # Horovod's scripts call this before they clip.
    optimizer.zero_grad()
    passes(5)
    optimizer.synchronize()
    _is(next(model.parameters()).grad, 5 * mean)
    with optimizer.skip_synchronize():
        optimizer.step()
    _is(next(model.parameters()).grad, 5 * mean)


def freezing_and_unfreezing() -> None:
    rank, _, mean = _start()
    model = _stack(3)
    model[1].requires_grad_(False)
    optimizer = _sgd(model)
    for turn in range(4):
        model[1].requires_grad_(turn >= 2)
        model[2].requires_grad_(turn != 3)
        optimizer.zero_grad()
        sum((p * (rank + 1)).sum() for p in model.parameters() if p.requires_grad).backward()
        for parameter in model.parameters():
            if parameter.requires_grad:
                _is(parameter.grad, mean)
            else:
                assert parameter.grad is None
        optimizer.step()


def new_parameter_groups() -> None:
    rank, _, mean = _start()
    model, more = _stack(2), _stack(2)
    optimizer = _sgd(model)
    for turn in range(4):
        if turn == 2:
            optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.5})
        optimizer.zero_grad()
        more.zero_grad()
        everything = [*model.parameters(), *more.parameters()]
        sum((p * (rank + 1)).sum() for p in everything).backward()
        for parameter in model.parameters():
            _is(parameter.grad, mean)
        for parameter in more.parameters():
            _is(parameter.grad, mean if turn >= 2 else rank + 1.0)
        optimizer.step()


def layouts_and_narrow_types() -> None:
    rank, size, mean = _start()
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1))
    model = model.to(memory_format=torch.channels_last)
    model[1].to(torch.bfloat16)
    optimizer = _sgd(model)
    strides = [p.stride() for p in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        wide = model[0](torch.ones(2, 3, 5, 5).to(memory_format=torch.channels_last))
        (model[1](wide.bfloat16()).float().sum() * 0 + wide.sum() * 0).backward(retain_graph=False)
        for parameter in model.parameters():
            _is(parameter.grad, 0.0)
        optimizer.zero_grad()
        sum(
            (p.float() * torch.arange(p.numel()).view_as(p) * (rank + 1)).sum() for p in model.parameters()
        ).backward()
        for parameter, stride in zip(model.parameters(), strides, strict=True):
            _is(parameter.grad, torch.arange(parameter.numel()).view_as(parameter) * mean)
            assert parameter.grad.stride() == stride
            assert parameter.grad.dtype == parameter.dtype
        optimizer.step()
    one = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    narrow = hvd.DistributedOptimizer(torch.optim.SGD([one], lr=1.0), op=hvd.Sum)
    (one * torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)).sum().backward()
    # Beside 256 a single 1 vanishes in bfloat16; summed first and rounded once, two do not.
    _is(one.grad, torch.tensor([256.0 + size - 1]).bfloat16())
    narrow.step()


CASES = [
    averages_when_backward_returns,
    sums_where_asked,
    parameters_that_some_ranks_do_not_use,
    accumulates,
    freezing_and_unfreezing,
    new_parameter_groups,
    layouts_and_narrow_types,
]


def _run_all(cases: list[Any]) -> None:
    for case in cases:
        case()


@pytest.mark.parametrize("world", worlds(shm=(1, 2, 3), mpi=(2,)), ids=str)
def test_gradients_in_many_buckets(world: World) -> None:
    world.run(_run_all, [*CASES, reduces_while_backward_goes_on], env=SMALL_BUCKETS, timeout=100)


@pytest.mark.parametrize("world", worlds(shm=(2,)), ids=str)
def test_gradients_in_one_bucket(world: World) -> None:
    world.run(_run_all, CASES, timeout=100)
