"""Whose fault it is when a job fails, from what was observed and in which order."""

from __future__ import annotations

import signal
from dataclasses import dataclass

__all__ = ["LOST", "Blame", "Verdict", "describe", "exit_code"]

LOST = -1000
"""Status of a rank whose end nobody could observe: the MPI killed it together with its relay."""


@dataclass(frozen=True)
class Verdict:
    """The first failing rank, and its status in `subprocess` notation (negative: a signal)."""

    rank: int
    status: int


class Blame:
    """Collects the ranks' ends and their reports about each other."""

    def __init__(self) -> None:
        self._accused: int | None = None
        self._ends: dict[int, int] = {}
        self._own: list[int] = []

    def accuse(self, rank: int) -> None:
        """A rank has found that this one failed; the first word before any failed exit counts."""
        if self._accused is None and not self._own:
            self._accused = rank

    def ended(self, rank: int, status: int, stopped_by_us: bool) -> None:
        """A rank's process has ended."""
        self._ends[rank] = status
        if status not in (0, LOST) and not stopped_by_us:
            self._own.append(rank)

    def verdict(self) -> Verdict | None:
        """The first failing rank, or None if no rank failed by itself.

        An accused rank that ended well has only left early; then whoever failed over it is named.
        """
        accused = self._accused
        if accused is not None and self._ends.get(accused, 0) not in (0, LOST):
            return Verdict(accused, self._ends[accused])
        return Verdict(self._own[0], self._ends[self._own[0]]) if self._own else None


def exit_code(status: int) -> int:
    """A shell's notation of a `subprocess` status."""
    return 128 - status if status < 0 else status


def describe(status: int) -> str:
    """A status in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"killed by signal {-status}"
    return f"killed by signal {-status} ({name})"
