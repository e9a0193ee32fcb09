"""What a step evaluates again and again, as L-BFGS does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvdp._core import submit
from hvdp._core.ops import Average, Sum
from hvdp._core.submit import Options
from hvdp.optimizer import GradientReducer

__all__ = ["with_all_ranks"]


def with_all_ranks(closure: Callable[[], Any], reducer: GradientReducer) -> Callable[[], Any]:
    """A closure with reduced gradients, and the ranks' losses reduced as these are.

    So all ranks evaluate it equally often. Each evaluation is a window: it may have fewer
    backward passes than agreed, or none.
    """

    def evaluate() -> Any:
        reducer.after_step()
        loss = closure()
        reducer.before_step()
        if loss is None:
            return None
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        weight = reducer.weight if reducer.policy.weighted else 1.0
        # Not by multiplication: the mean of no samples is not a number.
        sums = np.array([value * weight if weight else 0.0, weight])
        options = Options("closure.loss", reducer.policy.process_set)
        submit.at_once(submit.allreduce(sums, Sum, 1.0, 1.0, options))
        total, weights = sums.tolist()
        if reducer.policy.op is Average:
            total = total / weights if weights else math.nan
        return torch.full_like(loss, total) if isinstance(loss, torch.Tensor) else total

    return evaluate
