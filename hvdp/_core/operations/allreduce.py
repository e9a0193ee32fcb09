"""Reduce an array over the members."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from hvdp._core.adasum import adasum
from hvdp._core.arrays import Array, dtype_named
from hvdp._core.kernels import neutral
from hvdp._core.operation import Operation, Terms
from hvdp._core.operations.checks import dtype_fault, reduction_fault
from hvdp._core.ops import Adasum, Kind, ReduceOp, Reduction, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["Allreduce"]

_FUSED_BYTES = 1 << 18
"""Tensors up to this size are joined: beyond it copying them together costs more than it saves."""


class Allreduce(Operation):
    """In place on `data`, a C-contiguous array that nobody else touches until completion."""

    kind = Kind.ALLREDUCE

    def __init__(self, signature: Signature, data: Array) -> None:
        """
        Args:
            data: of the signature's shape, dtype and op.
        """
        self.data = data.reshape(-1)
        op = ReduceOp[signature.op]
        self.reduction = Reduction(op, 1, signature.prescale_factor, signature.postscale_factor)
        super().__init__(signature, error=dtype_fault(data.dtype) or reduction_fault(signature.dtype, op))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @classmethod
    def stand_in(cls, signature: Signature, executor: Any) -> Allreduce:
        dtype = dtype_named(signature.dtype)
        return cls(signature, np.full(signature.shape, neutral(ReduceOp[signature.op], dtype), dtype))

    @property
    def batch_key(self) -> Hashable | None:
        if self.data.nbytes > _FUSED_BYTES or self.reduction.op is Adasum:
            return None
        return Kind.ALLREDUCE, self.signature.process_set, self.data.dtype, self.reduction

    def execute(self, transport: Transport, group: Group, terms: Terms) -> Array:
        if self.data.size:
            _reduce(transport, group, self.data, self.reduction, terms)
        return self.data

    @classmethod
    def execute_batch(
        cls, operations: Sequence[Any], transport: Transport, group: Group, terms: Terms
    ) -> list[Array]:
        fused = np.concatenate([operation.data for operation in operations])
        if fused.size:
            _reduce(transport, group, fused, operations[0].reduction, terms)
        start = 0
        for operation in operations:
            stop = start + operation.data.size
            operation.data[...] = fused[start:stop]
            start = stop
        return [operation.data for operation in operations]


def _reduce(transport: Transport, group: Group, data: Array, reduction: Reduction, terms: Terms) -> None:
    if reduction.op is Adasum:
        adasum(transport, group, data, reduction)
    else:
        transport.allreduce(group, data, reduction.over(group.ranks, terms.absent))
