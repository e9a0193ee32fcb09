"""Adasum in an optimizer: each rank makes its own step, and the changes are combined."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdp._core import submit
from hvdp._core.ops import Adasum, Max
from hvdp._core.submit import Options
from hvdp.optimizer import GradientReducer
from hvdp.torch._arrays import as_array, workspace, write_back

__all__ = ["DeltaAdasum"]


class DeltaAdasum:
    """Around a step: parameters become what they were plus the Adasum of the ranks' changes.

    The paper (arXiv:2006.02924, section 4) combines changes rather than gradients, so that
    each rank's optimizer state follows its own gradients. With a GradScaler all ranks skip a
    step together; the scale is each rank's own, as its gradients are.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._name = reducer.name
        self._process_set = reducer.policy.process_set
        self._starts: list[torch.Tensor] = []
        self._skips = False

    def before_step(self, optimizer: Any, parameters: list[torch.Tensor]) -> None:
        self._skips = self._agree_to_skip(optimizer, parameters)
        if not self._skips:
            self._starts = [parameter.detach().clone() for parameter in parameters]

    def _agree_to_skip(self, optimizer: Any, parameters: list[torch.Tensor]) -> bool:
        """Whether a GradScaler found an inf on any rank; then no optimizer finds a gradient to step on."""
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return False
        scale = optimizer.grad_scale
        # What is done here must not be done by the step again; most optimizers refuse to.
        optimizer.found_inf = optimizer.grad_scale = None
        if scale is not None:
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
        anywhere = np.array(float(found))
        options = Options(f"{self._name}.found_inf", self._process_set)
        submit.at_once(submit.allreduce(anywhere, Max, 1.0, 1.0, options))
        if anywhere:
            for parameter in parameters:
                parameter.grad = None
        return bool(anywhere)

    def after_step(self, parameters: list[torch.Tensor]) -> None:
        if self._skips:
            return
        options = Options(f"{self._name}.delta", self._process_set)
        changes = [
            parameter.detach() - start for parameter, start in zip(parameters, self._starts, strict=True)
        ]
        arrays = [as_array(workspace(change, copy=False)) for change in changes]
        submit.grouped(
            [
                submit.allreduce(array, Adasum, 1.0, 1.0, options.numbered(index))
                for index, array in enumerate(arrays)
            ]
        ).wait()
        with torch.no_grad():
            for parameter, start, change, array in zip(
                parameters, self._starts, changes, arrays, strict=True
            ):
                parameter.copy_(start + write_back(change, array))
        self._starts = []
