"""What is in flight on this rank, and the running of what has been agreed on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from hvdp._core.handles import Handle
from hvdp._core.messages import Notice
from hvdp._core.operation import Operation, Terms
from hvdp._core.operations import OPERATIONS
from hvdp._core.ops import Kind
from hvdp._core.process_sets import Group
from hvdp._core.timeline import Timeline
from hvdp.errors import HorovodInternalError, HvdpError, InvalidArgumentError, MismatchError
from hvdp.transports.base import Buffer, Transport

__all__ = ["Executor"]

_Key = tuple[int, str]


class _Agreed(NamedTuple):
    operation: Operation
    terms: Terms


class Executor:
    """Thread-safe where it says so; the rest is called by whoever drives the engine.

    Args:
        rank: this process's global rank.
        size: number of ranks in the job.
        blame: called with the rank that an error's text names as the first to fail.

    Attributes:
        groups: the process sets that this rank is a member of.
        buffers: memory allocated by name, as long as somebody uses it.
    """

    def __init__(
        self, rank: int, size: int, transport: Transport, timeline: Timeline, blame: Callable[[int], None]
    ) -> None:
        self.rank = rank
        self.transport = transport
        self.groups = {0: Group(0, tuple(range(size)), rank)}
        self.buffers: WeakValueDictionary[str, Buffer] = WeakValueDictionary()
        self._adopted: list[Buffer] = []
        self._timeline = timeline
        self._blame = blame
        self._lock = threading.Lock()
        self._live: dict[_Key, Operation] = {}
        # A name is in flight until its caller knows better: otherwise it would depend on timing which
        # ranks refuse a second call of that name, and which wait for it.
        self._handed_out: WeakValueDictionary[_Key, Handle] = WeakValueDictionary()
        self._failure: HorovodInternalError | None = None
        self._batches: deque[list[_Agreed]] = deque()

    @property
    def waits(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._live)

    def alone(self) -> bool:
        """Whether exactly one operation is in flight, and not agreed on yet."""
        return len(self._live) == 1 and not self._batches

    def accept(self, operations: Sequence[Operation], waits: bool = False) -> None:
        """Take operations that are about to be submitted; thread-safe.

        Args:
            waits: the caller waits for them, and does nothing else before.

        Raises:
            InvalidArgumentError: an operation of one of the names is in flight; none is taken.
            HorovodInternalError: the job has failed.
        """
        keys = [_key(operation) for operation in operations]
        with self._lock:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            for index, key in enumerate(keys):
                handle = self._handed_out.get(key)
                if key in self._live or key in keys[:index] or (handle is not None and not handle.seen):
                    raise InvalidArgumentError(self._in_flight(operations[index]))
            self._live.update(zip(keys, operations, strict=True))
            if not waits:
                self._handed_out.update({_key(o): o.handle for o in operations if not o.signature.once})
        for operation in operations:
            self._timeline.submitted(operation)

    def adopt(self, buffer: Buffer) -> None:
        """Keep a buffer that was allocated while this rank had joined, until all have."""
        self._adopted.append(buffer)

    def deliver(self, notices: Sequence[Notice]) -> None:
        """Take the verdicts of one frame."""
        batch = []
        for notice in notices:
            signature = notice.signature
            key = (signature.process_set, signature.name)
            if notice.error:
                with self._lock:
                    operation = self._live.pop(key)
                operation.handle.fail(self._error(notice))
                continue
            if self.rank in notice.absent:
                operation = OPERATIONS[signature.kind].stand_in(signature, self)
            else:
                operation = self._live[key]
            size = self.groups[key[0]].size
            each = len(notice.extras) // size
            extras = tuple(notice.extras[i * each : (i + 1) * each] for i in range(size))
            self._timeline.agreed(operation)
            batch.append(_Agreed(operation, Terms(extras, notice.absent)))
        if batch:
            self._batches.append(batch)

    def run(self) -> None:
        """Run what has been agreed on, in order.

        Raises:
            HorovodInternalError: the job has failed.
        """
        if not self._batches:
            return
        # Overflow is data here, as in the frameworks; kernels that care ask for the flag.
        with np.errstate(all="ignore"):
            while self._batches:
                self._run_batch(self._batches.popleft())
                self._timeline.flush()

    def run_at_once(self, operation: Operation) -> None:
        """Run the one operation in flight, which all ranks have agreed on; errors as `run`."""
        self._timeline.agreed(operation)
        terms = Terms(((),) * self.groups[operation.signature.process_set].size)
        with np.errstate(all="ignore"):
            self._run_together([_Agreed(operation, terms)])
        self._timeline.flush()

    def fail(self, error: HorovodInternalError) -> bool:
        """End everything in flight, and refuse everything to come; whether this is the first failure."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = error
            live, self._live = self._live, {}
            self._batches.clear()
        for operation in live.values():
            operation.handle.fail(error)
        return True

    def _run_batch(self, batch: list[_Agreed]) -> None:
        """Small operations that fit together run as one. Cut only by what all members see alike."""
        if len(batch) == 1:
            self._run_together(batch)
            return
        for (batch_key, _), run in groupby(batch, key=lambda a: (a.operation.batch_key, a.terms.absent)):
            agreed = list(run)
            if batch_key is not None and len(agreed) > 1 and self.transport.order_free:
                self._run_together(agreed)
            else:
                for one in agreed:
                    self._run_together([one])

    def _run_together(self, batch: Sequence[_Agreed]) -> None:
        operations = [agreed.operation for agreed in batch]
        first, terms = operations[0], batch[0].terms
        group = self.groups[first.signature.process_set]
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
        if operation.signature.kind is Kind.JOIN:
            self._adopted.clear()
        handle = operation.handle
        del operation.handle  # so that only its caller holds it, who may drop it
        return handle

    def _error(self, notice: Notice) -> HvdpError:
        if notice.gone >= 0:
            self._blame(notice.gone)
            return HorovodInternalError(notice.error, notice.gone)
        call = f"{notice.signature.kind.value} {notice.signature.name!r}"
        text = notice.error if call in notice.error else f"{notice.error} (in {call})"
        return (InvalidArgumentError if notice.invalid else MismatchError)(text)

    def _in_flight(self, operation: Operation) -> str:
        signature = operation.signature
        return (
            f"rank {self.rank} submitted {signature.kind.value} {signature.name!r} while one of that name is "
            "in flight: wait for its handle first, or give each tensor its own name."
        )


def _key(operation: Operation) -> _Key:
    return operation.signature.process_set, operation.signature.name
