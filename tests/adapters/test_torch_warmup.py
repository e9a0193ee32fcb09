"""WarmupLR: the ramp, alone and with other schedulers, on any number of ranks, across checkpoints."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError
from hvdp.scaling import warmup_factor
from hvdp.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("error")


def _optimizer(rate: Any = 8.0) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": rate}, {"params": [parameters[1]], "lr": 0.5}]
    return torch.optim.SGD(groups, lr=1.0)


def _rates(optimizer: Any, schedulers: Any, steps: int) -> list[float]:
    """The first group's rate at each step."""
    schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return rates


def test_the_ramp() -> None:
    for options in (
        {"warmup_epochs": 1.5, "steps_per_epoch": 4},
        {"warmup_steps": 6},
        {"warmup_epochs": 6},
    ):
        optimizer = _optimizer()
        scheduler = hvd.WarmupLR(optimizer, scale=4, **options)
        rates = _rates(optimizer, scheduler, 9)
        assert rates == pytest.approx([2, 3, 4, 5, 6, 7, 8, 8, 8])
        assert rates == pytest.approx([8 * warmup_factor(step, 6, 4) for step in range(9)])
        assert scheduler.get_last_lr() == pytest.approx([8, 0.5])
    tensor = _optimizer(torch.tensor(8.0))
    assert _rates(tensor, hvd.WarmupLR(tensor, warmup_steps=2, scale=2), 3) == pytest.approx([4, 6, 8])
    flat = _optimizer()
    assert _rates(flat, hvd.WarmupLR(flat, warmup_steps=2, scale=1), 3) == [8.0] * 3


def test_a_group_that_comes_during_the_ramp() -> None:
    optimizer = _optimizer()
    scheduler = hvd.WarmupLR(optimizer, warmup_steps=6, scale=4)
    assert _rates(optimizer, scheduler, 3) == pytest.approx([2, 3, 4])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 80.0})
    for wanted in (6, 7, 8, 8):
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == pytest.approx([wanted, wanted / 16, wanted * 10])


def test_with_other_schedulers() -> None:
    ramp = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    decay = [0.9**step for step in range(7)]
    wanted = [8 * a * b for a, b in zip(ramp, decay, strict=True)]
    for chain in (ChainedScheduler, list):
        for first_is_warmup in (True, False):
            optimizer = _optimizer()
            makers = [
                lambda o: hvd.WarmupLR(o, warmup_steps=3, scale=4),
                lambda o: ExponentialLR(o, 0.9),
            ]
            parts = [make(optimizer) for make in (makers if first_is_warmup else reversed(makers))]
            assert _rates(optimizer, chain(parts), 7) == pytest.approx(wanted)
    optimizer = _optimizer()
    parts = [hvd.WarmupLR(optimizer, warmup_steps=3, scale=4), StepLR(optimizer, 5)]
    assert _rates(optimizer, parts, 7) == pytest.approx([2, 4, 6, 8, 8, 0.8, 0.8])
    optimizer = _optimizer()
    parts = [hvd.WarmupLR(optimizer, warmup_steps=3, scale=4), CosineAnnealingLR(optimizer, 4)]
    sequence = SequentialLR(optimizer, parts, milestones=[3])
    cosine = [8 * (1 + torch.cos(torch.tensor(torch.pi * step / 4)).item()) / 2 for step in range(5)]
    assert _rates(optimizer, sequence, 8) == pytest.approx([2, 4, 6, *cosine], abs=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: LambdaLR(o, lambda _: 1.0),
        lambda o: LambdaLR(o, lambda step: 0.9**step),
        lambda o: OneCycleLR(o, 8.0, 10),
        lambda o: CyclicLR(o, 1.0, 8.0, 4),
        lambda o: CosineAnnealingWarmRestarts(o, 10),
    ],
)
@pytest.mark.parametrize("scale", [2, 4])
def test_schedulers_that_overwrite_follow_the_ramp(make: Any, scale: float) -> None:
    for first in (True, False):
        optimizer = _optimizer()
        parts = [make(optimizer)] if not first else []
        parts.append(hvd.WarmupLR(optimizer, warmup_steps=6, scale=scale))
        parts += [make(optimizer)] if first else []
        with pytest.raises(InvalidArgumentError, match="SequentialLR"):
            _rates(optimizer, parts, 6)


def _after_the_ramp(scale: float) -> list[list[float]]:
    found = []
    for make in (
        lambda o: LambdaLR(o, lambda step: 0.9**step),
        lambda o: StepLR(o, 2),
        lambda o: CosineAnnealingLR(o, 4),
        lambda o: CosineAnnealingWarmRestarts(o, 4),
    ):
        optimizer = _optimizer()
        parts = [hvd.WarmupLR(optimizer, warmup_steps=3, scale=scale), make(optimizer)]
        found.append(_rates(optimizer, SequentialLR(optimizer, parts, milestones=[3]), 7))
    return found


def test_after_the_ramp_the_rates_are_those_of_one_rank() -> None:
    for scale in (2, 4):
        for rates, alone in zip(_after_the_ramp(scale), _after_the_ramp(1), strict=True):
            ramp = [8 * warmup_factor(step, 3, scale) for step in range(3)]
            assert rates == pytest.approx([*ramp, *alone[3:]])


def test_beside_schedulers_that_multiply() -> None:
    for make in (
        lambda o: StepLR(o, 2),
        lambda o: PolynomialLR(o, 9),
        lambda o: CosineAnnealingLR(o, 9),
        lambda o: CosineAnnealingLR(o, 900, eta_min=1.0),
    ):
        optimizer = _optimizer()
        alone = _rates(optimizer, make(optimizer), 7)
        optimizer = _optimizer()
        parts = [hvd.WarmupLR(optimizer, warmup_steps=5, scale=4), make(optimizer)]
        wanted = [rate * warmup_factor(step, 5, 4) for step, rate in enumerate(alone)]
        assert _rates(optimizer, parts, 7) == pytest.approx(wanted, rel=1e-3)
    optimizer = _optimizer()
    warmup = hvd.WarmupLR(optimizer, warmup_steps=4, scale=4)
    plateau = ReduceLROnPlateau(optimizer, patience=1)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plateau.step(1.0)
        warmup.step()
    assert rates == pytest.approx([2, 3.5, 5, 0.65, 0.8, 0.08])


def test_checkpoints() -> None:
    def build() -> tuple[Any, Any]:
        optimizer = _optimizer()
        warmup = hvd.WarmupLR(optimizer, warmup_epochs=2, steps_per_epoch=3, scale=4)
        return optimizer, ChainedScheduler([warmup, ExponentialLR(optimizer, 0.9)])

    optimizer, scheduler = build()
    whole = _rates(optimizer, scheduler, 9)
    for cut in (0, 1, 4, 7):
        optimizer, scheduler = build()
        before = _rates(optimizer, scheduler, cut)
        file = io.BytesIO()
        torch.save([optimizer.state_dict(), scheduler.state_dict()], file)
        file.seek(0)
        optimizer, scheduler = build()
        saved = torch.load(file, weights_only=True)
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
        assert before + _rates(optimizer, scheduler, 9 - cut) == pytest.approx(whole)
    copied = copy.deepcopy(scheduler)
    assert copied.state_dict() == scheduler.state_dict()


def test_wrong_arguments() -> None:
    for options in (
        {"scale": 2},
        {"scale": 2, "warmup_epochs": 1, "warmup_steps": 1},
        {"scale": 2, "warmup_epochs": 1, "steps_per_epoch": 0},
        {"scale": 0, "warmup_steps": 1},
        {"scale": 2, "warmup_steps": -1},
        {"warmup_steps": 1},
    ):
        with pytest.raises(InvalidArgumentError, match="Received"):
            hvd.WarmupLR(_optimizer(), **options)


STEPS_OF_ONE_RANK = 12


def by_epochs(saved: Any = None) -> tuple[list[float], Any]:
    """The place on the ramp at each third of four epochs; and a checkpoint after two epochs."""
    warnings.simplefilter("error")
    hvd.init()
    steps = STEPS_OF_ONE_RANK // hvd.size()
    optimizer = _optimizer(1.0)
    hvd.DistributedOptimizer(optimizer, lr_scaling="linear")
    scheduler = hvd.WarmupLR(optimizer, warmup_epochs=3, steps_per_epoch=steps)
    start = 0
    if saved is not None:
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
        start = 2
    places = []
    for epoch in range(start, 4):
        for step in range(steps):
            if 3 * step % steps == 0:
                places.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        if epoch == 1:
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    return places, saved


def both_ways(saved: Any) -> Any:
    return *by_epochs(), by_epochs(saved)[0]


def test_the_place_does_not_depend_on_the_number_of_ranks() -> None:
    thirds = [n / 3 for n in range(12)]
    checkpoint = by_epochs()[1]
    hvd.shutdown()
    was = 1
    for size in (2, 4):
        (places, saved, later), *_ = run_ranks(both_ways, size, checkpoint, warm=True)
        assert places == pytest.approx([1 + (size - 1) * min(done / 3, 1) for done in thirds])
        # What fewer ranks had saved two thirds up the ramp goes on there.
        assert later[0] == pytest.approx(size / was * (1 + (was - 1) * 2 / 3))
        assert later[1:] == pytest.approx(places[7:])
        checkpoint, was = saved, size
