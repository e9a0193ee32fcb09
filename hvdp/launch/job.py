"""Supervising the processes of one job on this host, from the first to the last."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from typing import Protocol

from hvdp.launch.blame import Blame, describe, exit_code
from hvdp.launch.console import Console
from hvdp.launch.guardian import Guardian, sweep
from hvdp.launch.loop import Loop, Timer
from hvdp.launch.output import Output

__all__ = ["Job", "Starter"]

# All in seconds. Together they stay below the ten in which a failed job must have ended.
_GRACE = 3.0
_AFTER_TERM = 2.0
_AFTER_INTERRUPT = 3.0
_LEFTOVERS = 0.5

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BROKEN_PIPE = -signal.SIGPIPE


class Starter(Protocol):
    """Brings the ranks into being and learns of their end; tells the job both."""

    def start(self, job: Job) -> None:
        """Start every rank, or what will start them. Raises: LaunchError."""

    def on_child(self) -> None:
        """A child of the launcher may have ended."""

    def finish(self) -> int | None:
        """All ranks have ended: reap. Returns a status that stands for ranks whose own is lost."""


@dataclass
class _Rank:
    group: int | None = None
    status: int | None = None


class Job:
    """The state of the job; `run()` returns the launcher's exit status."""

    def __init__(
        self, size: int, name: str, loop: Loop, console: Console, guardian: Guardian, starter: Starter
    ) -> None:
        self.loop = loop
        self.output: Output
        self._name = name
        self._console = console
        self._guardian = guardian
        self._starter = starter
        self._ranks = [_Rank() for _ in range(size)]
        self._groups: set[int] = set()
        self._blame = Blame()
        self._timer: Timer | None = None
        self._stopping = False
        self._stopped_by: int | None = None
        self._pipe, self.supervisor_pipe = os.pipe()
        os.set_blocking(self._pipe, False)

    def run(self, output: Output) -> int:
        """Start the ranks, see them through and report.

        Raises:
            LaunchError: they could not be started; none is left.
        """
        self.output = output
        self._console.hurry_on(self.loop.wakeup, self._hurry)
        self.loop.watch(self._pipe, self._read_pipe)
        self.loop.on_signal((signal.SIGCHLD,), lambda _: self._on_child())
        self.loop.on_signal(
            (n for n in _STOP_SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN),
            self._on_stop_signal,
        )
        ended = False
        try:
            self._starter.start(self)
            self.loop.run()
            ended = True
        finally:
            in_order = ended and all(rank.status == 0 for rank in self._ranks)
            fallback = self._starter.finish() if ended else None
            sweep(None if in_order else self._name, self._groups, _LEFTOVERS if ended else 0.0)
            output.close()
            self._guardian.dismiss()
            self.loop.forget(self._pipe)
            os.close(self._pipe)
            os.close(self.supervisor_pipe)
        return self._report(fallback)

    # What the starter tells.

    def belongs(self, group: int) -> None:
        """A process group is part of the job."""
        self._groups.add(group)
        self._guardian.add(group)

    def started(self, rank: int, group: int, stdout: int, stderr: int) -> None:
        """A rank runs; read its output from these descriptors."""
        self._ranks[rank].group = group
        self.belongs(group)
        self.output.ranks[rank].attach(stdout, stderr)

    def ended(self, rank: int, status: int) -> None:
        """A rank's process has ended; `status` is negative for a signal."""
        # Whom the rank accused, it did before it ended.
        self._read_pipe()
        self._ranks[rank].status = status
        self._blame.ended(rank, status, self._stopping)
        self.output.ranks[rank].finish(keep_last_words=status != 0)
        if all(r.status is not None for r in self._ranks):
            self.loop.stop()
        elif status != 0 and not self._stopping and self._timer is None:
            self._timer = self.loop.after(_GRACE, self._terminate)

    def abandon(self) -> None:
        """Nothing that could start or end ranks is left."""
        self.loop.stop()

    def output_closed(self) -> None:
        """Nobody reads our output any more: end the job as a shell would."""
        if self._stopped_by is None:
            self._stopped_by = signal.SIGPIPE
            self._interrupt(signal.SIGTERM)

    # What happens.

    def _on_child(self) -> None:
        self._starter.on_child()

    def _read_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for rank in re.findall(rb"^failed (\d+)$", os.read(self._pipe, 1 << 16), re.MULTILINE):
                if int(rank) < len(self._ranks):
                    self._blame.accuse(int(rank))
                    for output in self.output.ranks:
                        output.last_words.expect_end()

    def _hurry(self) -> bool:
        return self._stopped_by is not None or not self.loop.arrived().isdisjoint(_STOP_SIGNALS)

    def _on_stop_signal(self, number: int) -> None:
        if self._stopped_by is not None:
            self._signal(signal.SIGKILL)
            return
        self._stopped_by = number
        self._interrupt(number)

    def _interrupt(self, number: int) -> None:
        self._stopping = True
        self._signal(number)
        self._kill_after(_AFTER_INTERRUPT)

    def _terminate(self) -> None:
        self._stopping = True
        self._signal(signal.SIGTERM)
        self._kill_after(_AFTER_TERM)

    def _kill_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.after(seconds, lambda: self._signal(signal.SIGKILL))

    def _signal(self, number: int) -> None:
        alive = {rank.group for rank in self._ranks if rank.status is None}
        # Ranks that have not shown themselves yet are reached through whatever starts them. An ended
        # rank stays unreaped, so its group's number cannot belong to anyone else.
        for group in self._groups if None in alive or number == signal.SIGKILL else alive:
            if group is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, number)

    # How it ended.

    def _report(self, fallback: int | None) -> int:
        size = len(self._ranks)
        if self._stopped_by is not None:
            self._print_last_words(blamed=None)
            if self._stopped_by == signal.SIGPIPE:
                self._console.say("stopped the job: the reader of its output has gone")
            else:
                name = signal.Signals(self._stopped_by).name
                self._console.say(f"stopped by {name}; all {size} ranks have ended")
            return exit_code(-self._stopped_by)
        verdict = self._blame.verdict()
        if verdict is not None:
            self._print_last_words(blamed=verdict.rank)
            self._console.say(f"rank {verdict.rank} of {size} failed: {describe(verdict.status)}")
            return exit_code(verdict.status)
        self._print_last_words(blamed=None)
        if all(rank.status == 0 for rank in self._ranks):
            return 0
        status = fallback or 1
        self._console.say(f"the job of {size} ranks failed: mpiexec {describe(status)}")
        return exit_code(status)

    def _print_last_words(self, blamed: int | None) -> None:
        """Other ranks' in full or, if a mere consequence, in a line; the blamed rank's last."""
        for rank, output in enumerate(self.output.ranks):
            words = output.last_words
            if rank == blamed or not words.lines:
                continue
            if blamed is not None and words.is_consequence:
                words.release()
                output.print(2, [b"stopped by the failure of rank %d" % blamed])
            elif self._stopped_by is not None and (words.is_interrupt or words.is_consequence):
                words.release()
            else:
                output.print(2, words.release())
        if blamed is not None:
            output = self.output.ranks[blamed]
            output.print(2, output.last_words.release())
