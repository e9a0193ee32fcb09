"""Reduce an array over the members."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from hvdp._core.arrays import Array, check_dtype
from hvdp._core.operation import Operation
from hvdp._core.ops import Average, Kind, Max, Min, ReduceOp, Reduction, Signature
from hvdp._core.process_sets import Group
from hvdp.errors import InvalidArgumentError
from hvdp.transports.base import Transport

__all__ = ["Allreduce", "check_reduction"]

_FUSED_BYTES = 1 << 18
"""Tensors up to this size are joined: beyond it copying them together costs more than it saves."""


def check_reduction(dtype: str, op: ReduceOp) -> None:
    """Refuse pairs that have no meaning.

    Raises:
        InvalidArgumentError: Average of bools, Min or Max of complex numbers.
    """
    if (dtype == "bool" and op is Average) or (dtype.startswith("complex") and op in (Min, Max)):
        raise InvalidArgumentError(f"op {op.name} has no meaning for dtype {dtype}; cast the tensor first")


class Allreduce(Operation):
    """In place on `data`, a C-contiguous array that nobody else touches until completion.

    Args:
        shape: of the caller's tensor, for comparison.
    """

    def __init__(
        self,
        name: str,
        data: Array,
        shape: tuple[int, ...],
        op: ReduceOp,
        prescale_factor: float,
        postscale_factor: float,
        process_set: int,
        once: bool = False,
    ) -> None:
        self.data = data.reshape(-1)
        self.reduction = Reduction(op, 1, prescale_factor, postscale_factor)
        error = ""
        dtype = data.dtype.name
        try:
            check_dtype(data.dtype, f"allreduce {name!r}")
            check_reduction(dtype, op)
        except InvalidArgumentError as fault:
            error = str(fault)
        super().__init__(
            Signature(
                Kind.ALLREDUCE,
                name,
                process_set,
                dtype,
                shape,
                op.name,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                once=once,
            ),
            error=error,
        )

    @property
    def batch_key(self) -> Hashable | None:
        if self.data.nbytes > _FUSED_BYTES:
            return None
        return self.signature.process_set, self.data.dtype, self.reduction

    def execute(self, transport: Transport, group: Group, extras: Sequence[tuple[int, ...]]) -> Array:
        if self.data.size:
            transport.allreduce(group, self.data, _for(group, self.reduction))
        return self.data

    @classmethod
    def execute_batch(cls, operations: Sequence[Any], transport: Transport, group: Group) -> list[Array]:
        fused = np.concatenate([operation.data for operation in operations])
        if fused.size:
            transport.allreduce(group, fused, _for(group, operations[0].reduction))
        start = 0
        for operation in operations:
            stop = start + operation.data.size
            operation.data[...] = fused[start:stop]
            start = stop
        return [operation.data for operation in operations]


def _for(group: Group, reduction: Reduction) -> Reduction:
    return Reduction(reduction.op, group.size, reduction.prescale, reduction.postscale)
