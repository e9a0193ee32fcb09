"""The launcher's own standard output and error: the only place that writes to them."""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections.abc import Callable

__all__ = ["Console", "OutputClosed"]

# A pipe that can be written takes this much without blocking.
_CHUNK = select.PIPE_BUF
# Milliseconds a reader may make no progress once the job is being stopped.
_LAST_CHANCE = 250


class OutputClosed(Exception):
    """Whoever read our output has gone."""


class Console:
    """Whole writes to stdout and stderr, which a slow reader may hold up but a stop signal frees.

    Args:
        name: what the launcher's own messages begin with.
    """

    def __init__(self, name: str) -> None:
        _fill_standard_descriptors()
        self.name = name
        self._closed: set[int] = set()
        self._wakeup: int | None = None
        self._hurry: Callable[[], bool] = lambda: False

    def hurry_on(self, wakeup: int, stopping: Callable[[], bool]) -> None:
        """Look up from a blocked write whenever `wakeup` can be read.

        If `stopping()` then holds, a reader that stands still loses the rest.
        """
        self._wakeup, self._hurry = wakeup, stopping

    def say(self, text: str) -> None:
        """One message of the launcher itself, on stderr. Never raises."""
        with contextlib.suppress(OutputClosed):
            self.write(2, f"{self.name}: {text}\n".encode(errors="replace"))

    def write(self, fd: int, data: bytes) -> None:
        """Write everything to descriptor 1 or 2.

        Raises:
            OutputClosed: the first time the reader turns out to have gone; later writes vanish.
        """
        if fd in self._closed:
            return
        try:
            self._write(fd, memoryview(data))
        except OSError as error:
            self._closed.add(fd)
            raise OutputClosed from error

    def _write(self, fd: int, data: memoryview) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            while data:
                data = data[os.write(fd, data) :]
            return
        room = select.poll()
        room.register(fd, select.POLLOUT)
        while data:
            if room.poll(0):
                data = data[os.write(fd, data[:_CHUNK]) :]
            elif self._hurry():
                if not room.poll(_LAST_CHANCE):
                    self._closed.add(fd)
                    return
            else:
                both = select.poll()
                both.register(fd, select.POLLOUT)
                if self._wakeup is not None:
                    both.register(self._wakeup, select.POLLIN)
                both.poll()


def _fill_standard_descriptors() -> None:
    """Where we were started with one closed, keep pipes of ours from taking its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
