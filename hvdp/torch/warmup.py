"""Gradual warm-up of learning rates that were scaled for the common batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hvdp.errors import InvalidArgumentError
from hvdp.scaling import warmup_factor
from hvdp.torch.rates import recorded_factor

__all__ = ["WarmupLR"]

_MORE = 1.1
"""Times the initial rate, without our factor: CosineAnnealingLR's eta_min may make it a little more."""


class WarmupLR(LRScheduler):
    """Lets scaled rates grow from what they were before scaling, in equal steps.

    A rate is multiplied by `hvdp.scaling.warmup_factor`. It multiplies what it finds, so it
    combines with schedulers that do so too (StepLR, ExponentialLR, CosineAnnealingLR, ...): in
    a ChainedScheduler, or simply stepped one after the other. Those that set rates outright
    (LambdaLR, CyclicLR, ...) come after it in a SequentialLR; beside it they are an error. The
    length is in epochs, so jobs with different numbers of ranks are at the same place of the
    ramp at the same epoch.

        scheduler = hvd.WarmupLR(optimizer, warmup_epochs=5, steps_per_epoch=len(loader))
        ...
        optimizer.step()
        scheduler.step()

    Args:
        optimizer: with rates already scaled; like every scheduler, make this one before the
            optimizer's state is loaded from a checkpoint.
        warmup_epochs: length of the ramp, where `step` is called `steps_per_epoch` times an epoch.
        steps_per_epoch: optimizer steps of one rank; 1 where `step` is called once an epoch.
        warmup_steps: or the length in calls of `step`.
        scale: what the rates were multiplied by; by default what DistributedOptimizer's
            `lr_scaling` has done. With 1, as on one rank, there is nothing to grow into.

    Raises:
        InvalidArgumentError: neither or both lengths, or no scale is known; by `step`: another
            scheduler has overwritten the rates during the ramp.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_epochs: float | None = None,
        steps_per_epoch: float = 1,
        warmup_steps: float | None = None,
        scale: float | None = None,
    ) -> None:
        if (warmup_epochs is None) == (warmup_steps is None) or not steps_per_epoch > 0:
            raise InvalidArgumentError(
                "WarmupLR needs warmup_epochs and a positive steps_per_epoch, or warmup_steps. "
                f"Received: warmup_epochs={warmup_epochs}, steps_per_epoch={steps_per_epoch}, "
                f"warmup_steps={warmup_steps}"
            )
        if scale is None:
            scale = recorded_factor(optimizer)
        if scale is None:
            raise InvalidArgumentError(
                "WarmupLR needs to know what the rates were multiplied by: give scale=, or use "
                'hvd.DistributedOptimizer(..., lr_scaling="linear") before. Received: scale=None'
            )
        self._length = float(warmup_epochs if warmup_steps is None else warmup_steps)  # type: ignore[arg-type]
        self._unit = float(steps_per_epoch) if warmup_steps is None else 1.0
        self._scale = scale
        # What each group's rate is multiplied by now.
        self._applied: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rates that `step` sets."""
        factor = self._factor(self.last_epoch)
        groups = self.optimizer.param_groups
        # Groups that came during the ramp are not on it yet.
        applied = self._applied + [1.0] * (len(groups) - len(self._applied))
        if self.last_epoch == 0:
            # A SequentialLR sets the rates back before it starts a scheduler.
            applied = [1.0] * len(groups)
        elif any(before != factor for before in self._applied):
            self._refuse_overwritten()
        if self._get_lr_called_within_step:
            self._applied = [factor] * len(groups)
        return [group["lr"] * (factor / before) for group, before in zip(groups, applied, strict=True)]

    def _refuse_overwritten(self) -> None:
        known = zip(self.optimizer.param_groups, self._last_lr, self._applied, strict=False)
        for group, own, applied in known:
            now, most = float(group["lr"]), float(group.get("initial_lr", math.inf))
            # Who multiplies makes it smaller than it was at the start; who overwrites undoes our factor.
            if now / applied > most * _MORE:
                raise InvalidArgumentError(
                    "WarmupLR multiplies rates, and another scheduler, or an assignment, has overwritten "
                    f"them: WarmupLR had set {float(own):g}, which is now {now:g}. Let schedulers that set "
                    "rates outright, such as LambdaLR, follow it: torch.optim.lr_scheduler.SequentialLR("
                    "optimizer, [warmup, other], milestones=[steps of the warm-up])"
                )

    def _factor(self, step: int) -> float:
        return warmup_factor(max(step, 0) / self._unit, self._length, self._scale)

    def state_dict(self) -> dict[str, Any]:
        """The place on the ramp, in epochs where its length is, so that other ranks can go on from there."""
        return {
            "last_epoch": self.last_epoch,
            "unit": self._unit,
            "applied": self._applied,
            "step_count": self._step_count,
            "last_lr": self._last_lr,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; length and scale stay this job's, which may have another number of ranks."""
        self.last_epoch = round(state_dict["last_epoch"] / state_dict["unit"] * self._unit)
        self._applied = state_dict["applied"]
        self._step_count = state_dict["step_count"]
        self._last_lr = state_dict["last_lr"]
