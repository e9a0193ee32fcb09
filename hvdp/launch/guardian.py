"""The process that ends a job whose launcher was killed, and the function that ends a job's leftovers.

Runs as a script with nothing but the standard library, so that it starts fast and stays small. It
sleeps in a read until the launcher says goodbye or vanishes. A process belongs to the job if its
environment carries the job's mark or its process group was named by the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection

__all__ = ["MARK", "Guardian", "adopt_orphans", "reap_orphans", "remove_files", "sweep"]

MARK = "HVDP_JOB"
"""The variable that marks every process of a job."""

_GOODBYE = b"goodbye\n"
# MPICH's, Open MPI's of today and yesterday, and what MPICH's hydra tells its ranks of the host.
_LEFT_BY_MPI = (
    "/dev/shm/mpich_shm_*",
    "/dev/shm/sm_segment.*",
    "/dev/shm/vader_segment.*",
    "/tmp/hydra_hwloc_xmlfile_*",
)
_BEFORE_RANKS = 0.5  # seconds
_PR_SET_CHILD_SUBREAPER = 36


class Guardian:
    """The launcher's side. Start it before any rank."""

    def __init__(self, job: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, job],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, group: int) -> None:
        """Name a process group that ends with the job."""
        self._tell(b"%d\n" % group)

    def dismiss(self) -> None:
        """The job has ended in order."""
        self._tell(_GOODBYE)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, message: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(message)


def sweep(job: str | None, groups: Collection[int], patience: float) -> None:
    """End what is left of a job: SIGTERM, `patience` seconds, SIGKILL, until nothing is found.

    Args:
        job: also end processes outside the groups that carry this job's mark.
        groups: process groups; none of them may be the caller's.
        patience: seconds between the two signals.
    """
    number = signal.SIGTERM if patience > 0 else signal.SIGKILL
    deadline = time.monotonic() + patience
    # A process may fork between our look and our signal, so look again; but never for ever.
    for _ in range(20):
        handles = _open(_members(job, groups))
        if not handles:
            return
        for handle in handles:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(handle, number)
        _wait(handles, deadline if number == signal.SIGTERM else time.monotonic() + 1.0)
        number = signal.SIGKILL


def remove_files(since: float) -> None:
    """Unlink what an MPI leaves in /dev/shm and /tmp when its processes are killed.

    Args:
        since: time of day; only files made later are taken, of which no living process maps any or
            has one named in its environment, as MPICH's ranks have their description of the host.
    """
    left, young = set(), set()
    for path in (path for pattern in _LEFT_BY_MPI for path in glob.glob(pattern)):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if status.st_uid == os.getuid() and status.st_mtime >= since:
                left.add(path)
                if path.startswith("/tmp/") and time.time() - status.st_mtime < _BEFORE_RANKS:
                    young.add(path)
    for process in glob.glob("/proc/[0-9]*") if left else ():
        for table in ("maps", "environ", "comm"):
            with contextlib.suppress(OSError), open(f"{process}/{table}", "rb") as file:
                text = file.read()
                left = {path for path in left if path.encode() not in text}
                if table == "comm" and text.startswith(b"hydra_pmi_proxy"):
                    # It may have made one for ranks that it has not started yet.
                    left -= young
    for path in left:
        with contextlib.suppress(OSError):
            os.unlink(path)


def adopt_orphans() -> None:
    """Let processes whose parents in the job have ended become this process's children.

    Else they fall to the system's first process, which in a container may never reap them.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans() -> None:
    """Reap every child of this process that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _members(job: str | None, groups: Collection[int]) -> list[int]:
    mark = None if job is None else f"{MARK}={job}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command name, in parentheses, may itself hold spaces and parentheses.
                state, _, group = file.read().rpartition(b")")[2].split()[:3]
            if state in (b"Z", b"X"):
                continue
            if int(group) in groups:
                found.append(int(name))
            elif mark is not None:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        found.append(int(name))
    return found


def _open(pids: list[int]) -> list[int]:
    handles = []
    for pid in pids:
        with contextlib.suppress(OSError):
            handles.append(os.pidfd_open(pid))
    return handles


def _wait(handles: list[int], deadline: float) -> None:
    """Until all have ended or time is up; closes the handles."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    left = len(handles)
    while left and (seconds := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(seconds * 1000):
            poll.unregister(handle)
            left -= 1
    for handle in handles:
        os.close(handle)


def main() -> None:
    """Watch over one job; the launcher's words come on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    began = time.time()
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        if line == _GOODBYE:
            return
        groups.add(int(line))
    sweep(sys.argv[1], groups, patience=1.5)
    remove_files(began)


if __name__ == "__main__":
    main()
