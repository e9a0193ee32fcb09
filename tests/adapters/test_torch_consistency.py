"""Drift between ranks is found, named and placed; a missing broadcast is said once."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch

import hvdp.torch as hvd
from hvdp.errors import MismatchError
from hvdp.testing import World, worlds


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _start() -> tuple[int, int, list[str]]:
    torch.set_num_threads(1)
    hvd.init()
    heard = _Heard()
    logger = logging.getLogger("hvdp")
    logger.handlers[:] = [heard]
    return hvd.rank(), hvd.size(), heard.texts


def _model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    return torch.nn.Sequential(*layers)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()


def _adam(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters(), **options
    )


def _drift(*args: Any) -> str:
    with pytest.raises(MismatchError) as caught:
        hvd.check_consistency(*args)
    return str(caught.value)


def on_request() -> None:
    rank, size, _ = _start()
    model = _model()
    optimizer = _adam(model)
    for _ in range(3):
        _step(model, optimizer)
    hvd.check_consistency(model)  # running statistics differ, and may
    hvd.check_consistency(model, optimizer)
    everybody = list(range(size))
    last, others = [size - 1], everybody[:-1]
    with torch.no_grad():
        if rank == size - 1:
            model[2].weight[0, 3] += 1e-7
            model[2].bias.zero_()
    text = f"parameter '2.weight' differs between ranks {others} and {last} (1 more differ)"
    assert text in _drift(model)
    assert f"after step 3: {text}" in _drift(model, optimizer)
    hvd.broadcast_parameters(model.state_dict())
    state = optimizer.state[model[0].bias]
    if rank == size - 1:
        state["exp_avg"] += 1
        optimizer.param_groups[0]["lr"] = 0.2
    assert "option 'lr' of parameter group 0 differs" in _drift(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    assert "optimizer state 'exp_avg' of '0.bias' differs" in _drift(model, optimizer)
    if rank == size - 1:
        del state["exp_avg"]
    assert f"optimizer state 'exp_avg' of '0.bias' is missing on ranks {last}" in _drift(model, optimizer)
    hvd.broadcast_optimizer_state(optimizer)
    hvd.check_consistency(model, optimizer)
    odd = torch.nn.ParameterList(
        [
            torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
            torch.nn.Parameter(torch.zeros(()).bfloat16()),
            torch.nn.Parameter(torch.zeros(0)),
            torch.nn.Parameter(torch.zeros(2, 3).T),
        ]
    )
    hvd.check_consistency(odd)


def at_the_first_step() -> None:
    rank, _, heard = _start()
    same, apart = _model(), _model(rank)
    for _ in range(2):
        _step(same, _adam(same))
    assert heard == []
    optimizer = _adam(apart)
    for _ in range(3):
        _step(apart, optimizer)
    texts = [text for text in heard if "first step" in text]
    assert len(texts) == (rank == 0)
    if rank == 0:
        assert "parameter '0.weight' differs between ranks [0] and [1]" in texts[0]
        assert "call hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in texts[0]
    heard.clear()
    # A checkpoint that one rank alone has restored.
    restored = _model()
    plain = torch.optim.Adam(restored.parameters(), lr=0.1)
    if rank == 0:
        _step(restored, plain)
    hvd.broadcast_parameters(restored.state_dict())
    _step(restored, hvd.DistributedOptimizer(plain, restored.named_parameters()))
    if rank == 0:
        assert "optimizer state 'step' of '0.weight' is missing on ranks [1" in heard[0]
        assert "call hvd.broadcast_optimizer_state(optimizer, root_rank=0)" in heard[0]
    else:
        assert heard == []


def every_few_steps() -> None:
    rank, size, _ = _start()
    model = _model()
    os.environ["HVDP_CHECK_EVERY"] = "2"
    optimizer = _adam(model)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    for _ in range(4):
        _step(model, optimizer)
    if rank == 1:
        with torch.no_grad():
            model[2].bias += 1
    _step(model, optimizer)
    with pytest.raises(MismatchError, match="after step 6: parameter") as caught:
        _step(model, optimizer)
    assert f"ranks {[r for r in range(size) if r != 1]} and [1]" in str(caught.value)
    hvd.broadcast_parameters(model.state_dict())
    # Ranks that have made different numbers of steps look at the same time again after a join.
    for _ in range(3 - (rank == 1)):
        _step(model, optimizer)
    hvd.join()
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    for _ in range(4):
        _step(model, optimizer)


def _run_all() -> None:
    on_request()
    at_the_first_step()
    every_few_steps()


@pytest.mark.parametrize("world", worlds(shm=(2, 3)), ids=str)
def test_drift(world: World) -> None:
    world.run(_run_all)
