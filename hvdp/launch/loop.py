"""The launcher's event loop: descriptors, signals and timers, asleep between them."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from types import FrameType

__all__ = ["Loop", "Timer"]


class Timer:
    """A call that is due later, unless cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Drop the call; harmless if it has been made."""
        self.call = None


class Loop:
    """Runs callbacks, one at a time, until `stop()`.

    Use it as a context manager in the main thread: it owns the signals it was asked to watch
    and gives their handlers back at the end.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._signals: dict[int, Callable[[], None]] = {}
        self._previous: dict[int, object] = {}
        self._arrived: list[int] = []
        self._running = False

    def __enter__(self) -> Loop:
        self.wakeup, self._wakeup_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup_w, warn_on_full_buffer=False)
        self.watch(self.wakeup, self._read_wakeup)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup)
        self._selector.close()
        os.close(self.wakeup)
        os.close(self._wakeup_w)

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call whenever the descriptor can be read."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def forget(self, fd: int) -> None:
        """Stop watching; the descriptor must still be open."""
        self._selector.unregister(fd)

    def on_signal(self, numbers: Iterable[int], call: Callable[[int], None]) -> None:
        """Call with the number of each of these signals that arrives."""
        for number in numbers:
            self._signals[number] = lambda number=number: call(number)  # type: ignore[misc]
            self._previous[number] = signal.signal(number, _noted)

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call once, that much later."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._sequence), timer))
        return timer

    def stop(self) -> None:
        """Leave `run()` once the current callback returns."""
        self._running = False

    def run(self) -> None:
        """Sleep and call until `stop()`."""
        self._running = True
        while self._running:
            for key, _ in self._selector.select(self._patience()):
                # A callback may have closed what this round's later callbacks were to read.
                if key.fd in self._selector.get_map():
                    key.data()
            self._dispatch_signals()
            now = time.monotonic()
            while self._running and self._timers and self._timers[0][0] <= now:
                call = heapq.heappop(self._timers)[2].call
                if call is not None:
                    call()

    def arrived(self) -> frozenset[int]:
        """Signals that have arrived and wait for `run()` to call; for code that blocks for long."""
        self._read_wakeup()
        return frozenset(self._arrived)

    def _patience(self) -> float | None:
        if self._arrived:
            return 0.0
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _read_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._arrived.extend(os.read(self.wakeup, 4096))

    def _dispatch_signals(self) -> None:
        # Equal signals that arrive together are one event, as the kernel has it.
        arrived, self._arrived = dict.fromkeys(self._arrived), []
        for number in arrived:
            if number in self._signals:
                self._signals[number]()


def _noted(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has the signal already; a handler must exist for it to be written."""
