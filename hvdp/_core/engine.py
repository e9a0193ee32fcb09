"""The engine: one background thread a process that agrees on and runs the collectives.

Callers submit operations from any thread. The thread tells the coordinator on rank 0 (over
a socket, or directly on rank 0), sleeps until a verdict comes, and runs the agreed
operations in the verdicts' order, which is the same on all members. See docs/architecture.md
for the messages.
"""

from __future__ import annotations

import logging
import os
import selectors
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from hvdp._core.coordinator import Coordinator, Verdict
from hvdp._core.handles import Handle
from hvdp._core.operation import Operation
from hvdp._core.ops import Signature
from hvdp._core.process_sets import Group
from hvdp._core.rendezvous import Meeting
from hvdp._core.wire import decode, encode
from hvdp.errors import HorovodInternalError, HvdpError, InvalidArgumentError, MismatchError
from hvdp.transports.base import Transport

__all__ = ["Engine"]

_log = logging.getLogger(__name__)
_COUNT = struct.Struct("<IH")
_Key = tuple[int, str]


@dataclass(frozen=True)
class _Agreed:
    """One verdict as a member carries it out."""

    operation: Operation
    extras: Sequence[tuple[int, ...]]


class Engine:
    """Created by `init` on every rank.

    Args:
        blame: called once, with a rank and a text, when this process learns who failed first.
    """

    def __init__(
        self,
        meeting: Meeting,
        transport: Transport,
        cache_capacity: int,
        blame: Callable[[int, str], None],
    ) -> None:
        self.topology = meeting.topology
        self.rank = self.topology.rank
        self.transport = transport
        transport.pause = self._pause
        self._blame = blame
        self._links = dict(meeting.links)
        self._coordinator = Coordinator(self.topology.size, cache_capacity) if self.rank == 0 else None
        self._groups = {0: Group(0, tuple(range(self.topology.size)), self.rank)}
        self._numbers: dict[Signature, int] = {}
        self._signatures: dict[int, Signature] = {}
        self._lock = threading.Lock()
        self._submitted: deque[Operation] = deque()
        self._live: dict[_Key, Operation] = {}
        self._verdicts: list[Verdict] = []
        self._agreed: deque[list[_Agreed]] = deque()
        self._unnamed: dict[tuple[str, int], int] = {}
        self._failure: HorovodInternalError | None = None
        self._leaving = ""
        self._orphaned = ""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        for rank, link in self._links.items():
            self._selector.register(link, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="hvdp-engine", daemon=True)
        self._thread.start()

    # Called from any thread ---------------------------------------------------------------

    def group(self, number: int) -> Group:
        return self._groups[number]

    def unnamed(self, kind: str, process_set: int) -> str:
        """A name for a call without one: the same on all ranks that make the same calls."""
        with self._lock:
            count = self._unnamed.get((kind, process_set), 0)
            self._unnamed[kind, process_set] = count + 1
        return f"{kind}.noname.{count}"

    def submit(self, operation: Operation) -> Handle:
        """Hand an operation over; its handle completes when all members have done the same.

        Raises:
            InvalidArgumentError: an operation of this name is in flight.
            HorovodInternalError: the job has failed.
        """
        key = (operation.signature.process_set, operation.signature.name)
        with self._lock:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if key in self._live:
                raise InvalidArgumentError(
                    f"rank {self.rank} submitted {operation.signature.kind.value} {key[1]!r} while one "
                    "of that name is in flight: wait for its handle first, or give each tensor its own name."
                )
            self._live[key] = operation
            self._submitted.append(operation)
            self._wake()
        return operation.handle

    def close(self, reason: str) -> None:
        """Leave the job: peers that still wait for this rank are told `reason`; idempotent."""
        with self._lock:
            self._leaving = self._leaving or reason
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: close the descriptors without a word to the peers."""
        for link in self._links.values():
            link.sock.close()
        self._selector.close()
        self.transport.abandon()

    def _wake(self) -> None:
        """Under the lock, so that the descriptor is not closed, and its number reused, meanwhile."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # The engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        # Overflow is data here, as in the frameworks; kernels that care ask for the flag.
        np.seterr(all="ignore")
        try:
            while not self._leaving:
                self._pump(None)
                while self._agreed:
                    self._execute(self._agreed.popleft())
                if self._orphaned:
                    raise HorovodInternalError(self._orphaned, 0 if self._live else None)
            self._say_goodbye()
        except HorovodInternalError as error:
            self._break(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, peers must not wait for us
            _log.exception("the engine of rank %d failed", self.rank)
            self._break(HorovodInternalError(f"the engine of rank {self.rank} failed: {error!r}", self.rank))
        finally:
            self._break(HorovodInternalError(f"rank {self.rank} has shut down hvdp"))
            self._selector.close()
            for link in self._links.values():
                link.close()
            self.transport.close()
            with self._lock:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _pause(self, seconds: float) -> None:
        """For a transport that waits for a peer: hear the control plane meanwhile."""
        self._pump(seconds)

    def _pump(self, timeout: float | None) -> None:
        """Wait for events and pass on what came; never runs an operation."""
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                os.eventfd_read(self._wake_fd)
            elif key.data in self._links:
                self._hear(key.data)
        self._pass_on_submitted()
        self._announce()
        for rank, link in list(self._links.items()):
            self._send(rank)
            if rank not in self._links:
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.backlog else 0)
            if self._selector.get_key(link).events != events:
                self._selector.modify(link, events, rank)

    def _hear(self, peer: int) -> None:
        try:
            frames = self._links[peer].receive()
        except ConnectionError:
            # Closed without a goodbye.
            self._drop(peer)
            text = f"rank {peer} died: its process ended without leaving the job"
            raise HorovodInternalError(text, peer) from None
        for frame in frames:
            self._handle_frame(peer, frame)

    def _drop(self, peer: int) -> None:
        link = self._links.pop(peer)
        self._selector.unregister(link)
        link.close()

    def _send(self, peer: int, payload: bytes | None = None) -> None:
        """Send a frame, or what is left of earlier ones."""
        link = self._links.get(peer)
        if link is None:
            return
        try:
            if payload is None:
                link.flush()
            else:
                link.send(payload)
        except ConnectionError:
            # What the peer said last is still to be read, and tells why.
            self._hear(peer)

    def _pass_on_submitted(self) -> None:
        known = bytearray()
        while self._submitted:
            operation = self._submitted.popleft()
            if self._coordinator is not None:
                self._tell(
                    self._coordinator.submit(0, operation.signature, operation.extras, operation.error)
                )
                continue
            number = self._numbers.get(operation.signature, -1)
            if number < 0 or operation.error:
                self._send_known(known)
                message = [operation.signature.to_json(), operation.extras, operation.error]
                self._send(0, encode(b"S", message))
            else:
                known += _pack(number, operation.extras)
        self._send_known(known)

    def _send_known(self, known: bytearray) -> None:
        if known:
            self._send(0, b"s" + known)
            known.clear()

    # Messages -----------------------------------------------------------------------------

    def _handle_frame(self, peer: int, frame: bytes) -> None:
        tag = frame[:1]
        if tag == b"v":
            self._take_known(frame)
        elif tag == b"s":
            assert self._coordinator is not None
            for number, extras in _unpack(frame):
                self._tell(self._coordinator.submit(peer, self._coordinator.signature(number), extras))
        elif tag == b"S":
            assert self._coordinator is not None
            signature, extras, error = decode(frame)
            verdict = self._coordinator.submit(peer, Signature.from_json(signature), tuple(extras), error)
            self._tell(verdict)
        elif tag == b"V":
            self._take_verdicts(decode(frame))
        elif tag == b"G":
            self._departed(peer, decode(frame))
        elif tag == b"A":
            rank, text = decode(frame)
            raise HorovodInternalError(text, rank)

    def _tell(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            self._verdicts.append(verdict)

    def _announce(self) -> None:
        """Rank 0: pass the new verdicts on, in their order.

        Verdicts of one frame may be run as one batch, so a frame is the same on all members.
        """
        verdicts, self._verdicts = self._verdicts, []
        for members, run in groupby(verdicts, key=lambda verdict: verdict.members):
            payload = _verdict_frame(list(run))
            for member in members:
                if member != 0:
                    self._send(member, payload)
            if 0 in members:
                self._handle_frame(0, payload)

    def _take_known(self, frame: bytes) -> None:
        batch = []
        for number, extras in _unpack(frame):
            signature = self._signatures[number]
            batch.append(self._agree((signature.process_set, signature.name), extras))
        self._agreed.append(batch)

    def _take_verdicts(self, verdicts: list[dict[str, Any]]) -> None:
        batch = []
        for verdict in verdicts:
            set_number, name = verdict["key"]
            key = (set_number, name)
            if verdict["error"]:
                self._forget(key).handle.fail(self._error(verdict))
                continue
            number = verdict["number"]
            if number >= 0:
                signature = self._live[key].signature
                self._numbers[signature] = number
                self._signatures[number] = signature
            batch.append(self._agree(key, tuple(verdict["extras"])))
        self._agreed.append(batch)

    def _error(self, verdict: dict[str, Any]) -> HvdpError:
        text, gone = verdict["error"], verdict["gone"]
        if gone >= 0:
            self._blame(gone, text)
            return HorovodInternalError(text, gone)
        return InvalidArgumentError(text) if verdict["invalid"] else MismatchError(text)

    def _agree(self, key: _Key, extras: tuple[int, ...]) -> _Agreed:
        operation = self._live[key]
        size = self._groups[key[0]].size
        each = len(extras) // size
        by_member = [extras[i * each : (i + 1) * each] for i in range(size)]
        return _Agreed(operation, by_member)

    def _departed(self, peer: int, reason: str) -> None:
        self._drop(peer)
        if self._coordinator is None:
            # What has been agreed on needs nothing more of rank 0, and may still run here.
            self._orphaned = f"rank {peer} {reason}"
            return
        for verdict in self._coordinator.leave(peer, reason):
            self._tell(verdict)

    def _forget(self, key: _Key) -> Operation:
        with self._lock:
            return self._live.pop(key)

    # Running ------------------------------------------------------------------------------

    def _execute(self, batch: list[_Agreed]) -> None:
        """Run what one frame agreed on, neighbours that fit together as one."""
        for batch_key, run in groupby(batch, key=lambda agreed: agreed.operation.batch_key):
            agreed = list(run)
            if batch_key is not None and len(agreed) > 1 and self.transport.order_free:
                self._execute_together(agreed)
            else:
                for one in agreed:
                    self._execute_together([one])

    def _execute_together(self, batch: list[_Agreed]) -> None:
        operations = [agreed.operation for agreed in batch]
        first = operations[0]
        group = self._groups[first.signature.process_set]
        try:
            if len(batch) == 1:
                results = [first.execute(self.transport, group, batch[0].extras)]
            else:
                results = first.execute_batch(operations, self.transport, group)
        except HorovodInternalError:
            raise
        except HvdpError as error:
            # Transports raise these on all members alike, so the engine goes on.
            for operation in operations:
                self._forget(_key(operation)).handle.fail(error)
            return
        except Exception as error:
            names = ", ".join(operation.signature.name for operation in operations)
            raise HorovodInternalError(f"rank {self.rank} failed in {names}: {error!r}", self.rank) from error
        for operation, result in zip(operations, results, strict=True):
            self._forget(_key(operation)).handle.complete(result)

    # Ends ---------------------------------------------------------------------------------

    def _say_goodbye(self) -> None:
        for peer in list(self._links):
            self._last_word(peer, encode(b"G", self._leaving))

    def _break(self, error: HorovodInternalError) -> None:
        """Fail everything in flight, and everybody else; only the first call does."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            live, self._live = self._live, {}
            self._submitted.clear()
            self._agreed.clear()
        if not self._leaving and error.rank is not None:
            self._blame(error.rank, str(error))
            for peer in list(self._links):
                self._last_word(peer, encode(b"A", [error.rank, str(error)]))
        for operation in live.values():
            operation.handle.fail(error)

    def _last_word(self, peer: int, payload: bytes) -> None:
        try:
            self._links[peer].send(payload)
        except ConnectionError:
            _log.debug("rank %d has closed already", peer)


def _key(operation: Operation) -> _Key:
    return operation.signature.process_set, operation.signature.name


def _verdict_frame(verdicts: list[Verdict]) -> bytes:
    if all(verdict.number >= 0 and not verdict.new for verdict in verdicts):
        return b"v" + b"".join(_pack(verdict.number, verdict.flat_extras) for verdict in verdicts)
    bodies = [
        {
            "key": [verdict.signature.process_set, verdict.signature.name],
            "number": verdict.number,
            "extras": verdict.flat_extras,
            "error": verdict.error,
            "gone": verdict.gone,
            "invalid": verdict.invalid,
        }
        for verdict in verdicts
    ]
    return encode(b"V", bodies)


def _pack(number: int, extras: Sequence[int]) -> bytes:
    return _COUNT.pack(number, len(extras)) + struct.pack(f"<{len(extras)}q", *extras)


def _unpack(frame: bytes) -> list[tuple[int, tuple[int, ...]]]:
    """What `_pack` wrote, many times over, behind the frame's tag byte."""
    entries = []
    at = 1
    while at < len(frame):
        number, count = _COUNT.unpack_from(frame, at)
        at += _COUNT.size
        entries.append((number, struct.unpack_from(f"<{count}q", frame, at)))
        at += 8 * count
    return entries
