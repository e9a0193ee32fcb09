"""Running a command to its end, with a deadline that leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Completed", "await_end", "run_script"]

# Seconds in which a launcher must have ended its ranks after SIGTERM.
_LAUNCHER_ENDS = 8.0


@dataclass(frozen=True)
class Completed:
    """A command that has ended.

    Attributes:
        status: exit status, negative for a signal.
        seconds: how long it ran.
        timed_out: whether it had to be stopped.
    """

    status: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False


def run_script(
    args: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 60.0,
) -> Completed:
    """Run a command and collect what it prints.

    Args:
        env: variables on top of this process's own.
        timeout: seconds after which it is stopped, SIGTERM first so that a launcher ends its ranks.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        [str(arg) for arg in args],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stdout, stderr, timed_out = await_end(process, timeout)
    except BaseException:
        await_end(process, 0)
        raise
    return Completed(
        process.returncode,
        stdout.decode(errors="replace"),
        stderr.decode(errors="replace"),
        time.monotonic() - began,
        timed_out,
    )


def await_end(process: subprocess.Popen[bytes], timeout: float) -> tuple[bytes, bytes, bool]:
    """What a session's first process has left in its pipes, and whether it had to be stopped.

    Args:
        timeout: seconds after which it is stopped.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        return *process.communicate(timeout=max(0.0, timeout)), False
    process.terminate()
    try:
        return *process.communicate(timeout=_LAUNCHER_ENDS), True
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return *process.communicate(), True
