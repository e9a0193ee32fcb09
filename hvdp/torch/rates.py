"""Learning rates for the batch that all ranks form together: scaled once, and never twice."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from hvdp.scaling import LrScaling, scale_factor

__all__ = ["rate_scaler", "recorded_factor"]

_log = logging.getLogger(__name__)
_FACTOR = "hvdp_lr_factor"
"""In every scaled parameter group, and so in checkpoints: what its rate was multiplied by."""


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
                for key in ("lr", "initial_lr"):
                    if key in group:
                        group[key] = group[key] * change
        new = [float(group["lr"]) for group in optimizer.param_groups]
        if new != old and announce and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            _log.warning(
                "a learning-rate scheduler was made before DistributedOptimizer(..., lr_scaling=%r): one "
                "that keeps its own base rates, as LambdaLR does, will undo the scaling; make it afterwards",
                rule,
            )
        if new != old and announce:
            _log.info(
                "learning rate %s -> %s: %s scaling for an effective batch of %g times one rank's",
                _few(old),
                _few(new),
                rule,
                batch_factor,
            )

    return scale


def recorded_factor(optimizer: torch.optim.Optimizer) -> float | None:
    """What a scaler has multiplied the rates by, or None if none has."""
    factors = [group[_FACTOR] for group in optimizer.param_groups if _FACTOR in group]
    return float(factors[0]) if factors else None


def _few(rates: list[float]) -> str:
    distinct = list(dict.fromkeys(f"{rate:g}" for rate in rates))
    return ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")
