"""The caller's hold on an operation in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hvdp.errors import HvdpError

__all__ = ["GroupHandle", "Handle"]


class Handle:
    """Completes once, with a result or an error. Any thread may wait, any number of times.

    Attributes:
        seen: whether the caller has learnt that it is complete.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._latch = threading.Lock()
        self._latch.acquire()
        self._done = self.seen = False
        self._result: Any = None
        self._error: HvdpError | None = None
        self._finish: Callable[[Any], Any] | None = None
        self._bells: list[Callable[[], None]] = []

    def ring(self, bell: Callable[[], None]) -> None:
        """Have `bell` called once at completion, by whoever completes; at once if done."""
        self._bells.append(bell)
        if self._done:
            bell()

    def then(self, finish: Callable[[Any], Any]) -> Handle:
        """Let the first `wait` pass the result through `finish`, in the waiting thread."""
        self._finish = finish
        return self

    def poll(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if self._done:
            self.seen = True
        return self._done

    def wait(self) -> Any:
        """Block until completion and return the result.

        Raises:
            HvdpError: the operation failed; the same error on every member.
        """
        # A lock used as a latch: a quarter of threading.Event's wake-up time, and Ctrl-C gets through.
        self._latch.acquire()
        self.seen = True
        try:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._finish is not None:
                finish, self._finish = self._finish, None
                self._result = finish(self._result)
        finally:
            self._latch.release()
        return self._result

    def complete(self, result: Any) -> None:
        """Called by the engine, once."""
        self._result = result
        self._open()

    def fail(self, error: HvdpError) -> None:
        """Called by the engine, once."""
        self._error = error
        self._open()

    def _open(self) -> None:
        self._done = True
        self._latch.release()
        for bell in self._bells:
            bell()


class GroupHandle(Handle):
    """Several handles as one: done when all are, its result the list of theirs."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        super().__init__("group")
        self._handles = handles
        self.complete(None)

    def poll(self) -> bool:
        return all(handle.poll() for handle in self._handles)

    def wait(self) -> Any:
        """As Handle's; the first error, once all have ended."""
        results, errors = [], []
        for handle in self._handles:
            try:
                results.append(handle.wait())
            except HvdpError as error:  # noqa: PERF203 - the others must end as well
                errors.append(error)
        if errors:
            raise errors[0]
        if self._finish is not None:
            return self._finish(results)
        return results
