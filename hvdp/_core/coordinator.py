"""Who has submitted what: the control plane's decisions, free of sockets and threads.

Lives on rank 0. Every rank's submissions go in; verdicts come out in the one order in
which all members of each process set will act on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdp._core.ops import Signature

__all__ = ["Coordinator", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """What the members of a process set are told about one name.

    Attributes:
        members: global ranks that are told.
        number: short id under which the signature is known from now on, or -1.
        new: the members do not know that number yet.
        extras: each member's extra numbers, in the order of `members`.
        error: "" or the text that every member raises.
        gone: the rank that has left, where that is the error; -1 otherwise.
        invalid: the error is one rank's bad argument, not a disagreement.
    """

    members: tuple[int, ...]
    signature: Signature
    number: int = -1
    new: bool = False
    extras: tuple[tuple[int, ...], ...] = ()
    error: str = ""
    gone: int = -1
    invalid: bool = False

    @property
    def flat_extras(self) -> list[int]:
        return [number for member in self.extras for number in member]


@dataclass
class _Submitted:
    signature: Signature
    extras: tuple[int, ...]
    error: str


@dataclass
class _Numbers:
    """Signatures known by number, as long as there is room."""

    capacity: int
    by_number: list[Signature] = field(default_factory=list)
    by_signature: dict[Signature, int] = field(default_factory=dict)

    def of(self, signature: Signature) -> tuple[int, bool]:
        """The number, or -1, and whether it is new."""
        number = self.by_signature.get(signature, -1)
        if number >= 0 or signature.once or len(self.by_number) >= self.capacity:
            return number, False
        self.by_signature[signature] = len(self.by_number)
        self.by_number.append(signature)
        return len(self.by_number) - 1, True


class Coordinator:
    """Tallies submissions and decides.

    Args:
        size: number of ranks in the job; process set 0 is all of them.
        capacity: how many signatures may be known by number.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self._members: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._numbers = _Numbers(capacity)
        self._pending: dict[tuple[int, str], dict[int, _Submitted]] = {}
        self._gone: dict[int, str] = {}

    def add_process_set(self, number: int, ranks: Sequence[int]) -> None:
        self._members[number] = tuple(ranks)

    def signature(self, number: int) -> Signature:
        return self._numbers.by_number[number]

    def submit(
        self, rank: int, signature: Signature, extras: tuple[int, ...] = (), error: str = ""
    ) -> Verdict | None:
        """Take one rank's submission; the verdict if it was the last that was missing.

        Args:
            error: why the rank itself holds its call to be wrong; every member will raise it.
        """
        members = self._members[signature.process_set]
        for gone, reason in self._gone.items():
            if gone in members:
                return Verdict((rank,), signature, error=_gone_text(gone, reason, signature), gone=gone)
        key = (signature.process_set, signature.name)
        submitted = self._pending.setdefault(key, {})
        submitted[rank] = _Submitted(signature, extras, error)
        if len(submitted) < len(members):
            return None
        del self._pending[key]
        return self._decide(members, submitted)

    def leave(self, rank: int, reason: str) -> list[Verdict]:
        """A rank will submit nothing more: what waits for it fails at once."""
        self._gone[rank] = reason
        verdicts = []
        for key, submitted in list(self._pending.items()):
            if rank not in self._members[key[0]]:
                continue
            del self._pending[key]
            waiting = tuple(r for r in submitted if r not in self._gone)
            signature = next(iter(submitted.values())).signature
            text = _gone_text(rank, reason, signature)
            verdicts.append(Verdict(waiting, signature, error=text, gone=rank))
        return verdicts

    def _decide(self, members: tuple[int, ...], submitted: dict[int, _Submitted]) -> Verdict:
        first = submitted[members[0]]
        if any(s.error for s in submitted.values()):
            return Verdict(members, first.signature, error=_invalid_text(members, submitted), invalid=True)
        for rank in members[1:]:
            if submitted[rank].signature != first.signature:
                return Verdict(members, first.signature, error=_mismatch_text(members, submitted))
        number, new = self._numbers.of(first.signature)
        extras = tuple(submitted[rank].extras for rank in members)
        return Verdict(members, first.signature, number, new, extras)


def _gone_text(rank: int, reason: str, signature: Signature) -> str:
    return f"rank {rank} {reason} before it took part in {signature.kind.value} {signature.name!r}"


def _invalid_text(members: tuple[int, ...], submitted: dict[int, _Submitted]) -> str:
    faults: dict[str, list[int]] = {}
    for rank in members:
        if submitted[rank].error:
            faults.setdefault(submitted[rank].error, []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {error}" for error, ranks in faults.items())


def _mismatch_text(members: tuple[int, ...], submitted: dict[int, _Submitted]) -> str:
    """Every field that differs, with the ranks that hold each of its values."""
    first = submitted[members[0]].signature
    fields: dict[str, None] = {}
    for rank in members:
        fields.update(dict.fromkeys(first.differences(submitted[rank].signature)))
    parts = []
    for name in fields:
        holders: dict[str, list[int]] = {}
        for rank in members:
            value = getattr(submitted[rank].signature, name)
            holders.setdefault(str(getattr(value, "value", value)), []).append(rank)
        values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in holders.items())
        parts.append(f"{name} is {values}")
    return (
        f"the ranks disagree about {first.kind.value} {first.name!r}: {'; '.join(parts)}. "
        "Every rank must submit the same under one name."
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(r) for r in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
