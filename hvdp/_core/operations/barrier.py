"""Wait for all members. The agreement itself is the barrier: no data moves."""

from __future__ import annotations

from collections.abc import Sequence

from hvdp._core.operation import Operation
from hvdp._core.ops import Kind, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["Barrier"]


class Barrier(Operation):
    def __init__(self, name: str, process_set: int) -> None:
        super().__init__(Signature(Kind.BARRIER, name, process_set, once=True))

    def execute(self, transport: Transport, group: Group, extras: Sequence[tuple[int, ...]]) -> None:
        pass
