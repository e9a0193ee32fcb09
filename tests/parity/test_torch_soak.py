"""2,000 steps in which every rank uses other parameters each time: equal, exact, and nothing grows."""

from __future__ import annotations

import gc
import hashlib
import warnings
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import hvdp.torch as hvd
from hvdp.testing import World, worlds

STEPS = 2000
WARM = 400  # steps until caches are full
MORE = 4 << 20  # bytes that 1,600 steps may leave; 3 KiB a step would be more


def _model() -> nn.ParameterList:
    random = torch.Generator().manual_seed(1)
    return nn.ParameterList(
        nn.Parameter(torch.randn(size, generator=random, dtype=torch.float64))
        for size in (3, 50, 7, 200, 1, 20)
    )


def _loss(model: nn.ParameterList, step: int, rank: int) -> Tensor | None:
    """Of a random choice of the parameters, perhaps of none: then there is no backward."""
    random = torch.Generator().manual_seed(step * 16 + rank)
    used = torch.rand(len(model), generator=random) < 0.4
    aims = torch.randn(len(model), generator=random, dtype=torch.float64)
    terms = [(p - aim).square().mean() for p, aim, use in zip(model, aims, used, strict=True) if use]
    return sum(terms) / len(model) if terms else None


def _step(model: nn.ParameterList, optimizer: Any, loss: Tensor | None, to_none: bool) -> None:
    optimizer.zero_grad(set_to_none=to_none)
    if loss is not None:
        loss.backward()
    optimizer.step()


def _optimizer(model: nn.ParameterList) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def _together() -> tuple[str, float, dict[str, tuple[int, int]]]:
    """A digest of the parameters, their distance from those of one process, what was there and what is."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    hvd.init()
    model, process = _model(), psutil.Process()
    optimizer = hvd.DistributedOptimizer(_optimizer(model), named_parameters=model.named_parameters())
    counts = []
    for step in range(STEPS):
        _step(model, optimizer, _loss(model, step, hvd.rank()), to_none=step % 3 > 0)
        if step in (WARM, STEPS - 1):
            gc.collect()
            memory = process.memory_info().rss
            counts.append({"bytes": memory, "threads": process.num_threads(), "files": process.num_fds()})
    alone = _model()
    plain = _optimizer(alone)
    for step in range(STEPS):
        losses = [loss for rank in range(hvd.size()) if (loss := _loss(alone, step, rank)) is not None]
        _step(alone, plain, sum(losses) / hvd.size() if losses else None, to_none=step % 3 > 0)
    flat, whole = (torch.cat([p.detach() for p in net]) for net in (model, alone))
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    grown = {what: (counts[0][what], counts[1][what]) for what in counts[0]}
    return digest, float((flat - whole).abs().max()), grown


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", worlds(shm=(2, 3)), ids=str)
def test_thousands_of_steps(world: World) -> None:
    found = world.run(_together, env={"HVDP_FUSION_THRESHOLD": "500"}, timeout=200)
    assert len({digest for digest, _, _ in found}) == 1
    for _, distance, grown in found:
        assert distance < 1e-9
        assert grown["bytes"][1] - grown["bytes"][0] < MORE
        for what in ("threads", "files"):
            assert grown[what][1] <= grown[what][0], what
