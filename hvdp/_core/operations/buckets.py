"""Buckets: memory that the transport gives, and its reduction in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdp._core.operation import Operation
from hvdp._core.ops import Kind, ReduceOp, Reduction, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Buffer, Transport

__all__ = ["Allocate", "ReduceBucket"]


class Allocate(Operation):
    """The result is a zeroed Buffer of `nbytes` bytes on every member."""

    def __init__(self, name: str, nbytes: int, process_set: int) -> None:
        super().__init__(Signature(Kind.ALLOCATE, name, process_set, shape=(nbytes,), once=True))

    def execute(self, transport: Transport, group: Group, extras: Sequence[tuple[int, ...]]) -> Buffer:
        return transport.allocate(group, self.signature.shape[0])


class ReduceBucket(Operation):
    """Allreduce the first `count` items of a Buffer that all members allocated together."""

    def __init__(
        self, name: str, buffer: Buffer, dtype: np.dtype[Any], count: int, op: ReduceOp, process_set: int
    ) -> None:
        self.buffer = buffer
        self.dtype = dtype
        self.op = op
        super().__init__(Signature(Kind.ALLREDUCE, name, process_set, dtype.name, (count,), op.name))

    def execute(self, transport: Transport, group: Group, extras: Sequence[tuple[int, ...]]) -> None:
        (count,) = self.signature.shape
        transport.reduce_buffer(group, self.buffer, self.dtype, count, Reduction(self.op, group.size))
