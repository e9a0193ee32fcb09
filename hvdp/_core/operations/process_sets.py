"""All ranks agree on a new process set, or on the end of one."""

from __future__ import annotations

from typing import Any

from hvdp._core.operation import Operation, Terms
from hvdp._core.ops import Kind, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["AddProcessSet", "RemoveProcessSet"]


class AddProcessSet(Operation):
    """The result is the set's number, the same for equal ranks; members know its group from then on."""

    kind = Kind.ADD_PROCESS_SET

    def __init__(self, name: str, ranks: tuple[int, ...], engine: Any, fault: str = "") -> None:
        self._engine = engine
        super().__init__(Signature(self.kind, name, shape=ranks, once=True), (0,), fault)

    def execute(self, transport: Transport, group: Group, terms: Terms) -> int:
        ((number,), *_) = terms.extras
        ranks = self.signature.shape
        if self._engine.rank in ranks:
            self._engine.add_group(Group(number, ranks, ranks.index(self._engine.rank)))
        return number


class RemoveProcessSet(Operation):
    kind = Kind.REMOVE_PROCESS_SET

    def __init__(self, name: str, number: int, engine: Any) -> None:
        self._engine = engine
        super().__init__(Signature(self.kind, name, shape=(number,), once=True))

    def execute(self, transport: Transport, group: Group, terms: Terms) -> None:
        self._engine.remove_group(self.signature.shape[0])
