"""How an optimizer's gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hvdp._core.ops import Average, ReduceOp

__all__ = ["Policy"]


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

    @property
    def repeatable(self) -> bool:
        """Whether reducing a reduced gradient again leaves it as it is."""
        return self.op is Average
