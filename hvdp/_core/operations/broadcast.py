"""One member's array on all members."""

from __future__ import annotations

from collections.abc import Sequence

from hvdp._core.arrays import Array, as_bytes, check_dtype
from hvdp._core.operation import Operation
from hvdp._core.ops import Kind, Signature
from hvdp._core.process_sets import Group
from hvdp.errors import InvalidArgumentError
from hvdp.transports.base import Transport

__all__ = ["Broadcast"]


class Broadcast(Operation):
    """Into `data`, C-contiguous; its own content counts on the root only.

    Args:
        root_rank: global rank.
    """

    def __init__(
        self,
        name: str,
        data: Array,
        shape: tuple[int, ...],
        root_rank: int,
        process_set: int,
        members: Sequence[int],
        once: bool = False,
    ) -> None:
        self.data = data
        error = ""
        try:
            check_dtype(data.dtype, f"broadcast {name!r}")
        except InvalidArgumentError as fault:
            error = str(fault)
        if root_rank not in members:
            error = f"root_rank must be one of the ranks {list(members)}. Received: {root_rank!r}"
        super().__init__(
            Signature(
                Kind.BROADCAST, name, process_set, data.dtype.name, shape, root_rank=root_rank, once=once
            ),
            error=error,
        )

    def execute(self, transport: Transport, group: Group, extras: Sequence[tuple[int, ...]]) -> Array:
        if self.data.size:
            transport.broadcast(group, as_bytes(self.data), group.ranks.index(self.signature.root_rank))
        return self.data
