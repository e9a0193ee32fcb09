"""DistributedOptimizer among the other things that hold an optimizer, and its wrong arguments."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.testing import World, worlds


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


def copies_and_pickles_are_plain() -> None:
    _start()
    model = _stack(2)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.Adam
        assert twin.param_groups[0]["lr"] == 0.1
        ours, theirs = optimizer.state_dict()["state"], twin.state_dict()["state"]
        assert all(torch.equal(ours[i]["exp_avg"], theirs[i]["exp_avg"]) for i in ours)
        twin.step()
    again = copy.deepcopy(model)
    again(torch.ones(1, 5) * hvd.rank()).sum().backward()


def schedulers_before_and_after() -> None:
    _start()
    model = _stack(2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for turn in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        before.step()
        after.step()
        assert optimizer.param_groups[0]["lr"] == 0.25 ** (turn + 1)


def closures() -> None:
    """LBFGS evaluates as often as it likes; all ranks must go the way of the whole batch."""
    rank, size, _ = _start()
    data, target = (
        torch.randn(6 * size, 5, dtype=torch.float64),
        torch.randn(6 * size, 5, dtype=torch.float64),
    )
    share = slice(6 * rank, 6 * rank + 6)

    def closure(optimizer: Any, net: Any, part: slice, counts: list[int]) -> Any:
        def evaluate() -> torch.Tensor:
            counts[-1] += 1
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(data[part]), target[part])
            loss.backward()
            return loss

        return evaluate

    for search in (None, "strong_wolfe"):
        model = _stack(1).double()
        alone = copy.deepcopy(model)
        options: Any = {"lr": 0.5, "max_iter": 5, "tolerance_grad": 0, "tolerance_change": 0}
        options["line_search_fn"] = search
        plain = torch.optim.LBFGS(alone.parameters(), **options)
        ours = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **options))
        counts: tuple[list[int], list[int]] = ([], [])
        for _ in range(3):
            for each in counts:
                each.append(0)
            plain.step(closure(plain, alone, slice(None), counts[0]))
            ours.step(closure(ours, model, share, counts[1]))
        assert hvd.allgather_object(counts[1]) == [counts[0]] * size
        assert min(counts[0]) >= 5
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-9)


class Factored(torch.optim.SGD):
    """With an argument more than others have."""

    def step(self, closure: Any = None, factor: float = 1.0) -> Any:
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(factor * parameter.grad)
        return loss


def arguments_beside_a_closure() -> None:
    rank, _, mean = _start()
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer: Any = hvd.DistributedOptimizer(Factored([weight], lr=1.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * (rank + 1)).sum()
        loss.backward()
        return loss

    optimizer.step(closure, 0.5)
    optimizer.step(closure, factor=0.25)
    optimizer.step(closure=closure, factor=0.25)
    _is(weight, -mean)


def closures_of_weighted_ranks() -> None:
    """The loss is that of all samples; a rank without any has the mean of none, which is not a number."""
    rank, size, _ = _start()
    for counts in ([3, *(1,) * size], [2, *(0,) * size]):
        everything = torch.arange(1.0, 1.0 + sum(counts[:size]), dtype=torch.float64)
        data = everything.split(counts[:size])[rank]
        weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), weighted=True)
        optimizer.set_weight(len(data))

        def closure(data: Any = data, weight: Any = weight, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (weight * data).mean()
            loss.backward()
            return loss

        _is(optimizer.step(closure), everything.mean())
        _is(weight, 1 - everything.mean() / 2)
        assert optimizer.step(lambda data=data: float(data.mean())) == pytest.approx(everything.mean().item())


def closures_of_sums() -> None:
    """A line search needs the loss whose gradient it is given."""
    rank, size, _ = _start()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.Sum)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (weight * (rank + 1)).sum()
        loss.backward()
        return loss

    total = size * (size + 1) / 2
    _is(optimizer.step(closure), total)
    _is(weight, 1 - total / 2)


def stepping_without_a_backward() -> None:
    rank, size, _ = _start()
    model = _stack(2)
    optimizer = _sgd(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    # Only one rank has a loss; the others step without a backward of their own.
    if rank == 0:
        sum(p.sum() for p in model.parameters()).backward()
    else:
        optimizer.synchronize()
    optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        _is(parameter, old - 1 / size)


def optimizers_made_in_a_loop_leave_no_hooks() -> None:
    _start()
    model = _stack(2)
    for _ in range(10):
        optimizer = _sgd(model)
        optimizer.zero_grad()
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        del optimizer
        gc.collect()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model(torch.ones(1, 5) * hvd.rank()).sum().backward()


def arguments_that_are_wrong_on_one_rank() -> list[str]:
    rank, size, _ = _start()
    odd = rank == size - 1
    model = _stack(2)
    named = list(model.named_parameters())
    twice = [(name if i or not odd else named[1][0], p) for i, (name, p) in enumerate(named)]
    other = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 6 if odd else 5))
    fewer = torch.nn.Sequential(torch.nn.Linear(5, 5, bias=not odd))
    double = torch.nn.Linear(5, 5).to(torch.float64 if odd else torch.float32)
    texts = []
    for kind, net, names in (
        (InvalidArgumentError, model, twice),
        (InvalidArgumentError, model, named[:-1] if odd else named),
        (MismatchError, other, other.named_parameters()),
        (MismatchError, fewer, fewer.named_parameters()),
        (MismatchError, double, double.named_parameters()),
    ):
        with pytest.raises(kind) as caught:
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), named_parameters=names)
        texts.append(str(caught.value))
    for names in (3, dict(named)):
        with pytest.raises(InvalidArgumentError, match="rank 2: named_parameters must be pairs"):
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=names if odd else named
            )
    with pytest.raises(InvalidArgumentError, match="rank 2: optimizer must be a torch"):
        hvd.DistributedOptimizer(model if odd else torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(InvalidArgumentError, match="backward_passes_per_step"):
        _sgd(model, backward_passes_per_step=0 if odd else 1)
    optimizer = _sgd(model)
    with pytest.raises(InvalidArgumentError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    return texts


CASES = [
    copies_and_pickles_are_plain,
    schedulers_before_and_after,
    closures,
    arguments_beside_a_closure,
    closures_of_weighted_ranks,
    closures_of_sums,
    stepping_without_a_backward,
    optimizers_made_in_a_loop_leave_no_hooks,
]


def _run_all() -> None:
    for case in CASES:
        case()


@pytest.mark.parametrize("world", worlds(shm=(1, 3), mpi=(2,)), ids=str)
def test_life(world: World) -> None:
    world.run(_run_all, timeout=100)


@pytest.mark.parametrize("world", worlds(shm=(3,)), ids=str)
def test_a_wrong_argument_is_an_error_on_all_ranks_alike(world: World) -> None:
    first, *others = world.run(arguments_that_are_wrong_on_one_rank, timeout=100)
    assert all(texts == first for texts in others)
    twice, missing, shape, bias, dtype = first
    assert "rank 2: named_parameters gives the name '0.bias' twice" in twice
    assert "rank 2: named_parameters lacks 1 parameters of the optimizer, of shapes [(5,)]" in missing
    assert (
        "parameter 2 is '1.weight' float32 (5, 5) on rank 0 and '1.weight' float32 (6, 5) on rank 2" in shape
    )
    assert "parameter 1 is '0.bias' float32 (5,) on rank 0 and missing on rank 2" in bias
    assert "parameter 0 is 'weight' float32 (5, 5) on rank 0 and 'weight' float64 (5, 5) on rank 2" in dtype
