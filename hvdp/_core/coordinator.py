"""Who has submitted what: the control plane's decisions, free of sockets and threads.

Lives on rank 0. Every rank's submissions go in; verdicts come out in the one order in
which all members of each process set will act on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdp._core import wording
from hvdp._core.ops import Kind, Signature

__all__ = ["Coordinator", "Stall", "Submission", "Verdict"]

_NEEDS_EVERYBODY = {Kind.ALLTOALL, Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET}


class Submission(NamedTuple):
    """One rank's part in one name.

    Attributes:
        extras: numbers that may differ between ranks and that all members will get.
        error: why the rank itself holds its call to be wrong; every member will raise it.
    """

    signature: Signature
    extras: tuple[int, ...] = ()
    error: str = ""


class Verdict(NamedTuple):
    """What the members of a process set are told about one name.

    Attributes:
        members: global ranks that are told.
        number: short id under which the signature is known from now on, or -1.
        new: the members do not know that number yet.
        extras: each member's extra numbers, in the order of the process set.
        absent: members that have joined and contribute nothing.
        error: "" or the text that every member raises.
        gone: the rank that has left, where that is the error; -1 otherwise.
        invalid: the error is one rank's bad argument, not a disagreement.
    """

    members: tuple[int, ...]
    signature: Signature
    number: int = -1
    new: bool = False
    extras: tuple[tuple[int, ...], ...] = ()
    absent: tuple[int, ...] = ()
    error: str = ""
    gone: int = -1
    invalid: bool = False


@dataclass(frozen=True)
class Stall:
    """A name that some members have not submitted yet; `seconds` since the first did."""

    signature: Signature
    present: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float


@dataclass
class _Pending:
    since: float
    by_rank: dict[int, Submission] = field(default_factory=dict)


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
        clock: seconds, for stall reports.
    """

    def __init__(self, size: int, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._members: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._next_set = 1
        self._numbers = _Numbers(capacity)
        self._pending: dict[tuple[int, str], _Pending] = {}
        self._refused: dict[tuple[int, str], dict[int, str]] = {}
        self._gone: dict[int, str] = {}
        self._joined: dict[int, Submission] = {}
        self._clock = clock

    def signature(self, number: int) -> Signature:
        return self._numbers.by_number[number]

    def submit(self, rank: int, submission: Submission) -> list[Verdict]:
        """Take one rank's submission; the verdicts that it completes, most often one or none."""
        signature = submission.signature
        members = self._members.get(signature.process_set, ())
        for gone, reason in self._gone.items():
            if gone in members:
                error = wording.gone(gone, reason, signature)
                return [Verdict((rank,), signature, error=error, gone=gone)]
        if signature.kind is Kind.JOIN:
            return self._join(rank, submission)
        if not members:
            error = f"process set {signature.process_set} has been removed; add it again before using it"
            return [Verdict((rank,), signature, error=error, invalid=True)]
        key = (signature.process_set, signature.name)
        if key in self._refused and rank in self._refused[key]:
            return [Verdict((rank,), signature, error=self._refused[key].pop(rank))]
        crossed = self._crossed(rank, signature)
        pending = self._pending.setdefault(key, _Pending(self._clock()))
        pending.by_rank[rank] = submission
        if crossed is not None:
            return self._refuse_crossed(crossed, key)
        return self._decide_if_complete(key)

    def untouched(self, signature: Signature) -> bool:
        """Whether every rank is here, and none has submitted this yet or is to be refused."""
        key = (signature.process_set, signature.name)
        touched = key in self._pending or self._refused.get(key)
        return not (self._joined or self._gone or touched)

    def leave(self, rank: int, reason: str) -> list[Verdict]:
        """A rank will submit nothing more: what waits for it fails at once."""
        self._gone[rank] = reason
        verdicts = []
        for key, pending in list(self._pending.items()):
            if rank in self._members[key[0]]:
                del self._pending[key]
                verdicts.append(self._verdict_gone(rank, reason, pending.by_rank))
        if self._joined:
            verdicts.append(self._verdict_gone(rank, reason, self._joined))
            self._joined = {}
        return verdicts

    def stalls(self, after: float) -> list[Stall]:
        """Names whose first submission came at least `after` seconds ago, the oldest first."""
        now = self._clock()
        found = []
        for (process_set, _), pending in self._pending.items():
            seconds = now - pending.since
            if seconds >= after:
                present = tuple(sorted(pending.by_rank))
                waiting = [r for r in self._members[process_set] if r not in pending.by_rank]
                missing = tuple(r for r in waiting if r not in self._joined)
                found.append(Stall(pending.by_rank[present[0]].signature, present, missing, seconds))
        return sorted(found, key=lambda stall: -stall.seconds)

    def _verdict_gone(self, rank: int, reason: str, submitted: dict[int, Submission]) -> Verdict:
        waiting = tuple(r for r in submitted if r not in self._gone)
        signature = next(iter(submitted.values())).signature
        return Verdict(waiting, signature, error=wording.gone(rank, reason, signature), gone=rank)

    def _join(self, rank: int, submission: Submission) -> list[Verdict]:
        """A joined rank counts as present, with nothing to give, wherever it is awaited."""
        self._joined[rank] = submission
        verdicts = []
        for key in list(self._pending):
            verdicts += self._decide_if_complete(key)
        everybody = self._members[0]
        if len(self._joined) == len(everybody):
            self._joined = {}
            self._refused.clear()
            verdicts.append(Verdict(everybody, submission.signature, extras=((rank,),) * len(everybody)))
        return verdicts

    def _crossed(self, rank: int, signature: Signature) -> tuple[int, str] | None:
        """A pending key of this name in another process set where two ranks wait for each other."""
        if signature.once:
            return None
        members = self._members[signature.process_set]
        own = self._pending.get((signature.process_set, signature.name))
        here = own.by_rank if own is not None else {}
        for (other_set, name), pending in self._pending.items():
            if name == signature.name and other_set != signature.process_set:
                others = self._members.get(other_set, ())
                waits_for_us = rank in others and rank not in pending.by_rank
                if waits_for_us and any(r in members and r not in here for r in pending.by_rank):
                    return other_set, name
        return None

    def _refuse_crossed(self, *keys: tuple[int, str]) -> list[Verdict]:
        pendings = [self._pending.pop(key) for key in keys]
        sets = [(self._members[key[0]], pending.by_rank) for key, pending in zip(keys, pendings, strict=True)]
        error = wording.crossed(keys[0][1], [(members, list(by_rank)) for members, by_rank in sets])
        told = {rank for _, by_rank in sets for rank in by_rank}
        for key, (members, _) in zip(keys, sets, strict=True):
            self._refuse(key, [rank for rank in members if rank not in told], error)
        return [
            Verdict(tuple(by_rank), next(iter(by_rank.values())).signature, error=error)
            for _, by_rank in sets
        ]

    def _decide_if_complete(self, key: tuple[int, str]) -> list[Verdict]:
        members = self._members[key[0]]
        submitted = self._pending[key].by_rank
        if any(rank not in submitted and rank not in self._joined for rank in members):
            return []
        del self._pending[key]
        verdict = self._decide(members, submitted)
        return [verdict, *(self._refuse_rest(key, submitted, verdict.error) if verdict.error else ())]

    def _refuse_rest(
        self, key: tuple[int, str], submitted: dict[int, Submission], error: str
    ) -> list[Verdict]:
        """Of grouped calls with different numbers of tensors: those that some ranks do not have."""
        process_set, name = key
        sizes = {rank: submission.signature.group_size for rank, submission in submitted.items()}
        verdicts = []
        for index in range(min(sizes.values()), max(sizes.values()) if name.endswith(".0") else 0):
            rest = process_set, f"{name.removesuffix('0')}{index}"
            waiting = self._pending.pop(rest, _Pending(0)).by_rank
            if waiting:
                signature = next(iter(waiting.values())).signature
                verdicts.append(Verdict(tuple(waiting), signature, error=error))
            self._refuse(rest, [r for r, size in sizes.items() if size > index and r not in waiting], error)
        return verdicts

    def _refuse(self, key: tuple[int, str], late: Sequence[int], error: str) -> None:
        """Tell ranks when they submit a name for which nobody waits any more."""
        if late := [rank for rank in late if rank not in self._joined]:
            self._refused.setdefault(key, {}).update(dict.fromkeys(late, error))

    def _decide(self, members: tuple[int, ...], submitted: dict[int, Submission]) -> Verdict:
        present = tuple(rank for rank in members if rank in submitted)
        absent = tuple(rank for rank in members if rank not in submitted)
        signature = submitted[present[0]].signature
        if any(submission.error for submission in submitted.values()):
            error = wording.invalid({rank: submitted[rank].error for rank in present})
            return Verdict(present, signature, error=error, invalid=True)
        if any(submitted[rank].signature != signature for rank in present):
            error = wording.mismatch({rank: submitted[rank].signature for rank in present})
            return Verdict(present, signature, error=error)
        if absent and (signature.kind in _NEEDS_EVERYBODY or signature.root_rank in absent):
            return Verdict(present, signature, error=wording.absent(absent, signature), invalid=True)
        extras = submitted[present[0]].extras
        if signature.kind is Kind.ADD_PROCESS_SET:
            extras = (self._set_number(signature.shape),)
            return Verdict(members, signature, extras=(extras,) * len(members))
        if signature.kind is Kind.REMOVE_PROCESS_SET:
            return self._remove_set(signature, members)
        number, new = self._numbers.of(signature)
        nothing = (0,) * len(extras)
        by_member = tuple(submitted[r].extras if r in submitted else nothing for r in members)
        return Verdict(members, signature, number, new, by_member, absent)

    def _set_number(self, ranks: tuple[int, ...]) -> int:
        """The process set of these ranks, the existing one if there is."""
        for number, members in self._members.items():
            if members == ranks:
                return number
        number = self._next_set
        self._next_set += 1
        self._members[number] = ranks
        return number

    def _remove_set(self, signature: Signature, members: tuple[int, ...]) -> Verdict:
        (number,) = signature.shape
        if any(process_set == number for process_set, _ in self._pending):
            error = f"process set {number} has operations in flight; wait for them before removing it"
            return Verdict(members, signature, error=error, invalid=True)
        self._members.pop(number, None)
        return Verdict(members, signature)
