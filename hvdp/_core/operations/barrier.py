"""Wait for all members. The agreement itself is the barrier: no data moves."""

from __future__ import annotations

from typing import Any

from hvdp._core.operation import Operation, Terms
from hvdp._core.ops import Kind, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["Barrier", "Join"]


class Barrier(Operation):
    kind = Kind.BARRIER

    def __init__(self, name: str, process_set: int) -> None:
        super().__init__(Signature(Kind.BARRIER, name, process_set, once=True))

    @classmethod
    def stand_in(cls, signature: Signature, executor: Any) -> Barrier:
        return cls(signature.name, signature.process_set)

    def execute(self, transport: Transport, group: Group, terms: Terms) -> None:
        pass


class Join(Operation):
    """No more data on this rank; the result is the last rank that joined.

    Until all have joined, this rank's engine stands in for it in the others' operations.
    """

    kind = Kind.JOIN

    def __init__(self) -> None:
        super().__init__(Signature(Kind.JOIN, "join", once=True), extras=(0,))

    def execute(self, transport: Transport, group: Group, terms: Terms) -> int:
        return terms.extras[0][0]
