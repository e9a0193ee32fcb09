"""Telling a rank's dying traceback from one it has caught and logged."""

from __future__ import annotations

import re

__all__ = ["PATIENCE", "PATIENCE_IN_FAILURE", "LastWords"]

PATIENCE = 2.0
"""Seconds without the process's end after which a traceback counts as handled: torch takes one to end."""

PATIENCE_IN_FAILURE = 8.0
"""The same once a rank has failed: TensorFlow may take several to end, and the job ends within ten."""

_MOST = 1 << 20
_STARTS = (
    b"Traceback (most recent call last):",
    b"  + Exception Group Traceback (most recent call last):",
)
_CONSEQUENCE = re.compile(rb"^(?:[\w.]+\.)?HorovodInternalError\b")
_INTERRUPT = re.compile(rb"^KeyboardInterrupt\b")


class LastWords:
    """Holds back one rank's stderr from a traceback's first line on.

    If the rank then ends, what is held are its last words, to be printed where the job's report
    wants them. The order of the rank's lines is never changed.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._bytes = 0
        self._patience = PATIENCE
        self.deadline: float | None = None

    def expect_end(self) -> None:
        """A rank has failed, so that a traceback is probably what its process ends with."""
        if self.deadline is not None:
            self.deadline += PATIENCE_IN_FAILURE - self._patience
        self._patience = PATIENCE_IN_FAILURE

    @property
    def lines(self) -> list[bytes]:
        """What is held."""
        return self._held

    def feed(self, line: bytes, now: float) -> list[bytes]:
        """Take one line; returns those to print at once. `now` is in seconds."""
        starts = line in _STARTS or line.startswith(b"Fatal Python error: ")
        if not starts and self.deadline is None:
            return [line]
        if starts:
            # A chained traceback belongs to the same words and gives the process new time to end.
            self.deadline = now + self._patience
        self._held.append(line)
        self._bytes += len(line)
        return self.release() if self._bytes > _MOST else []

    def release(self) -> list[bytes]:
        """Give up holding: the process lives on, so the traceback was a message like any other."""
        lines, self._held, self._bytes, self.deadline = self._held, [], 0, None
        return lines

    @property
    def is_consequence(self) -> bool:
        """Whether they only say that another rank has failed."""
        return self._last_exception(_CONSEQUENCE)

    @property
    def is_interrupt(self) -> bool:
        """Whether they only say that the job was interrupted."""
        return self._last_exception(_INTERRUPT)

    def _last_exception(self, kind: re.Pattern[bytes]) -> bool:
        last = max((i for i, line in enumerate(self._held) if line in _STARTS), default=0)
        return any(kind.match(line) for line in self._held[last:])
