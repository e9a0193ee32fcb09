"""Reduce over the members, and leave each with its share of the rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvdp._core.arrays import Array, dtype_named
from hvdp._core.kernels import neutral
from hvdp._core.operation import Operation, Terms
from hvdp._core.operations.checks import dtype_fault, reduction_fault
from hvdp._core.ops import Adasum, Kind, ReduceOp, Reduction, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["Reducescatter", "shares"]


def shares(rows: int, members: int) -> list[int]:
    """How many rows each member gets."""
    return [rows // members + (index < rows % members) for index in range(members)]


class Reducescatter(Operation):
    """Reads `data`, C-contiguous, of the same shape on all members.

    The result is a new array with this member's rows; where the first dimension does not
    divide by the size, the first members get one row more.
    """

    kind = Kind.REDUCESCATTER

    def __init__(self, signature: Signature, data: Array) -> None:
        self.data = data
        op = ReduceOp[signature.op]
        self.reduction = Reduction(op, 1, signature.prescale_factor, signature.postscale_factor)
        error = dtype_fault(data.dtype) or reduction_fault(signature.dtype, self.reduction)
        if not signature.shape:
            error = "reducescatter needs at least one dimension to scatter along. Received: a scalar"
        if op is Adasum:
            error = "reducescatter has no op Adasum, which needs whole tensors; use allreduce"
        super().__init__(signature, error=error)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @classmethod
    def stand_in(cls, signature: Signature, executor: Any) -> Reducescatter:
        dtype = dtype_named(signature.dtype)
        return cls(signature, np.full(signature.shape, neutral(ReduceOp[signature.op], dtype), dtype))

    def execute(self, transport: Transport, group: Group, terms: Terms) -> Array:
        rows, *rest = self.data.shape
        parts = shares(rows, group.size)
        out = np.empty((parts[group.index], *rest), self.data.dtype)
        if self.data.size:
            counts = [part * math.prod(rest) for part in parts]
            reduction = self.reduction.over(group.ranks, terms.absent)
            transport.reducescatter(group, self.data.reshape(-1), out.reshape(-1), counts, reduction)
        return out
