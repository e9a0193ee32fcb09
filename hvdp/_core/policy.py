"""How an optimizer's gradients are reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from hvdp._core.ops import Adasum, Average, ReduceOp, Sum
from hvdp.errors import InvalidArgumentError

__all__ = ["Policy", "policy_fault"]


@dataclass(frozen=True)
class Policy:
    """How gradients are reduced; equal on all ranks.

    Attributes:
        op: Average or Sum.
        passes_per_step: backward passes in a window.
        predivide: averages are divided by this much before the sum, and by the rest after it.
        bucket_bytes: cap of a bucket.
        groups: parameters that share a bucket whatever its size; the others fill buckets.
        group_count: or make so many such groups of all parameters.
        process_set: number of the process set that trains together.
        weighted: ranks count by the weight they set, not equally.
    """

    op: ReduceOp
    passes_per_step: int
    bucket_bytes: int
    predivide: float = 1.0
    groups: tuple[tuple[int, ...], ...] = ()
    group_count: int = 0
    process_set: int = 0
    weighted: bool = False

    def described(self) -> dict[str, str]:
        """For comparison between ranks, and for messages."""
        described = {item.name: str(getattr(self, item.name)) for item in fields(self)}
        return {**described, "op": self.op.name}

    def checked_weight(self, weight: float) -> float:
        """What a rank may count as.

        Raises:
            InvalidArgumentError: it is negative, infinite or no number, or ranks are not weighted.
        """
        if not self.weighted or not 0 <= weight < math.inf:
            raise InvalidArgumentError(
                "set_weight() takes a finite number that is not negative, and needs "
                f"DistributedOptimizer(..., weighted=True). Received: {weight}"
            )
        return float(weight)

    @property
    def repeatable(self) -> bool:
        """Whether reducing a reduced gradient again leaves it as it is."""
        return self.op is Average


def policy_fault(
    op: int,
    passes: int = 1,
    predivide: float = 1.0,
    weighted: bool = False,
    ops: Sequence[ReduceOp] = (Average, Sum, Adasum),
) -> str:
    """What is wrong with what was asked for, or "".

    Args:
        ops: those that the caller can do.
    """
    if op not in ops:
        return f"op must be one of {', '.join(f'hvd.{each.name}' for each in ops)}. Received: {op!r}"
    if passes < 1:
        return f"backward_passes_per_step must be at least 1. Received: {passes}"
    if not predivide > 0:
        return f"gradient_predivide_factor must be positive. Received: {predivide}"
    if op != Average and (predivide != 1.0 or weighted):
        return "gradient_predivide_factor and weighted need op=hvd.Average"
    return ""
