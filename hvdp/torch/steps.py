"""Hooks around `step()`: once for each step, whatever the optimizer's class does within it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

__all__ = ["outermost"]

StepHook = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""Of what PyTorch puts around the `step` of each class, to run the hooks."""


def outermost(hook: StepHook) -> StepHook:
    """The hook, not run for a `super().step()` within a `step()` of the same optimizer.

    Hidden from the compiler.
    """

    def run(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # By the stack, not by a count: a step that raised never reports its end.
        frame: FrameType | None = sys._getframe()
        depth = 0
        while frame is not None:
            if frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer:
                depth += 1
            frame = frame.f_back
        return hook(optimizer, args, kwargs) if depth < 2 else None

    return torch._disable_dynamo(run)  # type: ignore[attr-defined]
