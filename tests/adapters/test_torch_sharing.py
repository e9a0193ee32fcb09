"""Optimizers that share parameters, or whose class steps within its step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError
from hvdp.testing import World, worlds


def _start() -> tuple[int, int, float]:
    """Rank, size, and the average of rank + 1 over the ranks."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    hvd.init()
    return hvd.rank(), hvd.size(), (hvd.size() + 1) / 2


def _zeros(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(1)) for _ in range(count)]


def _sgd(parameters: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)


def a_fresh_optimizer_for_a_second_phase() -> None:
    """While a scheduler keeps the first one alive, with buckets of its own for the same gradients."""
    rank, _, mean = _start()
    for op in (hvd.Average, hvd.Adasum):
        a, b = _zeros(2)
        first = _sgd([a, b])
        scheduler = torch.optim.lr_scheduler.StepLR(first, 100)
        optimizer, done = first, 0
        for phase in range(2):
            for _ in range(3):
                optimizer.zero_grad()
                ((a + b) * (rank + 1)).sum().backward()
                assert a.grad == b.grad == (mean if optimizer._delta is None else rank + 1)
                optimizer.step()
                done += 1
                if op == hvd.Average:
                    assert a.item() == b.item() == -mean * done
            if phase == 0:
                optimizer = _sgd([b, a], op=op)
        with pytest.raises(InvalidArgumentError, match=r"'parameter\.0' belongs to a .* made later"):
            first.step()
        scheduler.step()
        # New parameters are a new start: it takes its own back.
        first.add_param_group({"params": _zeros(1)})
        first.zero_grad()
        (a * (rank + 1)).sum().backward()
        assert a.grad == mean
        first.step()
        with pytest.raises(InvalidArgumentError, match="belongs to"):
            optimizer.step()


def two_heads_on_one_encoder() -> None:
    """Both stepped: refused, with a way out that works."""
    rank, _, mean = _start()
    encoder, left, right = _zeros(3)
    first = hvd.DistributedOptimizer(
        torch.optim.SGD([encoder, left], lr=1.0), [("encoder", encoder), ("left", left)]
    )
    second = _sgd([encoder, right])
    (sum([encoder, left, right]) * (rank + 1)).sum().backward()
    second.step()
    for call in (first.step, first.synchronize):
        with pytest.raises(InvalidArgumentError, match=r"'encoder' belongs to .* or the shared ones to one"):
            call()
    third = _sgd([left])
    for optimizer in (second, third):
        optimizer.zero_grad()
    (sum([encoder, left, right]) * (rank + 1)).sum().backward()
    second.step()
    third.step()
    assert encoder.item() == right.item() == -2 * mean
    assert left.item() == -mean


class _Nested(torch.optim.SGD):
    """PyTorch runs step hooks for each class's `step`, once an instance of that class exists."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise MemoryError
        return super().step(closure)


def steps_within_steps() -> None:
    rank, _, mean = _start()
    torch.optim.SGD(_zeros(1))
    for op in (hvd.Average, hvd.Adasum):
        (a,) = _zeros(1)
        inner = _Nested([a], lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, op=op)
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
        for step in range(4):
            optimizer.zero_grad()
            (a * (rank + 1 if op == hvd.Average else 2)).sum().backward()
            if step == 1:
                inner.fails = True
                with pytest.raises(MemoryError):
                    optimizer.step()
                inner.fails = False
            optimizer.step()
            assert optimizer._drift.step == optimizer._reducer.steps == step + 1
            # Adasum of equal changes is one of them.
            assert a.item() == (step + 1) * -(mean if op == hvd.Average else 2)


CASES = [a_fresh_optimizer_for_a_second_phase, two_heads_on_one_encoder, steps_within_steps]


def _run_all() -> None:
    for case in CASES:
        case()


@pytest.mark.parametrize("world", worlds(shm=(3,)), ids=str)
def test_sharing(world: World) -> None:
    world.run(_run_all, timeout=100)
