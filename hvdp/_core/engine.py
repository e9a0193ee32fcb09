"""The engine: one background thread a process that agrees on and runs the collectives.

Callers submit operations from any thread. The thread passes them to the control plane,
sleeps until a verdict comes, and runs the agreed operations in the verdicts' order, which
is the same on all members. See docs/architecture.md for the messages.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import WeakValueDictionary

import numpy as np

from hvdp._core.control import ControlPlane
from hvdp._core.handles import Handle
from hvdp._core.messages import Notice
from hvdp._core.operation import Operation, Terms
from hvdp._core.operations import OPERATIONS
from hvdp._core.process_sets import Group
from hvdp._core.rendezvous import Meeting
from hvdp._core.stall import StallWatch
from hvdp._core.timeline import Timeline, TraceFile
from hvdp.errors import HorovodInternalError, HvdpError, InvalidArgumentError, MismatchError
from hvdp.transports.base import Buffer, Transport

__all__ = ["Engine"]

_log = logging.getLogger(__name__)
_Key = tuple[int, str]


@dataclass(frozen=True)
class _Agreed:
    operation: Operation
    terms: Terms


class Engine:
    """Created by `init` on every rank.

    Args:
        stall_watch: reports names that some ranks do not submit; used on rank 0.
        blame: called with a rank when this process learns that it failed first.

    Attributes:
        buffers: memory allocated by name, as long as somebody uses it.
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
        self.buffers: WeakValueDictionary[str, Buffer] = WeakValueDictionary()
        self._adopted: list[Buffer] = []
        self._blame = blame
        self._stall_watch = stall_watch
        self._timeline = Timeline(self.rank, lambda message: self._control.trace(message))
        self._control = ControlPlane(
            meeting, cache_capacity, self._deliver, self._lost_coordinator, self._timeline.heard
        )
        self._groups = {0: Group(0, tuple(range(self.topology.size)), self.rank)}
        self._lock = threading.Lock()
        self._submitted: deque[Operation] = deque()
        self._live: dict[_Key, Operation] = {}
        self._batches: deque[list[_Agreed]] = deque()
        self._unnamed: dict[tuple[str, int], int] = {}
        self._failure: HorovodInternalError | None = None
        self._leaving = ""
        self._orphaned = ""
        self._thread = threading.Thread(target=self._run, name="hvdp-engine", daemon=True)
        self._thread.start()

    # Called from any thread ---------------------------------------------------------------

    def group(self, process_set: int) -> Group:
        """The process set as its members see it.

        Raises:
            InvalidArgumentError: this rank is not a member, or there is no such set.
        """
        group = self._groups.get(process_set)
        if group is None:
            raise InvalidArgumentError(
                f"rank {self.rank} is not a member of process set {process_set}, or the set was removed: "
                "only members may call its collectives (see ProcessSet.included())."
            )
        return group

    def add_group(self, group: Group) -> None:
        self._groups[group.number] = group

    def remove_group(self, process_set: int) -> None:
        group = self._groups.pop(process_set, None)
        if group is not None:
            self.transport.forget(group)

    def adopt(self, buffer: Buffer) -> None:
        """Keep a buffer that was allocated while this rank had joined, until all have."""
        self._adopted.append(buffer)

    def unnamed(self, kind: str, process_set: int) -> str:
        """A name for a call without one: the same on all ranks that make the same calls."""
        with self._lock:
            count = self._unnamed.get((kind, process_set), 0)
            self._unnamed[kind, process_set] = count + 1
        return f"{kind}.noname.{count}"

    def submit(self, *operations: Operation) -> list[Handle]:
        """Hand operations over together; a handle completes when all members have done the same.

        Raises:
            InvalidArgumentError: an operation of one of the names is in flight; none is submitted.
            HorovodInternalError: the job has failed.
        """
        keys = [_key(operation) for operation in operations]
        with self._lock:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            for index, key in enumerate(keys):
                if key in self._live or key in keys[:index]:
                    raise InvalidArgumentError(_in_flight(self.rank, operations[index]))
            self._live.update(zip(keys, operations, strict=True))
            for operation in operations:
                self._timeline.submitted(operation)
            self._submitted.extend(operations)
            self._control.wake()
        return [operation.handle for operation in operations]

    def run(self, operation: Operation) -> object:
        """Submit one operation and wait for its result."""
        return self.submit(operation)[0].wait()

    def trace_to(self, file: TraceFile | None) -> None:
        """On rank 0: record a timeline of all ranks into a file, or end it."""
        with self._lock:
            self._timeline.want(file)
            self._control.wake()

    def close(self, reason: str) -> None:
        """Leave the job: peers that still wait for this rank are told `reason`; idempotent."""
        with self._lock:
            self._leaving = self._leaving or reason
            self._control.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: let go of everything without a word to the peers."""
        self._control.abandon()
        self.transport.abandon()

    # The engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        # Overflow is data here, as in the frameworks; kernels that care ask for the flag.
        np.seterr(all="ignore")
        try:
            while not self._leaving:
                self._pump(None)
                while self._batches:
                    self._execute(self._batches.popleft())
                    self._timeline.flush()
                if self._orphaned:
                    raise HorovodInternalError(self._orphaned, 0 if self._live else None)
            self._control.goodbye(self._leaving)
        except HorovodInternalError as error:
            self._break(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, peers must not wait for us
            _log.exception("the engine of rank %d failed", self.rank)
            self._break(HorovodInternalError(f"the engine of rank {self.rank} failed: {error!r}", self.rank))
        finally:
            self._break(HorovodInternalError(f"rank {self.rank} has shut down hvdp"))
            with self._lock:
                self._control.close()
            self._timeline.close()
            self.transport.close()

    def _pump(self, seconds: float | None) -> None:
        """Hear the control plane and pass on what was submitted; runs no operation."""
        if seconds is None and self._control.coordinator is not None:
            seconds = self._stall_watch.interval
        self._control.listen(seconds)
        self._timeline.turn()
        while self._submitted:
            self._control.submit(self._submitted.popleft().submission)
        self._control.flush()
        if self._control.coordinator is not None:
            self._stall_watch.look(self._control.coordinator)

    def _deliver(self, notices: list[Notice]) -> None:
        """Take the verdicts of one frame."""
        batch = []
        for notice in notices:
            key = (notice.signature.process_set, notice.signature.name)
            operation = self._live.get(key)
            if notice.error:
                self._forget(key).handle.fail(self._error(notice))
                continue
            if operation is None or self.rank in notice.absent:
                operation = OPERATIONS[notice.signature.kind].stand_in(notice.signature, self)
            size = self._groups[key[0]].size
            each = len(notice.extras) // size
            extras = tuple(notice.extras[i * each : (i + 1) * each] for i in range(size))
            self._timeline.agreed(operation)
            batch.append(_Agreed(operation, Terms(extras, notice.absent)))
        self._batches.append(batch)

    def _error(self, notice: Notice) -> HvdpError:
        if notice.gone >= 0:
            self._blame(notice.gone)
            return HorovodInternalError(notice.error, notice.gone)
        return (InvalidArgumentError if notice.invalid else MismatchError)(notice.error)

    def _lost_coordinator(self, peer: int, reason: str) -> None:
        """What has been agreed on needs nothing more of rank 0, and may still run here."""
        self._orphaned = f"rank {peer} {reason}"

    def _forget(self, key: _Key) -> Operation:
        with self._lock:
            return self._live.pop(key)

    # Running ------------------------------------------------------------------------------

    def _execute(self, batch: list[_Agreed]) -> None:
        """Run what one frame agreed on; small operations that fit together as one.

        A batch may only be cut by what all members see alike.
        """
        for (batch_key, _), run in groupby(batch, key=lambda a: (a.operation.batch_key, a.terms.absent)):
            agreed = list(run)
            if batch_key is not None and len(agreed) > 1 and self.transport.order_free:
                self._execute_together(agreed)
            else:
                for one in agreed:
                    self._execute_together([one])

    def _execute_together(self, batch: Sequence[_Agreed]) -> None:
        operations = [agreed.operation for agreed in batch]
        first, terms = operations[0], batch[0].terms
        group = self._groups[first.signature.process_set]
        try:
            if len(batch) == 1:
                results = [first.execute(self.transport, group, terms)]
            else:
                results = first.execute_batch(operations, self.transport, group, terms)
        except HorovodInternalError:
            raise
        except HvdpError as error:
            # Transports raise these on all members alike, so the engine goes on.
            for operation in operations:
                self._end(operation).fail(error)
            return
        except Exception as error:
            names = ", ".join(operation.signature.name for operation in operations)
            raise HorovodInternalError(f"rank {self.rank} failed in {names}: {error!r}", self.rank) from error
        for operation, result in zip(operations, results, strict=True):
            self._end(operation).complete(result)

    def _end(self, operation: Operation) -> Handle:
        self._timeline.ended(operation)
        with self._lock:
            if self._live.get(_key(operation)) is operation:
                del self._live[_key(operation)]
        return operation.handle

    # Ends ---------------------------------------------------------------------------------

    def _break(self, error: HorovodInternalError) -> None:
        """Fail everything in flight, and everybody else; only the first call does."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            live, self._live = self._live, {}
            self._submitted.clear()
        if not self._leaving and error.rank is not None:
            self._blame(error.rank)
            self._control.abort(error.rank, str(error))
        for operation in live.values():
            operation.handle.fail(error)


def _key(operation: Operation) -> _Key:
    return operation.signature.process_set, operation.signature.name


def _in_flight(rank: int, operation: Operation) -> str:
    signature = operation.signature
    return (
        f"rank {rank} submitted {signature.kind.value} {signature.name!r} while one of that name is in "
        "flight: wait for its handle first, or give each tensor its own name."
    )
