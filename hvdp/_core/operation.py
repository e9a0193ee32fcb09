"""The skeleton that every collective fills in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hvdp._core.coordinator import Submission
from hvdp._core.handles import Handle
from hvdp._core.ops import Kind, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

if TYPE_CHECKING:
    from hvdp._core.executor import Executor

__all__ = ["Operation", "Terms"]


class Terms(NamedTuple):
    """What the members have agreed on beyond the signature.

    Attributes:
        extras: each member's numbers, in the order of the group.
        absent: members that have joined: they take part with nothing to give.
    """

    extras: tuple[tuple[int, ...], ...]
    absent: tuple[int, ...] = ()


class Operation(ABC):
    """One call of one rank: what must agree, what may differ, and what to do once agreed.

    Attributes:
        submission: the signature, this rank's own numbers, and its own fault if it has one.
        times: of submission and agreement, nanoseconds, while a timeline is recorded.
        handle: until it has ended.
        batch_key: operations agreed on together whose keys are equal may run as one.
    """

    kind: ClassVar[Kind]

    def __init__(self, signature: Signature, extras: tuple[int, ...] = (), error: str = "") -> None:
        self.signature = signature
        self.submission = Submission(signature, extras, error)
        self.handle = Handle(signature.name)
        self.times: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensor."""
        return 0

    @property
    def batch_key(self) -> Hashable | None:
        return None

    @classmethod
    def stand_in(cls, signature: Signature, executor: Executor) -> Operation:
        """What a rank that has joined does in the others' operation: it gives nothing."""
        raise NotImplementedError(f"{signature.kind.value} needs every rank")

    @abstractmethod
    def execute(self, transport: Transport, group: Group, terms: Terms) -> Any:
        """Run on the engine's thread, on all members at the same place of their order."""

    @classmethod
    def execute_batch(
        cls, operations: Sequence[Any], transport: Transport, group: Group, terms: Terms
    ) -> list[Any]:
        """Run several operations of one batch key and equal terms; the results in their order."""
        raise NotImplementedError
