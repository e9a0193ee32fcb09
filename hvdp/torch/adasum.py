"""Adasum in an optimizer: each rank makes its own step, and the changes are combined."""

from __future__ import annotations

import torch

from hvdp._core import submit
from hvdp._core.ops import Adasum
from hvdp._core.submit import Options
from hvdp.optimizer import GradientReducer
from hvdp.torch._arrays import as_array, workspace, write_back

__all__ = ["DeltaAdasum"]


class DeltaAdasum:
    """Around a step: parameters become what they were plus the Adasum of the ranks' changes.

    The paper (arXiv:2006.02924, section 4) combines changes rather than gradients, so that
    each rank's optimizer state follows its own gradients.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._name = reducer.name
        self._process_set = reducer.policy.process_set
        self._starts: list[torch.Tensor] = []

    def before_step(self, parameters: list[torch.Tensor]) -> None:
        self._starts = [parameter.detach().clone() for parameter in parameters]

    def after_step(self, parameters: list[torch.Tensor]) -> None:
        options = Options(f"{self._name}.delta", self._process_set)
        changes = [
            parameter.detach() - start for parameter, start in zip(parameters, self._starts, strict=True)
        ]
        works = [workspace(change, copy=False) for change in changes]
        submit.grouped(
            [
                submit.allreduce(as_array(work), Adasum, 1.0, 1.0, options.numbered(index))
                for index, work in enumerate(works)
            ]
        ).wait()
        with torch.no_grad():
            for parameter, start, change, work in zip(parameters, self._starts, changes, works, strict=True):
                parameter.copy_(start + write_back(change, work))
        self._starts = []
