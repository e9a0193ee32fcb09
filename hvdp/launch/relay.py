"""Stands between `mpiexec` and one rank.

Runs as a script with nothing but the standard library: `relay.py SOCKET COMMAND...`. On the
launcher's host it fetches pipes for the rank's output from the launcher, so that lines keep their
prefix and never tear, starts the command and reports how it ended. On other hosts, where SOCKET
is empty, it prints whole lines with their prefix and then a line that says how the rank ended.
Either way it stays until the other ranks have had time to end too: an MPI kills all ranks as soon
as one of its children fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

__all__ = ["ENDED", "main"]

ENDED = b"\0hvdp ended "
"""What the line begins with that says, on stderr, which rank has ended and how."""

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CANNOT_RUN = 126
_LONGEST = 1 << 20
# Seconds for the other ranks of a failed job on several hosts.
_GRACE = 4.0


def main(address: str, command: list[str]) -> int:
    """Run one rank; returns zero, for the launcher knows the rank's own status."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    rank = int(next(os.environ[name] for name in _RANK_VARIABLES if name in os.environ))
    if not address:
        _far(rank, command)
        return 0
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as launcher:
        launcher.connect("\0" + address)
        launcher.send(b"start %d %d" % (rank, os.getpid()))
        _, (stdout, stderr, supervisor), _, _ = socket.recv_fds(launcher, 1, 3)
        os.set_inheritable(supervisor, True)
        os.environ["HVDP_SUPERVISOR_FD"] = str(supervisor)
        os.environ["HVDP_SUPERVISOR_INODE"] = str(os.fstat(supervisor).st_ino)
        child = _start(command, stdout, stderr)
        for fd in (stdout, stderr, supervisor):
            os.close(fd)
        status = _CANNOT_RUN if child is None else child.wait()
        with contextlib.suppress(OSError):
            launcher.send(b"ended %d" % status)
            launcher.recv(1)
    return 0


def _far(rank: int, command: list[str]) -> None:
    """Run a rank whose launcher can be reached through `mpiexec` only."""
    out, out_w = os.pipe()
    err, err_w = os.pipe()
    child = _start(command, out_w, err_w)
    os.close(out_w)
    os.close(err_w)
    if child is not None:
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: child.send_signal(number))
    threads = [
        threading.Thread(target=_prefix, args=(source, fd, b"[%d]<%s>:" % (rank, name)), daemon=True)
        for source, fd, name in ((out, 1, b"stdout"), (err, 2, b"stderr"))
    ]
    for thread in threads:
        thread.start()
    status = _CANNOT_RUN if child is None else child.wait()
    for thread in threads:
        # A grandchild may keep the pipes open; the rank's own words are in them already.
        thread.join(timeout=1.0)
    _write(2, ENDED + b"%d %d\n" % (rank, status))
    if status != 0:
        time.sleep(_GRACE)


def _prefix(source: int, fd: int, prefix: bytes) -> None:
    rest = b""
    while data := os.read(source, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        for line in lines:
            _write(fd, prefix + line + b"\n")
    if rest:
        _write(fd, prefix + rest + b"\n")


def _write(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def _start(command: list[str], stdout: int, stderr: int) -> subprocess.Popen[bytes] | None:
    """Start the command; descriptors that the MPI handed to us go on to it."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            close_fds=False,
            preexec_fn=_defaults,
        )
    except OSError as error:
        _write(stderr, f"{command[0]}: {error.strerror}\n".encode())
        return None


def _defaults() -> None:
    """In the rank: take signals as any program does."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
