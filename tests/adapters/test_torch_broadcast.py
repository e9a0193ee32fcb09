"""Broadcasts of what is not a plain tensor: extra state, odd options, named state, memory order."""

from __future__ import annotations

import copy
import warnings
from types import MappingProxyType
from typing import Any

import pytest
import torch

import hvdp.torch as hvd
from hvdp.errors import MismatchError
from hvdp.testing import World, worlds


def _start() -> tuple[int, int]:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    hvd.init()
    return hvd.rank(), hvd.size()


class Counting(torch.nn.Linear):
    """A module with state beside its tensors."""

    seen: Any = None

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def entries_that_are_no_tensors() -> None:
    rank, size = _start()
    root = size - 1
    model = Counting(2, 2)
    model.seen = [rank, None, 0.1 * rank]
    state = model.state_dict()
    hvd.broadcast_parameters(state, root_rank=root)
    model.load_state_dict(state)
    assert model.seen == [root, None, 0.1 * root]
    mixed = {"w": torch.full((2,), float(rank)), "epoch": rank, "none": None if rank == root else 3}
    hvd.broadcast_parameters(mixed, root_rank=root)
    assert mixed == {"w": mixed["w"], "epoch": root, "none": None}
    assert mixed["w"].tolist() == [root, root]
    pairs = [("w", torch.full((2,), float(rank))), ("epoch", rank)]
    hvd.broadcast_parameters(pairs, root_rank=root)
    assert pairs[0][1].tolist() == [root, root]
    assert pairs[1] == ("epoch", rank)
    model.weight.data.fill_(rank)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=root)
    hvd.broadcast_parameters(iter([model.weight]), root_rank=root)
    assert model.weight.tolist() == [[root, root]] * 2
    hvd.broadcast_parameters(MappingProxyType({"w": torch.zeros(1), "epoch": rank}))
    hvd.broadcast_parameters({})
    with pytest.raises(MismatchError, match="'x' no tensor"):
        hvd.broadcast_parameters({"x": torch.zeros(()) if rank == 0 else None})


class Named(torch.optim.SGD):
    """Keeps something that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["common"] = {"calls": self.state.get("common", {"calls": 0})["calls"] + 1}
        return super().step(closure)


def _train(model: torch.nn.Module, optimizer: Any, data: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def _restored(make: Any) -> tuple[torch.nn.Module, Any]:
    """A model after three steps of one process, with options that may differ; equal wherever it is made."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Flatten(), torch.nn.Linear(12, 1))
    model = model.double().to(memory_format=torch.channels_last)
    optimizer = make(model.parameters())
    for _ in range(3):
        _train(model, optimizer, torch.randn(4, 2, 3, 3).double())
    optimizer.param_groups[0] |= {"lr": optimizer.param_groups[0]["lr"] / 3, "mine": (1, None, True)}
    return model, optimizer


def goes_on_as_one_process() -> None:
    """Only rank 0 restores a checkpoint; five more steps are those of one process that made all eight."""
    rank, size = _start()
    makers: list[Any] = [
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02), capturable=False),
        lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True),
        lambda p: torch.optim.ASGD(p, lr=0.01),
        lambda p: torch.optim.Rprop(p),
        lambda p: Named(p, lr=0.01, momentum=0.9),
    ]
    for make in makers:
        alone, one = _restored(make)
        model, optimizer = _restored(make)
        if rank:
            torch.manual_seed(rank)
            for module in model:
                if not isinstance(module, torch.nn.Flatten):
                    module.reset_parameters()
            optimizer = make(model.parameters())
            optimizer.param_groups[0] |= {"foreach": None, "lr": 5.0, "of others": 1}
            optimizer.param_groups[0].pop("betas", None)
        hvd.broadcast_parameters(model.state_dict())
        weights = copy.deepcopy(model.state_dict())
        hvd.broadcast_optimizer_state(optimizer)
        torch.testing.assert_close(dict(model.state_dict()), dict(weights), rtol=0, atol=0)
        assert optimizer.param_groups[0]["mine"] == (1, None, True)
        assert "of others" not in optimizer.param_groups[0]
        state = optimizer.state[model[0].weight]
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.shape == model[0].weight.shape:
                assert value.stride() == model[0].weight.stride()
        if make is makers[-1]:
            assert optimizer.state["common"] == {"calls": 3}
        hvd.check_consistency(model, optimizer)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        generator = torch.Generator().manual_seed(7)
        for _ in range(5):
            data = torch.randn(2 * size, 2, 3, 3, generator=generator, dtype=torch.float64)
            _train(alone, one, data)
            _train(model, optimizer, data[2 * rank : 2 * rank + 2])
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                value, alone.state_dict()[name], msg=lambda text, o=one: f"{type(o).__name__}: {text}"
            )


def _run_all() -> None:
    entries_that_are_no_tensors()
    goes_on_as_one_process()


@pytest.mark.parametrize("world", worlds(shm=(2, 3)), ids=str)
def test_broadcasts(world: World) -> None:
    world.run(_run_all)
