"""A call that is wrong on this rank before it can be described."""

from __future__ import annotations

from hvdp._core.operation import Operation, Terms
from hvdp._core.ops import Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["Fault"]


class Fault(Operation):
    """Submitted under the call's own name, it makes every member raise; it is never agreed on."""

    def __init__(self, signature: Signature, fault: str) -> None:
        super().__init__(signature, error=fault)

    def execute(self, transport: Transport, group: Group, terms: Terms) -> None:
        raise AssertionError("a fault was agreed on")
