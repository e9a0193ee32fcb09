"""The members' arrays, joined along the first dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvdp._core.arrays import Array, as_bytes, check_dtype
from hvdp._core.operation import Operation
from hvdp._core.ops import Kind, Signature
from hvdp._core.process_sets import Group
from hvdp.errors import InvalidArgumentError
from hvdp.transports.base import Transport

__all__ = ["Allgather"]


class Allgather(Operation):
    """Reads `data`, C-contiguous; first dimensions may differ, the others may not.

    The result is a new array of shape (sum of first dimensions, *rest), in rank order. A
    scalar counts as an array of one.
    """

    def __init__(self, name: str, data: Array, process_set: int, once: bool = False) -> None:
        self.data = data.reshape(1) if data.ndim == 0 else data
        error = ""
        try:
            check_dtype(data.dtype, f"allgather {name!r}")
        except InvalidArgumentError as fault:
            error = str(fault)
        rows, *rest = self.data.shape
        super().__init__(
            Signature(Kind.ALLGATHER, name, process_set, data.dtype.name, tuple(rest), once=once),
            extras=(rows,),
            error=error,
        )

    def execute(self, transport: Transport, group: Group, extras: Sequence[tuple[int, ...]]) -> Array:
        rest = self.data.shape[1:]
        rows = [row_count for (row_count,) in extras]
        out = np.empty((sum(rows), *rest), self.data.dtype)
        if out.size:
            row_bytes = math.prod(rest) * out.itemsize
            counts = [row_count * row_bytes for row_count in rows]
            transport.allgather(group, as_bytes(self.data), as_bytes(out), counts)
        return out
