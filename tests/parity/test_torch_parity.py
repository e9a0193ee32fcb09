"""N ranks with a batch of B each train as one process with a batch of N * B does."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

import hvdp.torch as hvd
from hvdp.testing import World, worlds

BATCH = 12  # of all ranks together: the share of 1, 2, 3 and 4 ranks is a whole number
SMALL_BUCKETS = {"HVDP_FUSION_THRESHOLD": "1500"}

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda groups: torch.optim.Adam(groups, lr=2e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=2e-3, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True, eps=1e-4),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.01),
}


def _model(dtype: torch.dtype) -> torch.nn.Module:
    """A convolution, norms that look at one sample only, a parameter that is not always used."""
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 3, bias=False),
        torch.nn.GroupNorm(2, 6),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(96, 16),
        torch.nn.LayerNorm(16),
        torch.nn.GELU(),
        torch.nn.Linear(16, 4),
    ).to(dtype)


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Norms and biases apart, with a rate of their own."""
    large = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": large}, {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 1e-3}]


def _batches(steps: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(BATCH, 1, 6, 6, generator=random, dtype=torch.float64).to(dtype),
            torch.randint(0, 4, (BATCH,), generator=random),
        )
        for _ in range(steps)
    ]


def _train(name: str, dtype: torch.dtype, steps: int, distributed: bool, passes: int = 1) -> torch.nn.Module:
    model = _model(dtype)
    optimizer = OPTIMIZERS[name](_groups(model))
    share = slice(0, BATCH)
    if distributed:
        each = BATCH // hvd.size()
        share = slice(hvd.rank() * each, (hvd.rank() + 1) * each)
        if hvd.rank() > 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        hvd.broadcast_parameters(model.state_dict())
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), backward_passes_per_step=passes
        )
    for images, labels in _batches(steps, dtype):
        optimizer.zero_grad()
        parts = zip(images[share].chunk(passes), labels[share].chunk(passes), strict=True)
        for part, target in parts:
            loss = torch.nn.functional.cross_entropy(model(part), target, reduction="sum")
            (loss * (hvd.size() if distributed else 1) / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def _flat(model: torch.nn.Module) -> Any:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).double().numpy()


def _differences() -> dict[str, float]:
    """Largest difference of any parameter, for each way to train."""
    torch.set_num_threads(1)
    hvd.init()
    found = {}
    for name in OPTIMIZERS:
        for dtype in (torch.float64, torch.float32):
            alone = _flat(_train(name, dtype, 20, distributed=False))
            assert np.abs(alone - _flat(_model(dtype))).max() > 1e-3, "nothing was learned"
            together = _flat(_train(name, dtype, 20, distributed=True))
            found[f"{name} {dtype}"] = float(np.abs(alone - together).max())
        if name == "sgd":
            whole = _flat(_train(name, torch.float64, 20, distributed=False))
            accumulated = _flat(_train(name, torch.float64, 20, distributed=True, passes=2))
            found["sgd in 2 passes torch.float64"] = float(np.abs(whole - accumulated).max())
    return found


@pytest.mark.parametrize("world", worlds(shm=(1, 2, 3, 4), mpi=(1, 2, 3, 4)), ids=str)
def test_many_ranks_train_as_one_process_does(world: World) -> None:
    bounds = {"torch.float64": 1e-10, "torch.float32": 1e-5}
    for rank, found in enumerate(world.run(_differences, env=SMALL_BUCKETS, timeout=100)):
        wrong = {way: value for way, value in found.items() if not value <= bounds[way.split()[-1]]}
        assert not wrong, f"on rank {rank}: {wrong}"


def _digests() -> list[str]:
    torch.set_num_threads(1)
    hvd.init()
    return [
        hashlib.sha256(_flat(_train(name, torch.float32, 100, distributed=True)).tobytes()).hexdigest()
        for name in ("sgd", "adam")
    ]


@pytest.mark.parametrize("world", worlds(shm=(3,), mpi=(2,)), ids=str)
def test_ranks_and_runs_agree_to_the_last_bit(world: World) -> None:
    first = world.run(_digests, env=SMALL_BUCKETS, timeout=100)
    assert first == [first[0]] * world.size
    assert world.run(_digests, env=SMALL_BUCKETS, timeout=100) == first
