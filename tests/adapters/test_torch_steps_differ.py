"""Ranks that make different steps: an error on all of them, at once, and not a mixture of two steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.testing import World, worlds

DIFFERENT = "the ranks reduce gradients of different steps"


def _start() -> tuple[int, int, float]:
    """Rank, size, and the average of rank + 1 over the ranks."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    hvd.init()
    return hvd.rank(), hvd.size(), (hvd.size() + 1) / 2


def _sgd(*parameters: nn.Parameter, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)


def a_backward_too_many() -> None:
    """On one rank; after a join all begin anew."""
    rank, _, _ = _start()
    words = nn.Embedding(3, 1, sparse=True)
    nn.init.zeros_(words.weight)
    a = nn.Parameter(torch.zeros(1))
    for parameter, output in ((a, lambda: a), (words.weight, lambda: words(torch.tensor([0])))):
        optimizer = _sgd(parameter)

        def step(number: int, passes: int, optimizer: Any = optimizer, output: Any = output) -> None:
            optimizer.zero_grad()
            for _ in range(passes):
                (output() * number).sum().backward()
            optimizer.step()

        step(1, 1)
        step(2, 1)
        if rank:
            step(3, 1)
        with pytest.raises(MismatchError, match=DIFFERENT) as caught:
            step(3 if rank == 0 else 4, 2 if rank == 0 else 1)
        if parameter is a:
            assert "the one after 2 on rank 0, the one after 3 on rank" in str(caught.value)
        hvd.join()
        before = parameter.detach().flatten()[0].clone()
        step(5, 1)
        assert parameter.detach().flatten()[0] == before - 5


def steps_before_a_join_do_not_count() -> None:
    rank, size, mean = _start()
    a = nn.Parameter(torch.zeros(1))
    optimizer = _sgd(a)
    for _ in range(2):
        for _ in range(rank + 1):
            optimizer.zero_grad()
            a.sum().backward()
            optimizer.step()
        hvd.join()
        hvd.broadcast_parameters([("a", a)], root_rank=size - 1)
    optimizer.zero_grad()
    (a * (rank + 1)).sum().backward()
    assert a.grad == mean


def an_inf_that_one_rank_sees_alone() -> None:
    """In a window that ends early, without synchronize(): one rank skips a step that the others make."""
    rank, _, _ = _start()
    a = nn.Parameter(torch.zeros(1))
    optimizer = _sgd(a, backward_passes_per_step=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(passes: int, factor: float) -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            scaler.scale((a * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step(4, 1.0)
    if rank == 0:
        step(2, float("inf"))
    with pytest.raises(MismatchError, match=DIFFERENT):
        step(4 if rank == 0 else 2, 1.0)
    assert a.item() == -4


def passes_that_are_dropped() -> None:
    """By the ranks that have some left over: no step of theirs, so no error."""
    rank, _, mean = _start()
    a = nn.Parameter(torch.zeros(1))
    optimizer = _sgd(a, backward_passes_per_step=3)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            (a * (rank + 1)).sum().backward()
        assert a.grad == 3 * mean
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(rank):
            a.sum().backward()


def an_inf_on_one_rank_with_adasum() -> None:
    """Gradients are local, and yet all ranks skip together, also after unscale_()."""
    rank, _, _ = _start()
    for options, unscales in (({}, False), ({"momentum": 0.5}, True), ({"fused": True}, False)):
        a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0, **options), op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for turn in range(4):
            before = a.item()
            optimizer.zero_grad()
            factor = float("inf") if turn == 1 and rank == 0 else 1.0
            scaler.scale((a * factor).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert (a.item() == before) == (turn == 1)
            assert a.isfinite()
            assert b.item() == 0
            if not options:
                assert a.item() == -(turn + (turn == 0))
        # Each rank's own.
        assert scaler.get_scale() == (2.0 if rank == 0 else 4.0)


def gradients_that_one_rank_drops() -> None:
    """Between backward and step: it reduces once more, alone. Between passes: it loses its first one."""
    rank, size, mean = _start()
    for dropping in (0, size - 1):
        a = nn.Parameter(torch.zeros(1))
        optimizer = _sgd(a)

        def backward(a: Any = a) -> None:
            (a * (rank + 1)).sum().backward()

        backward()
        optimizer.step()
        optimizer.zero_grad()
        backward()
        if rank == dropping:
            optimizer.zero_grad()
            with pytest.raises(MismatchError, match=DIFFERENT):
                optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(MismatchError, match=DIFFERENT):
                backward()
        hvd.join()
        optimizer.zero_grad()
        hvd.broadcast_parameters([("a", a)], root_rank=dropping)
        backward()
        optimizer.step()
        assert a.item() == -2 * mean
        optimizer = _sgd(a, backward_passes_per_step=2)
        for _ in range(2):
            optimizer.zero_grad()
            backward()
            if rank == dropping:
                optimizer.zero_grad()
            backward()
            optimizer.step()
            assert a.grad == 2 * mean - (dropping + 1) / size


def an_evaluation_too_many() -> None:
    """By the L-BFGS of one rank, which was given another limit."""
    rank, size, _ = _start()
    for odd in (0, size - 1):
        a = nn.Parameter(torch.zeros(2))
        limit = 3 + (rank == odd)
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([a], lr=0.1, max_iter=limit))
        evaluations = []

        def closure(a: Any = a, optimizer: Any = optimizer, evaluations: Any = evaluations) -> Any:
            evaluations.append(1)
            optimizer.zero_grad()
            loss = (a - torch.tensor([1.0, 5.0]) * (rank + 1)).square().sum()
            loss.backward()
            return loss

        def two_steps(optimizer: Any = optimizer, closure: Any = closure) -> None:
            for _ in range(2):
                optimizer.step(closure)

        with pytest.raises(MismatchError, match=DIFFERENT):
            two_steps()
        assert len(evaluations) == 4
        hvd.join()


def passes_in_a_step_change() -> None:
    """From window to window, as the program says."""
    rank, _, mean = _start()
    a = nn.Parameter(torch.zeros(1))
    optimizer = _sgd(a)
    for passes in (1, 3, 2, 1):
        optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        for turn in range(passes):
            if turn:
                assert a.grad == (rank + 1) * turn
            (a * (rank + 1)).sum().backward()
        assert a.grad == mean * passes
        optimizer.step()
    assert a.item() == -mean * (1 + 3 + 2 + 1)
    # Within a window: from the next one on.
    optimizer.set_backward_passes_per_step(2)
    for before, later in ((2, 4), (4, 1), (1, 1)):
        optimizer.zero_grad()
        for turn in range(before):
            (a * (rank + 1)).sum().backward()
            optimizer.set_backward_passes_per_step(later)
            assert a.grad == (mean if turn + 1 == before else rank + 1) * (turn + 1)
        optimizer.step()
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        optimizer.set_backward_passes_per_step(0)


CASES = [
    a_backward_too_many,
    steps_before_a_join_do_not_count,
    an_inf_that_one_rank_sees_alone,
    passes_that_are_dropped,
    an_inf_on_one_rank_with_adasum,
    gradients_that_one_rank_drops,
    an_evaluation_too_many,
    passes_in_a_step_change,
]


def _run_all() -> None:
    for case in CASES:
        case()


@pytest.mark.parametrize("world", worlds(shm=(3,)), ids=str)
def test_steps(world: World) -> None:
    world.run(_run_all, timeout=100)
