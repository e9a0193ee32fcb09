"""What happened when, as Chrome trace events (chrome://tracing, Perfetto).

Format: "Trace Event Format", Google, the JSON array form.
One process lane a rank, in it one thread lane a process set. Each operation is two slices:
from submission to agreement, and from there to its end.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hvdp._core.operation import Operation

__all__ = ["Timeline", "TraceFile"]

_log = logging.getLogger(__name__)

_END = b"\n]\n"
Record = list[Any]
"""[process set, kind, name, bytes, submitted, agreed, ended], times in nanoseconds since the epoch."""


class Timeline:
    """One rank's part: every rank records and sends to rank 0, which writes.

    Args:
        send: to rank 0, or from there to all.
    """

    def __init__(self, rank: int, send: Callable[[Any], None]) -> None:
        self._rank = rank
        self._send = send
        self._on = False
        self._records: list[Record] = []
        self._file: TraceFile | None = None
        self._wanted: TraceFile | None = None

    def want(self, file: TraceFile | None) -> None:
        """On rank 0, from any thread: write to this file from the next `turn` on, or to none."""
        wanted, self._wanted = self._wanted, file
        if wanted is not None and wanted is not self._file:
            wanted.close()

    def turn(self) -> None:
        if self._wanted is not self._file:
            if self._file is not None:
                self._file.close()
            self._file = self._wanted
            self._on = self._file is not None
            self._send(self._on)

    def submitted(self, operation: Operation) -> None:
        if self._on:
            operation.times = [time.time_ns()]

    def agreed(self, operation: Operation) -> None:
        if self._on:
            operation.times.append(time.time_ns())

    def ended(self, operation: Operation) -> None:
        # Operations that were in flight when recording began have too few times.
        if self._on and len(operation.times) == 2:
            signature = operation.signature
            what = [signature.process_set, signature.kind.value, signature.name, operation.nbytes]
            self._records.append([*what, *operation.times, time.time_ns()])

    def flush(self) -> None:
        """Pass on what a round has recorded."""
        if not self._on:
            return
        records, self._records = self._records, []
        if self._file is not None:
            self._write(self._rank, records)
        else:
            self._send(records)

    def heard(self, peer: int, message: Any) -> None:
        """What another rank's Timeline sent."""
        if isinstance(message, bool):
            self._on = message
        else:
            self._write(peer, message)

    def close(self) -> None:
        """For good."""
        self.want(None)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, rank: int, records: Iterable[Record]) -> None:
        """A disk that is full ends the timeline, not the training."""
        if self._file is None:
            return
        try:
            if rank == self._rank:
                self._file.mark_round()
            self._file.write(rank, records)
        except OSError as error:
            _log.warning("the timeline ends here: it cannot be written any more (%s)", error)
            self._wanted = None
            self.turn()


class TraceFile:
    """A JSON file that is complete after every write, whatever happens next.

    Args:
        mark_rounds: also mark when rank 0 ran a batch of operations.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, mark_rounds: bool) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._mark_rounds = mark_rounds
        self._start = time.time_ns()
        self._lanes: set[tuple[int, int]] = set()
        self._end = os.write(self._fd, b"[")
        os.write(self._fd, _END)

    def write(self, rank: int, records: Iterable[Record]) -> None:
        self._append(event for record in records for event in self._events(rank, record))

    def mark_round(self) -> None:
        if self._mark_rounds:
            now = self._microseconds(time.time_ns())
            self._append([{"ph": "i", "name": "round", "pid": 0, "tid": 0, "ts": now, "s": "p"}])

    def close(self) -> None:
        os.close(self._fd)

    def _events(self, rank: int, record: Record) -> Iterator[dict[str, Any]]:
        process_set, kind, name, nbytes, submitted, agreed, ended = record
        if (rank, process_set) not in self._lanes:
            self._lanes.add((rank, process_set))
            lane = {"pid": rank, "tid": process_set, "ph": "M"}
            yield {**lane, "name": "process_name", "args": {"name": f"rank {rank}"}}
            yield {**lane, "name": "thread_name", "args": {"name": f"process set {process_set}"}}
        for phase, start, stop in (("agree", submitted, agreed), (kind, agreed, ended)):
            yield {
                "ph": "X",
                "name": name,
                "cat": phase,
                "pid": rank,
                "tid": process_set,
                "ts": self._microseconds(start),
                "dur": (stop - start) / 1000,
                "args": {"phase": phase, "bytes": nbytes},
            }

    def _microseconds(self, nanoseconds: int) -> float:
        return (nanoseconds - self._start) / 1000

    def _append(self, events: Iterable[dict[str, Any]]) -> None:
        """One write over the end of the array, so that a kill finds the old end or the new one."""
        text = ",".join(f"\n{json.dumps(event)}" for event in events).encode()
        if text:
            body = text if self._end == 1 else b"," + text
            if os.pwrite(self._fd, body + _END, self._end) < len(body + _END):
                os.ftruncate(self._fd, self._end)
                os.pwrite(self._fd, _END, self._end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end += len(body)
