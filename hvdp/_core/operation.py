"""The skeleton that every collective fills in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

from hvdp._core.handles import Handle
from hvdp._core.ops import Kind, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["Operation"]


class Operation(ABC):
    """One call of one rank: what must agree, what may differ, and what to do once agreed.

    Attributes:
        signature: compared across the members.
        extras: this rank's numbers that may differ (an allgather's first dimension); every
            member gets all of them.
        error: why this rank's arguments are wrong; every member will raise it.
        batch_key: consecutive operations with one equal key may run as one; None forbids it.
    """

    kind: ClassVar[Kind]

    def __init__(self, signature: Signature, extras: tuple[int, ...] = (), error: str = "") -> None:
        self.signature = signature
        self.extras = extras
        self.error = error
        self.handle = Handle(signature.name)

    @property
    def batch_key(self) -> Hashable | None:
        return None

    @abstractmethod
    def execute(self, transport: Transport, group: Group, extras: Sequence[tuple[int, ...]]) -> Any:
        """Run on the engine's thread, on all members at the same place of their order."""

    @classmethod
    def execute_batch(cls, operations: Sequence[Any], transport: Transport, group: Group) -> list[Any]:
        """Run several operations of one batch key; the results in their order."""
        raise NotImplementedError
