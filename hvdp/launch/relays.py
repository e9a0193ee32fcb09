"""Ranks that an MPI's `mpiexec` starts for the launcher."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from hvdp.errors import LaunchError
from hvdp.launch import relay
from hvdp.launch.blame import LOST
from hvdp.launch.direct import last_status
from hvdp.launch.job import Job
from hvdp.launch.lines import LineBuffer

__all__ = ["Relays", "relayed"]

# Seconds for mpiexec to end by itself once its ranks have.
_LAST_WAIT = 2.0


# How a relay on another host marks its rank's lines.
_PREFIX = re.compile(rb"\[(\d+)\]<(stdout|stderr)>:")


def relayed(command: Sequence[str], job: str | None) -> list[str]:
    """The command as `mpiexec` is to start it, so that this launcher supervises it.

    Other hosts are taken to have Python and hvdp at the same paths as this one.
    """
    address = "" if job is None else _address(job)
    return [sys.executable, "-I", "-S", relay.__file__, address, *command]


def _address(job: str) -> str:
    return f"hvdp-launch-{job}"


class Relays:
    """Starts one `mpiexec`; hears from each rank's relay directly or, on several hosts, through it.

    Args:
        mpiexec: the whole command line.
        environment: of `mpiexec`, and through it of the ranks.
        job: the job's mark, or None on several hosts.
    """

    def __init__(
        self, size: int, mpiexec: Sequence[str], environment: Mapping[str, str], job: str | None
    ) -> None:
        self._size = size
        self._command = mpiexec
        self._environment = environment
        self._name = job
        self._connections: dict[socket.socket, int | None] = {}
        self._ended: set[int] = set()
        self._streams: list[Callable[[], bool]] = []
        self._lost = False
        self._job: Job
        self._process: subprocess.Popen[bytes]

    def start(self, job: Job) -> None:
        """Raises: LaunchError if `mpiexec` does not run."""
        self._job = job
        if self._name is not None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind("\0" + _address(self._name))
            self._listener.listen(self._size)
            job.loop.watch(self._listener.fileno(), self._on_connection)
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {self._command[0]!r}: {error.strerror}") from error
        job.belongs(self._process.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._pass_on(self._process.stdout.fileno(), 1)
        self._pass_on(self._process.stderr.fileno(), 2)

    def _pass_on(self, source: int, fd: int) -> None:
        """What `mpiexec` prints, which on several hosts includes what the ranks print."""
        os.set_blocking(source, False)
        buffer = LineBuffer()
        watched = True

        def read() -> bool:
            nonlocal watched
            try:
                data = os.read(source, 1 << 16)
            except BlockingIOError:
                return False
            for line in buffer.feed(data) if data else buffer.close():
                self._take(fd, line)
            if not data and watched:
                self._job.loop.forget(source)
                watched = False
            return bool(data)

        self._job.loop.watch(source, read)
        self._streams.append(read)

    def _take(self, fd: int, line: bytes) -> None:
        ranks = self._job.output.ranks
        if self._name is None and line.startswith(relay.ENDED):
            rank, status = map(int, line[len(relay.ENDED) :].split())
            self._end(rank, status)
        elif self._name is None and (match := _PREFIX.match(line)) is not None and int(match[1]) < len(ranks):
            ranks[int(match[1])].take_line(1 if match[2] == b"stdout" else 2, line[match.end() :])
        else:
            self._job.output.emit(b"", fd, [line])

    def _end(self, rank: int, status: int) -> None:
        if rank not in self._ended:
            self._ended.add(rank)
            self._lost = self._lost or status == LOST
            self._job.ended(rank, status)

    def _on_connection(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            return
        self._connections[connection] = None
        self._job.loop.watch(connection.fileno(), lambda: self._on_message(connection))

    def _on_message(self, connection: socket.socket) -> None:
        rank = self._connections[connection]
        try:
            words = connection.recv(64).split()
        except OSError:
            words = []
        if words[:1] == [b"start"]:
            rank = self._connections[connection] = int(words[1])
            stdout, stdout_w = os.pipe()
            stderr, stderr_w = os.pipe()
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [b"."], [stdout_w, stderr_w, self._job.supervisor_pipe])
            os.close(stdout_w)
            os.close(stderr_w)
            self._job.started(rank, int(words[2]), stdout, stderr)
            return
        if not words:
            self._job.loop.forget(connection.fileno())
        if rank is not None:
            self._end(rank, int(words[1]) if words else LOST)

    def on_child(self) -> None:
        """If `mpiexec` has ended, so have its ranks."""
        status = last_status(self._process.pid)
        if status is None:
            return
        self._drain()
        if len(self._ended) < self._size:
            self._lost = True
            self._job.abandon()

    def finish(self) -> int:
        """Let the relays go and see `mpiexec` off; returns its status."""
        for connection in self._connections:
            connection.close()
        if self._name is not None:
            self._listener.close()
        handle = os.pidfd_open(self._process.pid)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(_LAST_WAIT * 1000):
            self._process.kill()
        os.close(handle)
        status = self._process.wait()
        if self._lost or not self._connections:
            self._drain()
        return status

    def _drain(self) -> None:
        for read in self._streams:
            for _ in range(32):
                if not read():
                    break
