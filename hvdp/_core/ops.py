"""What the ranks agree on: reduce operations and the signature of one collective."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, NamedTuple

from hvdp.errors import InvalidArgumentError

__all__ = ["Adasum", "Average", "Kind", "Max", "Min", "Product", "ReduceOp", "Reduction", "Signature", "Sum"]


class ReduceOp(IntEnum):
    """How values of several ranks become one; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    @classmethod
    def check(cls, op: Any) -> ReduceOp:
        """Return `op` as a ReduceOp, or raise InvalidArgumentError."""
        if type(op) is cls:
            return op
        try:
            return cls(op)
        except ValueError:
            names = ", ".join(f"hvd.{member.name}" for member in cls)
            raise InvalidArgumentError(f"op must be one of {names}. Received: {op!r}") from None

    @classmethod
    def resolve(cls, average: bool | None, op: Any) -> ReduceOp:
        """Horovod's two ways to say it: `op`, or the older `average`; by default Average."""
        if average is not None and op is not None:
            raise InvalidArgumentError(
                f"give op or the older average, not both. Received: average={average!r}, op={op!r}"
            )
        if op is not None:
            return cls.check(op)
        return cls.Sum if average is False else cls.Average

    @classmethod
    def linear(cls, average: bool | None, op: Any) -> ReduceOp:
        """As `resolve`, if the op has a gradient, or raise InvalidArgumentError."""
        resolved = cls.resolve(average, op)
        if resolved not in (cls.Average, cls.Sum):
            raise InvalidArgumentError(
                f"op {resolved.name} has no gradient; detach the tensor, or use Average or Sum"
            )
        return resolved


Average, Sum, Adasum, Min, Max, Product = ReduceOp


class Kind(str, Enum):
    """The collective operations."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"
    ALLOCATE = "allocate"
    BUCKET = "bucket"
    ADD_PROCESS_SET = "add_process_set"
    REMOVE_PROCESS_SET = "remove_process_set"


class Reduction(NamedTuple):
    """What a transport does to the values of `divisor` ranks, element by element.

    result = postscale * op(prescale * x_0, prescale * x_1, ...), for Average divided by `divisor`;
    with `weights`, one a rank, each x_i counts times its weight, and one of weight 0 not at all.
    The members at the indices `absent` hold values that change nothing, and are not scaled.
    """

    op: ReduceOp
    divisor: int = 1
    prescale: float = 1.0
    postscale: float = 1.0
    weights: tuple[float, ...] | None = None
    absent: tuple[int, ...] = ()

    def over(self, members: tuple[int, ...], absent: tuple[int, ...]) -> Reduction:
        """The same over these ranks, of which some are absent."""
        indices = tuple(members.index(rank) for rank in absent)
        present = len(members) - len(absent)
        return Reduction(self.op, present, self.prescale, self.postscale, self.weights, indices)


class Signature(NamedTuple):
    """Everything about one collective call that must be equal on every member.

    A signature is hashable: seen once by all members it is known by a small number afterwards.

    Attributes:
        shape: as submitted; for an allgather without its first dimension, which may differ.
        once: the name will not come again (made up for an unnamed call), so no number is kept.
        group_size: tensors in the call, of which this is one; their names end in ".0", ".1", ...
    """

    kind: Kind
    name: str
    process_set: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    root_rank: int = -1
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    device: str = "cpu"
    once: bool = False
    group_size: int = 1

    def differences(self, other: Signature) -> list[str]:
        """Names of the fields in which two signatures differ."""
        return [name for name in self._fields if getattr(self, name) != getattr(other, name)]

    @classmethod
    def from_json(cls, values: list[Any]) -> Signature:
        kind, name, process_set, dtype, shape, *rest = values
        return cls(Kind(kind), name, process_set, dtype, tuple(shape), *rest)
