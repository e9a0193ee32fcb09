"""Which gradients share a bucket, and where in it each one lies. Pure functions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["BucketPlan", "ParameterSpec", "Slot", "fingerprint", "first_difference", "plan"]

_ALIGN_BYTES = 64
_Key = tuple[str, int]


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


def plan(
    specs: Sequence[ParameterSpec],
    order: Sequence[int],
    bucket_bytes: int,
    groups: Sequence[Sequence[int]] = (),
    group_count: int = 0,
) -> list[BucketPlan]:
    """Fill buckets of one dtype each in the given order; a larger parameter has one to itself.

    Args:
        order: indices of `specs`: the order in which gradients become ready.
        bucket_bytes: cap of a bucket's gradients, bytes.
        groups: indices that share a bucket (one a dtype) whatever its size.
        group_count: or cut `order` into so many such groups.
    """
    if group_count and order:
        step = -(-len(order) // group_count)
        groups = [order[start : start + step] for start in range(0, len(order), step)]
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    open_slots: dict[_Key, list[Slot]] = {}
    ends: dict[_Key, int] = {}
    plans = []

    def close(key: _Key) -> None:
        if key in open_slots:
            slots = open_slots.pop(key)
            itemsize = specs[slots[0].parameter].itemsize
            plans.append(BucketPlan(key[0], itemsize, tuple(slots), ends.pop(key)))

    for index in order:
        spec = specs[index]
        key = (spec.dtype, group_of.get(index, -1))
        align = max(1, _ALIGN_BYTES // spec.itemsize)
        padded = -(-spec.count // align) * align
        if key[1] < 0 and (ends.get(key, 0) + padded) * spec.itemsize > bucket_bytes:
            close(key)
        start = ends.get(key, 0)
        open_slots.setdefault(key, []).append(Slot(index, start, spec.count))
        ends[key] = start + padded
    for key in list(open_slots):
        close(key)
    return plans


def fingerprint(specs: Sequence[ParameterSpec], options: Mapping[str, str] | None = None) -> bytes:
    """32 bytes that two ranks share if, and only if, their parameters and options are alike."""
    return hashlib.sha256("\n".join([*map(str, specs), *map(str, (options or {}).items())]).encode()).digest()


def first_difference(ranks: Sequence[int], by_rank: Sequence[Sequence[ParameterSpec]]) -> str:
    """Words for the first parameter in which a rank differs from the first; "" if none does."""
    first = by_rank[0]
    index, text = -1, ""
    for rank, theirs in zip(ranks, by_rank, strict=True):
        differing = [i for i in range(max(len(first), len(theirs))) if _at(first, i) != _at(theirs, i)]
        if differing and (index < 0 or differing[0] < index):
            index = differing[0]
            text = f"{_at(first, index)} on rank {ranks[0]} and {_at(theirs, index)} on rank {rank}"
    return f"parameter {index} is {text}" if text else ""


def _at(specs: Sequence[ParameterSpec], index: int) -> str:
    return str(specs[index]) if index < len(specs) else "missing"
