"""The members' arrays, joined along the first dimension."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvdp._core.arrays import Array, as_bytes, dtype_named
from hvdp._core.operation import Operation, Terms
from hvdp._core.operations.checks import dtype_fault
from hvdp._core.ops import Kind, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["Allgather"]


class Allgather(Operation):
    """Reads `data`, C-contiguous; first dimensions may differ, the others may not.

    The result is a new array of shape (sum of first dimensions, *rest), in rank order. The
    signature's shape is the rest; the first dimension travels as an extra number.
    """

    kind = Kind.ALLGATHER

    def __init__(self, signature: Signature, data: Array) -> None:
        self.data = data
        super().__init__(signature, (data.shape[0],), dtype_fault(data.dtype))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @classmethod
    def stand_in(cls, signature: Signature, executor: Any) -> Allgather:
        return cls(signature, np.empty((0, *signature.shape), dtype_named(signature.dtype)))

    def execute(self, transport: Transport, group: Group, terms: Terms) -> Array:
        rest = self.data.shape[1:]
        rows = [row_count for (row_count,) in terms.extras]
        out = np.empty((sum(rows), *rest), self.data.dtype)
        if out.size:
            row_bytes = math.prod(rest) * out.itemsize
            counts = [row_count * row_bytes for row_count in rows]
            transport.allgather(group, as_bytes(self.data), as_bytes(out), counts)
        return out
