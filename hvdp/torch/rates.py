"""Learning rates for the batch that all ranks form together: scaled once, and never twice."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hvdp.scaling import LrScaling, scale_factor

__all__ = ["rate_scaler", "recorded_factor", "scale_with_schedulers"]

_log = logging.getLogger(__name__)
_FACTOR = "hvdp_lr_factor"
"""In every scaled parameter group, and so in checkpoints: what its rate was multiplied by."""

# OneCycleLR keeps the ends of its ramps in the groups, CyclicLR in lists of its own.
_RATES_OF_A_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_A_SCHEDULER = ("base_lrs", "max_lrs", "_last_lr")


def rate_scaler(
    rule: LrScaling, batch_factor: float, announce: bool
) -> Callable[[torch.optim.Optimizer], None]:
    """A function that brings an optimizer's rates to this job's scale, from whatever scale they have.

    Args:
        batch_factor: effective batch over one rank's batch of one pass.
        announce: log the change; one rank does.
    """
    factor = scale_factor(rule, batch_factor)

    def scale(optimizer: torch.optim.Optimizer) -> None:
        old = [float(group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            change = factor / group.get(_FACTOR, 1.0)
            group[_FACTOR] = factor
            if change != 1.0:
                for key in _RATES_OF_A_GROUP:
                    if key in group:
                        group[key] = group[key] * change
        new = [float(group["lr"]) for group in optimizer.param_groups]
        if new != old and announce:
            _log.info(
                "learning rate %s -> %s: %s scaling for an effective batch of %g times one rank's",
                _few(old),
                _few(new),
                rule,
                batch_factor,
            )

    return scale


def scale_with_schedulers(optimizer: torch.optim.Optimizer, scale: Callable[[Any], None]) -> None:
    """Scale, and bring to the same scale the rates that schedulers have noted when they were made.

    An optimizer does not know its schedulers, so they are looked for among all objects.
    """
    before = [group.get(_FACTOR, 1.0) for group in optimizer.param_groups]
    scale(optimizer)
    changes = [group[_FACTOR] / old for group, old in zip(optimizer.param_groups, before, strict=True)]
    if any(change != 1.0 for change in changes):
        for scheduler in _schedulers_of(optimizer):
            for key in _RATES_OF_A_SCHEDULER:
                if key in vars(scheduler):
                    # Of fewer groups, where some were added after the scheduler was made.
                    rates = zip(vars(scheduler)[key], changes, strict=False)
                    vars(scheduler)[key] = [rate * change for rate, change in rates]


def _schedulers_of(optimizer: torch.optim.Optimizer) -> Iterator[LRScheduler]:
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        for item in gc.get_objects():
            if issubclass(type(item), LRScheduler) and vars(item).get("optimizer") is optimizer:
                yield item


def recorded_factor(optimizer: torch.optim.Optimizer) -> float | None:
    """What a scaler has multiplied the rates by, or None if none has."""
    factors = [group[_FACTOR] for group in optimizer.param_groups if _FACTOR in group]
    return float(factors[0]) if factors else None


def _few(rates: list[float]) -> str:
    distinct = list(dict.fromkeys(f"{rate:g}" for rate in rates))
    return ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")
