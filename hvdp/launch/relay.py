"""Stands between `mpiexec` and one rank on the launcher's host.

Runs as a script with nothing but the standard library: `relay.py SOCKET COMMAND...`. It fetches
pipes for the rank's output from the launcher, so that lines keep their prefix and never tear,
starts the command, reports how it ended, and stays until the launcher has let the other ranks
end too: an MPI kills all ranks as soon as one of its children fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

__all__ = ["RANK_VARIABLES", "main"]

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def main(address: str, command: list[str]) -> int:
    """Run one rank; returns zero once the launcher agrees, for it knows the rank's own status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    rank = next(os.environ[name] for name in RANK_VARIABLES if name in os.environ)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as launcher:
        launcher.connect("\0" + address)
        launcher.send(b"start %d %d" % (int(rank), os.getpid()))
        _, (stdout, stderr, supervisor), _, _ = socket.recv_fds(launcher, 1, 3)
        os.set_inheritable(supervisor, True)
        os.environ["HVDP_SUPERVISOR_FD"] = str(supervisor)
        os.environ["HVDP_SUPERVISOR_INODE"] = str(os.fstat(supervisor).st_ino)
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                close_fds=False,
                preexec_fn=_defaults,
            )
        except OSError as error:
            os.write(stderr, f"{command[0]}: {error.strerror}\n".encode())
            status = 126
        else:
            for fd in (stdout, stderr, supervisor):
                os.close(fd)
            status = child.wait()
        with contextlib.suppress(OSError):
            launcher.send(b"ended %d" % status)
            launcher.recv(1)
    return 0


def _defaults() -> None:
    """In the rank: take signals as any program does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
