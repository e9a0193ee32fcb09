"""Ranks as the launcher's own children."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence

from hvdp.errors import LaunchError
from hvdp.launch.job import Job

__all__ = ["Children", "last_status"]


class Children:
    """Starts every rank in a session of its own, so that its children end with it.

    Args:
        command: program and arguments.
        environment: makes the environment of one rank from its number and the supervisor's pipe.
    """

    def __init__(
        self, size: int, command: Sequence[str], environment: Callable[[int, int], Mapping[str, str]]
    ) -> None:
        self._size = size
        self._command = command
        self._environment = environment
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: list[subprocess.Popen[bytes]] = []
        self._job: Job

    def start(self, job: Job) -> None:
        """Raises: LaunchError if the system refuses to start one."""
        self._job = job
        for rank in range(self._size):
            try:
                process = subprocess.Popen(
                    self._command,
                    env=self._environment(rank, job.supervisor_pipe),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=(job.supervisor_pipe,),
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"cannot start {self._command[0]!r}: {error.strerror}") from error
            assert process.stdout is not None
            assert process.stderr is not None
            self._running[rank] = process
            job.started(rank, process.pid, os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno()))
            process.stdout.close()
            process.stderr.close()

    def on_child(self) -> None:
        """See which ranks have ended. They stay unreaped, which keeps their process groups ours."""
        for rank, process in list(self._running.items()):
            status = last_status(process.pid)
            if status is not None:
                self._ended.append(self._running.pop(rank))
                self._job.ended(rank, status)

    def finish(self) -> None:
        """Reap."""
        for process in self._ended:
            process.wait()


def last_status(pid: int) -> int | None:
    """A child's status in `subprocess` notation if it has ended, without reaping it."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
