"""Buckets: memory that the transport gives, and its reduction in place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdp._core import wording
from hvdp._core.arrays import dtype_named
from hvdp._core.operation import Operation, Terms
from hvdp._core.ops import Kind, ReduceOp, Reduction, Signature
from hvdp._core.process_sets import Group
from hvdp.errors import MismatchError
from hvdp.transports.base import Buffer, Transport

__all__ = ["Allocate", "ReduceBucket"]


class Allocate(Operation):
    """The result is a zeroed Buffer of `nbytes` bytes on every member, known to the engine by name."""

    kind = Kind.ALLOCATE

    def __init__(
        self, name: str, nbytes: int, process_set: int, executor: Any, adopted: bool = False
    ) -> None:
        self._executor = executor
        self._adopted = adopted
        super().__init__(
            Signature(Kind.ALLOCATE, f"{name}.allocate", process_set, shape=(nbytes,), once=True)
        )
        self._name = name

    @classmethod
    def stand_in(cls, signature: Signature, executor: Any) -> Allocate:
        name = signature.name.removesuffix(".allocate")
        return cls(name, signature.shape[0], signature.process_set, executor, adopted=True)

    def execute(self, transport: Transport, group: Group, terms: Terms) -> Buffer:
        buffer = transport.allocate(group, self.signature.shape[0])
        self._executor.buffers[self._name] = buffer
        if self._adopted:
            self._executor.adopt(buffer)
        return buffer


class ReduceBucket(Operation):
    """Allreduce the first items of a Buffer that all members allocated together under this name.

    The result is whether any member has raised its flag.

    Args:
        window: number of the step that this is for; must be equal on all members.
        flag: something to tell the others along with it.
        weight: how much this rank's values count; None is as much as the others'.

    Raises:
        MismatchError: when it runs, on every member.
    """

    kind = Kind.BUCKET

    def __init__(
        self,
        signature: Signature,
        buffer: Buffer,
        window: int = 0,
        flag: bool = False,
        weight: float | None = None,
    ) -> None:
        self._buffer = buffer
        super().__init__(signature, (window, flag, *(() if weight is None else _as_integers(weight))))

    @property
    def nbytes(self) -> int:
        return self.signature.shape[0] * dtype_named(self.signature.dtype).itemsize

    @classmethod
    def stand_in(cls, signature: Signature, executor: Any) -> ReduceBucket:
        return _ZeroedBucket(signature, executor)

    def execute(self, transport: Transport, group: Group, terms: Terms) -> bool:
        (count,) = self.signature.shape
        _require_one_window(group, terms)
        weights = [numbers for _, _, *numbers in terms.extras]
        if terms.absent:
            # A rank that has joined cleared its memory only when it heard of this operation.
            transport.barrier(group)
        reduction = Reduction(
            ReduceOp[self.signature.op],
            group.size - len(terms.absent),
            self.signature.prescale_factor,
            self.signature.postscale_factor,
            _shares(weights) if weights[0] else None,
        )
        transport.reduce_buffer(group, self._buffer, dtype_named(self.signature.dtype), count, reduction)
        return any(flag for _, flag, *_ in terms.extras)


class _ZeroedBucket(ReduceBucket):
    """Looks its buffer up when it runs: the allocation may be agreed on and not yet done before."""

    def __init__(self, signature: Signature, executor: Any) -> None:
        super().__init__(signature, Buffer(np.empty(0, np.uint8)))
        self._executor = executor

    def execute(self, transport: Transport, group: Group, terms: Terms) -> bool:
        self._buffer = self._executor.buffers[self.signature.name]
        self._buffer.data[...] = 0
        return super().execute(transport, group, terms)


def _require_one_window(group: Group, terms: Terms) -> None:
    numbers = {
        rank: window
        for rank, (window, *_) in zip(group.ranks, terms.extras, strict=True)
        if rank not in terms.absent
    }
    if len(set(numbers.values())) > 1:
        raise MismatchError(wording.windows(numbers))


def _as_integers(weight: float) -> tuple[int, ...]:
    """A float in the form of extra numbers."""
    return struct.unpack("<q", struct.pack("<d", weight))


def _shares(extras: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """The members' weights as parts of their sum; of joined ones 0."""
    weights = [struct.unpack("<d", struct.pack("<q", *numbers))[0] for numbers in extras]
    total = sum(weights) or 1.0
    return tuple(weight / total for weight in weights)
