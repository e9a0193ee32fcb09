"""The engine: agrees with the other ranks on the collectives, and runs them.

Callers submit operations from any thread. Whoever holds the engine's wheel hears the
control plane and runs what was agreed on, in the verdicts' order, which is the same on all
members. That is a background thread, which sleeps until something comes, or a caller that
has to wait anyway: waking another thread takes longer than a small operation.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from hvdp._core.control import ControlPlane
from hvdp._core.executor import Executor
from hvdp._core.handles import Handle
from hvdp._core.operation import Operation
from hvdp._core.process_sets import Group
from hvdp._core.rendezvous import Meeting
from hvdp._core.stall import StallWatch
from hvdp._core.timeline import Timeline, TraceFile
from hvdp.errors import HorovodInternalError, InvalidArgumentError
from hvdp.transports.base import Transport

__all__ = ["Engine"]

_log = logging.getLogger(__name__)

_LEAVE_SECONDS = 10.0
"""How long a rank that leaves waits for rank 0's leave to go."""

_SPIN_SECONDS = 0.0003
"""How long a caller looks for the answer again and again before it falls asleep."""


class Engine:
    """Created by `init` on every rank.

    Args:
        cache_capacity: how many operations are known by number.
        stall_watch: reports names that some ranks do not submit; used on rank 0.
        blame: called with a rank when this process learns that it failed first.
    """

    def __init__(
        self,
        meeting: Meeting,
        transport: Transport,
        cache_capacity: int,
        stall_watch: StallWatch,
        blame: Callable[[int], None],
    ) -> None:
        self.topology = meeting.topology
        self.rank = self.topology.rank
        self.transport = transport
        transport.pause = self._pump
        self._blame = blame
        self._stall_watch = stall_watch
        self._timeline = Timeline(self.rank, lambda message: self._control.trace(message))
        self.executor = Executor(self.rank, self.topology.size, transport, self._timeline, blame)
        self._control = ControlPlane(
            meeting,
            cache_capacity,
            self.executor.deliver,
            self._lost_coordinator,
            self._timeline.heard,
            transport.board,
        )
        self._wheel = threading.Lock()
        self._seat = threading.Lock()
        self._seated = 0
        self._spin = _SPIN_SECONDS if len(os.sched_getaffinity(0)) >= self.topology.local_size else 0.0
        self._wake_lock = threading.Lock()
        self._submitted: deque[Operation] = deque()
        self._unnamed: dict[tuple[str, int], int] = {}
        self._leaving = ""
        self._leave_by = 0.0
        self._orphaned = ""
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="hvdp-engine", daemon=True)
        self._thread.start()

    # Called from any thread ---------------------------------------------------------------

    def group(self, process_set: int) -> Group:
        """The process set as its members see it.

        Raises:
            InvalidArgumentError: this rank is not a member, or there is no such set.
        """
        group = self.executor.groups.get(process_set)
        if group is None:
            raise InvalidArgumentError(
                f"rank {self.rank} is not a member of process set {process_set}, or the set was removed: "
                "only members may call its collectives (see ProcessSet.included())."
            )
        return group

    def unnamed(self, kind: str, process_set: int) -> str:
        """A name for a call without one: the same on all ranks that make the same calls."""
        with self._wake_lock:
            count = self._unnamed.get((kind, process_set), 0)
            self._unnamed[kind, process_set] = count + 1
        return f"{kind}.noname.{count}"

    def rename(self) -> None:
        """Number calls without a name from 0 again: ranks that joined have made fewer than the others."""
        with self._wake_lock:
            self._unnamed.clear()

    def submit(self, *operations: Operation) -> list[Handle]:
        """Hand operations over together; a handle completes when all members have done the same.

        Raises:
            InvalidArgumentError: an operation of one of the names is in flight; none is submitted.
            HorovodInternalError: the job has failed.
        """
        self.executor.accept(operations)
        handles = [operation.handle for operation in operations]
        self._submitted.extend(operations)
        self._wake()
        return handles

    def run(self, operation: Operation) -> object:
        """Submit one operation, help it along, and return its result; errors as `submit` and its own."""
        self.executor.accept([operation], waits=True)
        handle = operation.handle
        if self._seat.acquire(blocking=False):
            self._seated = threading.get_ident()
            try:
                if not self._ended:
                    self._drive(operation, handle)
            finally:
                self._seated = 0
                self._seat.release()
        else:
            self._submitted.append(operation)
            self._leave_words_to_thread()
            self._wake()
        return handle.wait()

    def trace_to(self, file: TraceFile | None) -> None:
        """On rank 0: record a timeline of all ranks into a file, or end it.

        Raises:
            HorovodInternalError: the job has failed.
        """
        with self._wheel:
            if not self._ended:
                self._timeline.want(file)
                # At once, so that what this rank submits next is in it.
                self._guarded(self._timeline.turn)
            elif file is not None:
                file.close()
                self.executor.accept(())

    def close(self, reason: str) -> None:
        """Leave the job: peers that still wait for this rank are told `reason`; idempotent."""
        if not self._leaving:
            self._leave_by = time.monotonic() + _LEAVE_SECONDS
            self._leaving = reason
        self._leave_words_to_thread()
        self._wake()
        if self._seated == threading.get_ident():
            # A signal's handler within a collective, whose seat the thread needs to end.
            atexit.register(self._thread.join, _LEAVE_SECONDS)
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: let go of everything without a word to the peers."""
        self._control.abandon()
        self.transport.abandon()

    def _leave_words_to_thread(self) -> None:
        """In a signal's handler within a collective: its caller cannot hear meanwhile."""
        if self._seated == threading.get_ident():
            self._control.let_sleep(False)

    def _wake(self) -> None:
        """Let the background thread take the wheel."""
        # Under a lock, so that the descriptor is not closed, and its number reused, meanwhile.
        with self._wake_lock:
            self._control.wake()

    # Driving ------------------------------------------------------------------------------

    def _run(self) -> None:
        """The background thread."""
        interval = self._stall_watch.interval if self._control.coordinator is not None else None
        while not self._ended:
            self._control.sleep(0.1 if self._leaving else interval)
            with self._wheel:
                self._guarded(self._turn)
        # In the order in which a caller takes them.
        with self._seat, self._wake_lock:
            self._control.close()
        self._timeline.close()
        self.transport.close()

    def _drive(self, operation: Operation, handle: Handle) -> None:
        """A caller submits an operation, and turns the wheel until it is done."""
        caller = threading.get_ident()
        with self._wheel:
            self._guarded(lambda: self._start(operation))
        if handle.poll():
            return
        handle.ring(lambda: None if threading.get_ident() == caller else self._control.ring())
        self._control.let_sleep(True)
        try:
            with self._wheel:
                self._guarded(self._turn)
            spin_until = time.perf_counter() + self._spin
            while not handle.poll():
                spins = time.perf_counter() < spin_until
                if self._control.watch(0 if spins else None) and not handle.poll():
                    with self._wheel:
                        self._guarded(self._turn)
        finally:
            self._control.let_sleep(False)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do something at the wheel that may find that the job has failed."""
        if self._ended:
            return
        try:
            step()
        except HorovodInternalError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, peers must not wait for us
            _log.exception("the engine of rank %d failed", self.rank)
            self._end(HorovodInternalError(f"the engine of rank {self.rank} failed: {error!r}", self.rank))
        except BaseException as interrupt:
            # In a caller's thread: peers may be in the middle of an operation with us.
            self._end(HorovodInternalError(f"rank {self.rank} was stopped by {interrupt!r}", self.rank))
            raise

    def _start(self, operation: Operation) -> None:
        """Submit an operation; run it if all ranks come to it now and have nothing else to do."""
        quiet = self.executor.alone() and not (self._leaving or self._orphaned)
        if not quiet or not self._spin or operation.signature.process_set != 0:
            self._submitted.append(operation)
        elif self._control.agree_at_once(operation.submission, self._spin):
            self.executor.run_at_once(operation)

    def _turn(self) -> None:
        """Hear, tell and run whatever there is, without waiting for more; at the wheel."""
        self._pump(0)
        self.executor.run()
        if self._orphaned:
            raise HorovodInternalError(self._orphaned, 0 if self.executor.waits else None)
        if self._leaving and (self._control.goodbye(self._leaving) or time.monotonic() > self._leave_by):
            self._end(HorovodInternalError(f"rank {self.rank} has shut down hvdp"))

    def _pump(self, seconds: float) -> None:
        """Hear the control plane for up to so many seconds, and pass on what was submitted."""
        self._control.listen(seconds)
        self._timeline.turn()
        while self._submitted:
            self._control.submit(self._submitted.popleft().submission)
        self._control.flush()
        if self._control.coordinator is not None:
            self._stall_watch.look(self._control.coordinator)

    def _lost_coordinator(self, peer: int, reason: str) -> None:
        """What has been agreed on needs nothing more of rank 0, and may still run here."""
        self._orphaned = f"rank {peer} {reason}"

    def _end(self, error: HorovodInternalError) -> None:
        """Fail everything in flight, and everybody else; the background thread then cleans up."""
        self._ended = True
        if not self._leaving and error.rank is not None:
            self._blame(error.rank)
            self._control.abort(error.rank, str(error))
            self.transport.broken = not self._orphaned
        self.executor.fail(error)
        self._wake()
