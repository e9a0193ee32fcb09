"""Ranks that an MPI's `mpiexec` starts for the launcher."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdp.errors import LaunchError
from hvdp.launch import relay
from hvdp.launch.blame import LOST
from hvdp.launch.direct import last_status
from hvdp.launch.job import Job
from hvdp.launch.lines import LineBuffer

__all__ = ["Relays", "relayed"]

# Seconds for mpiexec to end by itself once its ranks have.
_LAST_WAIT = 2.0


def relayed(command: Sequence[str], job: str) -> list[str]:
    """The command as `mpiexec` is to start it on this host, so that this launcher supervises it."""
    return [sys.executable, "-I", "-S", relay.__file__, _address(job), *command]


def _address(job: str) -> str:
    return f"hvdp-launch-{job}"


@dataclass
class _Connection:
    rank: int | None = None
    ended: bool = False


class Relays:
    """Starts one `mpiexec`; hears from each rank's relay, or, on several hosts, only from `mpiexec`.

    Args:
        mpiexec: the whole command line.
        environment: of `mpiexec`, and through it of the ranks.
        job: the job's mark, or None where the ranks have no relays.
    """

    def __init__(
        self, size: int, mpiexec: Sequence[str], environment: Mapping[str, str], job: str | None
    ) -> None:
        self._size = size
        self._command = mpiexec
        self._environment = environment
        self._name = job
        self._connections: dict[socket.socket, _Connection] = {}
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
        """What `mpiexec` itself prints, which on several hosts is what the ranks print."""
        os.set_blocking(source, False)
        buffer = LineBuffer()
        watched = True

        def read() -> bool:
            nonlocal watched
            try:
                data = os.read(source, 1 << 16)
            except BlockingIOError:
                return False
            self._job.output.emit(b"", fd, buffer.feed(data) if data else buffer.close())
            if not data and watched:
                self._job.loop.forget(source)
                watched = False
            return bool(data)

        self._job.loop.watch(source, read)
        self._streams.append(read)

    def _on_connection(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            return
        self._connections[connection] = _Connection()
        self._job.loop.watch(connection.fileno(), lambda: self._on_message(connection))

    def _on_message(self, connection: socket.socket) -> None:
        state = self._connections[connection]
        try:
            words = connection.recv(64).split()
        except OSError:
            words = []
        if words[:1] == [b"start"]:
            state.rank = int(words[1])
            stdout, stdout_w = os.pipe()
            stderr, stderr_w = os.pipe()
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [b"."], [stdout_w, stderr_w, self._job.supervisor_pipe])
            os.close(stdout_w)
            os.close(stderr_w)
            self._job.started(state.rank, int(words[2]), stdout, stderr)
            return
        if not words:
            self._job.loop.forget(connection.fileno())
        if state.rank is not None and not state.ended:
            state.ended = True
            self._lost = self._lost or not words
            self._job.ended(state.rank, int(words[1]) if words else LOST)

    def on_child(self) -> None:
        """If `mpiexec` has ended, so have its ranks."""
        status = last_status(self._process.pid)
        if status is None:
            return
        if self._name is None and status == 0:
            self._drain()
            for rank in range(self._size):
                self._job.ended(rank, 0)
        else:
            self._lost = self._lost or not all(c.ended for c in self._connections.values())
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
