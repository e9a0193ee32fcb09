"""A model split over two devices; the second one is made up: only copies go between it and the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import hvdp.torch as hvd
from hvdp.testing import World, worlds

far = torch.device("meta")
"""How the second device is named: PyTorch knows it, and does nothing there by itself."""


class FarTensor(torch.Tensor):
    """Its values lie in `inner`."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> FarTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=far
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class FarDevice(TorchDispatchMode):
    """Makes the second device known in this thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [isinstance(tensor, FarTensor) for tensor in tensors]
    copies = func._schema.name in ("aten::_to_copy", "aten::copy_")
    if any(there) and not copies and any(t.dim() for t, gone in zip(tensors, there, strict=True) if not gone):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    device = kwargs.get("device")
    if device == far:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if func._schema.is_mutable:
        return None if out is None else args[0]
    to_far = any(there) if device is None else device == far
    return tree_map(lambda t: FarTensor(t) if to_far and isinstance(t, torch.Tensor) else t, out)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, FarTensor) else value


class _Split(torch.nn.Module):
    """Embedding and first layer here, the second one there."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(7, 4, sparse=True, dtype=torch.float64)
        self.here = torch.nn.Linear(4, 5, dtype=torch.float64)
        self.there = torch.nn.Linear(5, 3, dtype=torch.float64)
        self.device = torch.device("cpu")
        if split:
            self.device = far
            for name, parameter in list(self.there.named_parameters()):
                setattr(self.there, name, torch.nn.Parameter(parameter.detach().to(far)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.here(self.words(words)).tanh()
        return self.there(hidden.to(self.device)).cpu()


def _values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=False)


def _batch(step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(7, (4 * ranks,), generator=generator)
    return words, torch.randn(4 * ranks, 3, generator=generator, dtype=torch.float64)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    words, targets = batch
    optimizer.zero_grad()
    (model(words) - targets).pow(2).mean().backward()
    dense = [p for name, p in model.named_parameters() if not name.startswith("words")]
    torch.nn.utils.clip_grad_value_(dense, 0.05, foreach=False)
    optimizer.step()


def _train_split() -> None:
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    plain = _Split(split=False)
    wanted = _optimizer(plain)
    with FarDevice():
        model = _Split(split=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + rank)
        hvd.broadcast_parameters(model.state_dict())
        optimizer = hvd.DistributedOptimizer(_optimizer(model), model.named_parameters())
        for step in range(5):
            whole = _batch(step, ranks)
            part = slice(4 * rank, 4 * rank + 4)
            _step(model, optimizer, tuple(tensor[part] for tensor in whole))
            _step(plain, wanted, whole)
            if step == 1:
                # As after a checkpoint that rank 0 alone has loaded.
                if rank != 0:
                    for state in optimizer.state.values():
                        state["momentum_buffer"].zero_()
                hvd.broadcast_optimizer_state(optimizer)
                assert optimizer.state[model.words.weight]["momentum_buffer"].is_sparse
                hvd.check_consistency(model, optimizer)
        assert all(isinstance(parameter, FarTensor) for parameter in model.there.parameters())
        momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.there.parameters()]
        assert all(isinstance(momentum, FarTensor) for momentum in momenta)
        for name, value in _values(model).items():
            torch.testing.assert_close(value, _values(plain)[name], rtol=0, atol=1e-12)
        found = hvd.allreduce(torch.full((3,), float(rank)).to(far), op=hvd.Sum)
        assert isinstance(found, FarTensor)
        assert found.cpu().tolist() == [sum(range(ranks))] * 3


@pytest.mark.parametrize("world", worlds(shm=(2, 3)), ids=str)
def test_a_model_split_over_devices_trains_like_one_process(world: World) -> None:
    world.run(_train_split)


def _different_devices() -> str:
    hvd.init()
    with FarDevice(), pytest.raises(hvd.MismatchError) as caught:
        hvd.allreduce(torch.ones(2).to(far if hvd.rank() else "cpu"), name="where")
    return str(caught.value)


@pytest.mark.parametrize("world", worlds(shm=(2,)), ids=str)
def test_ranks_that_name_different_devices_are_told(world: World) -> None:
    for text in world.run(_different_devices):
        assert "'where'" in text
        assert "cpu" in text
        assert "meta" in text
