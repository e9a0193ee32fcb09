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

    def __init__(self, name: str, ranks: tuple[int, ...], executor: Any, fault: str = "") -> None:
        self._executor = executor
        super().__init__(Signature(self.kind, name, shape=ranks, once=True), (0,), fault)

    def execute(self, transport: Transport, group: Group, terms: Terms) -> int:
        ((number,), *_) = terms.extras
        ranks = self.signature.shape
        if self._executor.rank in ranks:
            self._executor.groups[number] = Group(number, ranks, ranks.index(self._executor.rank))
        return number


class RemoveProcessSet(Operation):
    kind = Kind.REMOVE_PROCESS_SET

    def __init__(self, name: str, number: int, executor: Any) -> None:
        self._executor = executor
        super().__init__(Signature(self.kind, name, shape=(number,), once=True))

    def execute(self, transport: Transport, group: Group, terms: Terms) -> None:
        removed = self._executor.groups.pop(self.signature.shape[0], None)
        if removed is not None:
            transport.forget(removed)
