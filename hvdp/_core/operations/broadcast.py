"""One member's array on all members."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdp._core.arrays import Array, as_bytes, dtype_named
from hvdp._core.operation import Operation, Terms
from hvdp._core.operations.checks import dtype_fault, root_fault
from hvdp._core.ops import Kind, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["Broadcast"]


class Broadcast(Operation):
    """Into `data`, C-contiguous; its own content counts on the root, a global rank, only."""

    kind = Kind.BROADCAST

    def __init__(self, signature: Signature, data: Array, members: tuple[int, ...], fault: str = "") -> None:
        self.data = data
        error = dtype_fault(data.dtype) or fault or root_fault(signature.root_rank, members)
        super().__init__(signature, error=error)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @classmethod
    def stand_in(cls, signature: Signature, executor: Any) -> Broadcast:
        data = np.empty(signature.shape, dtype_named(signature.dtype))
        return cls(signature, data, executor.groups[signature.process_set].ranks)

    def execute(self, transport: Transport, group: Group, terms: Terms) -> Array:
        if self.data.size:
            transport.broadcast(group, as_bytes(self.data), group.ranks.index(self.signature.root_rank))
        return self.data
