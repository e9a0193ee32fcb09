"""The learning rate grows with the batch exactly once, whatever comes before and after wrapping."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError
from hvdp.testing import World, worlds


def _start() -> int:
    torch.set_num_threads(1)
    hvd.init()
    return hvd.size()


def _optimizer(rates: tuple[float, ...] = (0.5, 0.25)) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def _rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def once() -> None:
    size = _start()
    for rule, factor in ((None, 1), ("linear", size * 2), ("sqrt", (size * 2) ** 0.5)):
        optimizer = hvd.DistributedOptimizer(_optimizer(), backward_passes_per_step=2, lr_scaling=rule)
        assert _rates(optimizer) == pytest.approx([0.5 * factor, 0.25 * factor])
        for _ in range(2):
            optimizer.step()
        assert _rates(optimizer) == pytest.approx([0.5 * factor, 0.25 * factor])
    with pytest.raises(InvalidArgumentError):
        hvd.DistributedOptimizer(optimizer, lr_scaling="linear")
    tensor = _optimizer()
    tensor.param_groups[0]["lr"] = torch.tensor(0.5)
    hvd.DistributedOptimizer(tensor, lr_scaling="linear")
    assert _rates(tensor) == pytest.approx([0.5 * size, 0.25 * size])


def checkpoints() -> None:
    size = _start()
    scaled = [0.5 * size, 0.25 * size]
    saved = hvd.DistributedOptimizer(_optimizer(), lr_scaling="linear").state_dict()
    loaded_late = hvd.DistributedOptimizer(_optimizer((9.0, 9.0)), lr_scaling="linear")
    loaded_late.load_state_dict(saved)
    assert _rates(loaded_late) == pytest.approx(scaled)
    loaded_late.load_state_dict(loaded_late.state_dict())
    assert _rates(loaded_late) == pytest.approx(scaled)
    plain = _optimizer((9.0, 9.0))
    plain.load_state_dict(saved)
    loaded_early = hvd.DistributedOptimizer(plain, lr_scaling="linear")
    assert _rates(loaded_early) == pytest.approx(scaled)
    # Written by a job of another size: the rate follows this one.
    other = hvd.DistributedOptimizer(_optimizer(), backward_passes_per_step=5, lr_scaling="linear")
    for early in (True, False):
        fresh = _optimizer((9.0, 9.0))
        if early:
            fresh.load_state_dict(other.state_dict())
        fresh = hvd.DistributedOptimizer(fresh, lr_scaling="linear")
        if not early:
            fresh.load_state_dict(other.state_dict())
        assert _rates(fresh) == pytest.approx(scaled)
    # Written before the job was distributed, or without scaling.
    fresh = hvd.DistributedOptimizer(_optimizer((9.0, 9.0)), lr_scaling="linear")
    fresh.load_state_dict(_optimizer().state_dict())
    assert _rates(fresh) == pytest.approx(scaled)


def schedules() -> dict[str, bool]:
    size = _start()
    found = {}
    for name, make in {
        "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
        "cycle": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, [0.4, 0.8], step_size_up=4),
        "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.4, 0.8], total_steps=8),
    }.items():
        # Rates that are given to a scheduler are taken as they are once the optimizer is scaled.
        for early in (True,) if "cycle" in name else (False, True):
            plain, reference = _optimizer(), _optimizer()
            scheduler = make(plain) if early else None
            optimizer = hvd.DistributedOptimizer(plain, lr_scaling="linear")
            scheduler = scheduler or make(optimizer)
            theirs = make(reference)
            for _ in range(3):
                for each in (optimizer, scheduler, reference, theirs):
                    each.step()
            wanted = [rate * size for rate in _rates(reference)]
            found[f"{name} {'before' if early else 'after'}"] = _rates(optimizer) == pytest.approx(wanted)
    return found


def groups_that_schedulers_do_not_know() -> None:
    """Added after a scheduler was made, which goes on with those that it knows."""
    size = _start()
    plain = _optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    plain.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.125})
    optimizer = hvd.DistributedOptimizer(plain, lr_scaling="linear")
    assert scheduler.get_last_lr() == pytest.approx([0.5 * size, 0.25 * size])
    optimizer.step()
    scheduler.step()
    assert _rates(optimizer) == pytest.approx([0.25 * size, 0.125 * size, 0.0625 * size])


def one_line_on_rank_0() -> list[str]:
    _start()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvdp").addHandler(handler)
    optimizer = hvd.DistributedOptimizer(_optimizer(), backward_passes_per_step=3, lr_scaling="linear")
    optimizer.load_state_dict(optimizer.state_dict())
    hvd.DistributedOptimizer(_optimizer())
    logging.getLogger("hvdp").removeHandler(handler)
    return lines


def _run_all() -> tuple[dict[str, bool], list[str]]:
    once()
    checkpoints()
    groups_that_schedulers_do_not_know()
    return schedules(), one_line_on_rank_0()


@pytest.fixture(scope="module", params=worlds(shm=(1, 3), mpi=(2,)), ids=str)
def found(request: pytest.FixtureRequest) -> tuple[World, list[tuple[dict[str, bool], list[str]]]]:
    world: World = request.param
    return world, world.run(_run_all, timeout=100)


def test_one_log_line_on_rank_0(found: Any) -> None:
    world, by_rank = found
    (_, first), *others = by_rank
    assert all(lines == [] for _, lines in others)
    assert len(first) == 1
    factor = 3 * world.size
    for part in ("0.5, 0.25", f"{0.5 * factor:g}, {0.25 * factor:g}", f"effective batch of {factor} times"):
        assert part in first[0]


SCHEDULES = [f"{name} {when}" for name in ("step", "lambda", "cosine") for when in ("after", "before")]
SCHEDULES += ["cycle before", "one cycle before"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_keeps_the_scale(schedule: str, found: Any) -> None:
    for schedules_found, _ in found[1]:
        assert schedules_found[schedule]
