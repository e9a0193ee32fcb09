"""Which gradients share a bucket, and where in it each one lies. Pure functions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["BucketPlan", "ParameterSpec", "Slot", "fingerprint", "first_difference", "plan"]

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class ParameterSpec:
    """What must be equal on all ranks about one parameter.

    Attributes:
        strides: in elements; a gradient keeps its parameter's memory order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    strides: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        layout = f" strides {self.strides}" if self.strides else ""
        return f"{self.name!r} {self.dtype} {self.shape}{layout}"


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements [start, start + count) of its bucket.

    Attributes:
        parameter: index into the list of specs.
    """

    parameter: int
    start: int
    count: int


@dataclass(frozen=True)
class BucketPlan:
    """One flat buffer: the slots, then one element a slot that tells whether it was used.

    The marks are reduced with the gradients, so that every rank learns which parameters
    any rank used, without a message of their own.
    """

    dtype: str
    itemsize: int
    slots: tuple[Slot, ...]
    marks_start: int

    @property
    def count(self) -> int:
        return self.marks_start + len(self.slots)

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize


def plan(specs: Sequence[ParameterSpec], order: Iterable[int], bucket_bytes: int) -> list[BucketPlan]:
    """Fill buckets of one dtype each in the given order; a larger parameter has one to itself.

    Args:
        order: every index of `specs` once: the order in which gradients become ready.
        bucket_bytes: cap of a bucket's gradients, bytes.
    """
    open_slots: dict[str, list[Slot]] = {}
    ends: dict[str, int] = {}
    plans = []

    def close(dtype: str, itemsize: int) -> None:
        slots = open_slots.pop(dtype, [])
        if slots:
            plans.append(BucketPlan(dtype, itemsize, tuple(slots), ends.pop(dtype)))

    for index in order:
        spec = specs[index]
        align = max(1, _ALIGN_BYTES // spec.itemsize)
        padded = -(-spec.count // align) * align
        if (ends.get(spec.dtype, 0) + padded) * spec.itemsize > bucket_bytes:
            close(spec.dtype, spec.itemsize)
        start = ends.get(spec.dtype, 0)
        open_slots.setdefault(spec.dtype, []).append(Slot(index, start, spec.count))
        ends[spec.dtype] = start + padded
    for dtype in list(open_slots):
        close(dtype, specs[open_slots[dtype][0].parameter].itemsize)
    return plans


def fingerprint(specs: Sequence[ParameterSpec]) -> bytes:
    """32 bytes that two ranks share if, and only if, their parameters are alike."""
    return hashlib.sha256("\n".join(map(str, specs)).encode()).digest()


def first_difference(by_rank: Sequence[Sequence[ParameterSpec]]) -> str:
    """Words for the first parameter in which a rank differs from rank 0; "" if none does."""
    first = by_rank[0]
    found: tuple[int, int] | None = None
    for rank, theirs in enumerate(by_rank):
        for index in range(max(len(first), len(theirs))):
            if _at(first, index) != _at(theirs, index):
                if found is None or index < found[0]:
                    found = (index, rank)
                break
    if found is None:
        return ""
    index, rank = found
    return (
        f"parameter {index} is {_at(first, index)} on rank 0 and {_at(by_rank[rank], index)} on rank {rank}"
    )


def _at(specs: Sequence[ParameterSpec], index: int) -> str:
    return str(specs[index]) if index < len(specs) else "missing"
