"""broadcast_parameters and broadcast_optimizer_state: rank 0's state, to the last bit and type."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.testing import World, worlds

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1 + 1e-17, betas=(0.9, 0.999), amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1 / 3, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.1, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten())


def _start(seed: int = 0) -> int:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(seed + hvd.rank())
    return hvd.rank()


def _train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(2, 1, 5, 5)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(evaluate)


def _exact(value: Any) -> Any:
    """Something that is equal only for equal types and bits."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return "tensor", str(value.dtype), tuple(value.shape), raw.numpy().tobytes()
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [_exact(item) for item in value]
    return type(value).__name__, repr(value)


def parameters() -> list[Any]:
    rank = _start()
    found = []
    for root in range(hvd.size()):
        model = _model()
        model(torch.randn(2, 1, 5, 5) * (rank + 1))
        before = _exact(model.state_dict())
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        if rank == root:
            assert _exact(model.state_dict()) == before
        found.append(_exact(model.state_dict()))
        with torch.no_grad():
            model[0].weight.add_(rank)
        hvd.broadcast_parameters(model.named_parameters(), root_rank=root)
        found.append(_exact(dict(model.named_parameters())))
    odd = {"weight": torch.full((3, 4), float(rank)).T, "half": torch.ones(2).bfloat16() * rank}
    odd |= {"flag": torch.tensor(rank == 0), "scalar": torch.tensor(rank), "empty": torch.empty(0)}
    hvd.broadcast_parameters({**odd, "no tensor": rank})
    assert odd["weight"].stride() == (1, 4)
    assert not odd["weight"].any()
    assert odd["flag"]
    return [*found, _exact({key: value.contiguous() for key, value in odd.items()})]


def parameters_that_differ() -> str:
    rank = _start()
    model = torch.nn.Linear(2, 2 + (rank == 1))
    with pytest.raises(MismatchError) as caught:
        hvd.broadcast_parameters(model.state_dict())
    return str(caught.value)


def optimizer_state() -> dict[str, Any]:
    """Trained on rank 0, fresh on the others, as after loading a checkpoint."""
    rank = _start()
    found = {}
    for name, make in OPTIMIZERS.items():
        model = _model()
        optimizer = make(model.parameters())
        optimizer.param_groups[0]["my own"] = (rank, "text", None)
        if rank == 0:
            _train(model, optimizer, 3)
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.7
        before, weights = _exact(optimizer.state_dict()), _exact(model.state_dict())
        optimizer.step = _must_not_step
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        del optimizer.step
        assert _exact(model.state_dict()) == weights
        if rank == 0:
            assert _exact(optimizer.state_dict()) == before
        found[name] = _exact(optimizer.state_dict())
        hvd.broadcast_parameters(model.state_dict())
        torch.manual_seed(1)
        _train(model, optimizer, 2)
        found[f"{name}, trained on"] = _exact(dict(model.named_parameters()))
    return found


def _must_not_step(*_: Any) -> None:
    raise AssertionError("step() was called")


def state_of_a_distributed_optimizer() -> Any:
    """State on the others, none on the root: they must not keep theirs."""
    rank = _start()
    model = torch.nn.Linear(3, 3)
    hvd.broadcast_parameters(model.state_dict())
    plain = torch.optim.Adam(model.parameters(), lr=0.5)
    if rank:
        (model(torch.ones(1, 3)).sum()).backward()
        plain.step()
        plain.zero_grad()
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not optimizer.state
    model(torch.ones(1, 3) * rank).sum().backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
    return _exact(optimizer.state_dict()), _exact(model.state_dict())


class Moments(NamedTuple):
    first: torch.Tensor
    count: int


class Unbreakable(list[int]):
    """No list can be made one."""

    def __init__(self) -> None:
        super().__init__([1])


def state_of_odd_classes() -> Any:
    rank = _start()
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if rank == 0:
        optimizer.state[model.weight]["moments"] = Moments(torch.ones(1, 2), 3)
    hvd.broadcast_optimizer_state(optimizer)
    moments = optimizer.state[model.weight]["moments"]
    assert type(moments).__name__ == "Moments"
    assert moments.count == 3
    found = _exact(moments)
    if rank == 0:
        optimizer.state[model.weight]["odd"] = Unbreakable()
    with pytest.raises(InvalidArgumentError, match="rank 0: TypeError"):
        hvd.broadcast_optimizer_state(optimizer)
    wrong = (3, {4}, (1 // (1 - i) for i in range(2)))
    for params in wrong:
        with pytest.raises(InvalidArgumentError, match="rank 1: params must be"):
            hvd.broadcast_parameters(params if rank == 1 else model.state_dict())
    return found


def groups_that_differ() -> str:
    rank = _start()
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": parameters}] if rank == 0 else [{"params": [p]} for p in parameters]
    optimizer = torch.optim.Adam(groups)
    kept = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(MismatchError) as caught:
        hvd.broadcast_optimizer_state(optimizer)
    assert optimizer.state_dict() == kept
    return str(caught.value)


def _run_all() -> list[Any]:
    return [
        parameters(),
        parameters_that_differ(),
        optimizer_state(),
        state_of_a_distributed_optimizer(),
        groups_that_differ(),
        state_of_odd_classes(),
    ]


@pytest.mark.parametrize("world", worlds(shm=(1, 3), mpi=(2,)), ids=str)
def test_all_ranks_have_the_same_state(world: World) -> None:
    if world.size == 1:
        world.run(optimizer_state, timeout=100)
        return
    first, *others = world.run(_run_all, timeout=100)
    for found in others:
        for mine, theirs in zip(first, found, strict=True):
            assert mine == theirs
    _, parameters_text, _, _, groups_text, _ = first
    assert (
        "parameter 0 is 'weight' float32 (2, 2) on rank 0 and 'weight' float32 (3, 2) on rank 1"
        in parameters_text
    )
    assert "'group 0' parameters (2,) on rank 0 and 'group 0' parameters (1,) on rank 1" in groups_text
