"""Ranks that start fast, and ranks that stay.

Starting torch takes a process seconds, longer than most tests take. So one zygote has it imported
for all ranks of this process's jobs. Without MPI the launcher starts ranks once and for all: for
every call each of them forks, and the children are a job's ranks to each other.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from hvdp.testing import zygote
from hvdp.testing.scripts import Completed, await_end

__all__ = ["WarmRanks", "fast_worker", "warm_processes", "warm_ranks"]

_PRELOADED = ("hvdp.torch", "torch._dynamo")
_TO_START = 60.0

_kept: dict[int, WarmRanks] = {}


def warm_ranks(size: int) -> WarmRanks:
    """Ranks that wait for calls, with this process's environment; started where there are none."""
    ranks = _kept.get(size)
    if ranks is not None and (ranks.environment != _environment() or not ranks.alive):
        ranks.end()
        ranks = None
    if ranks is None:
        ranks = _kept[size] = WarmRanks(size)
    return ranks


def fast_worker() -> list[str]:
    """The command, to be followed by its arguments, that does what `python -m hvdp.testing.worker` does."""
    return _zygote().command


def warm_processes() -> set[int]:
    """The pids of the zygote, of all ranks that wait for calls, and of their launchers."""
    pids = {pid for ranks in _kept.values() if ranks.alive for pid in ranks.pids}
    return pids | ({_zygote().pid} if _zygote.cache_info().currsize else set())


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}


@atexit.register
def _end_all() -> None:
    for ranks in _kept.values():
        ranks.end()
    if _zygote.cache_info().currsize:
        _zygote().end()


class _Zygote:
    """Has torch imported if this process has."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="zygote-")
        address = os.path.join(self._folder, "socket")
        self.command = [sys.executable, "-I", "-S", zygote.__file__, address]
        preloaded = _PRELOADED if "torch" in sys.modules else ["hvdp"]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "hvdp.testing.worker"),
                    *("--zygote", str(listener.fileno()), *preloaded),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                # As the launcher does it: both are looked at only when a process starts.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()


class WarmRanks:
    """Ranks that the real launcher has started, without MPI, and that wait for calls.

    Raises:
        RuntimeError: they did not start in time.
    """

    def __init__(self, size: int) -> None:
        self.environment = _environment()
        self.alive = True
        self._folder = Path(tempfile.mkdtemp(prefix="warm-ranks-"))
        self._printed = [self._folder / name for name in ("stdout", "stderr")]
        address = str(self._folder / "socket")
        with (
            socket.socket(socket.AF_UNIX) as listener,
            open(self._printed[0], "wb") as stdout,
            open(self._printed[1], "wb") as stderr,
        ):
            listener.bind(address)
            listener.listen(size)
            self._launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "hvdp.launch", "-np", str(size)),
                    *(*fast_worker(), "--warm", address),
                ],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            listener.settimeout(_TO_START)
            self._ranks: list[socket.socket] = []
            try:
                while len(self._ranks) < size:
                    self._ranks.append(listener.accept()[0])
            except TimeoutError:
                await_end(self._launcher, 0)
                self.end()
                raise RuntimeError(f"{size} ranks did not start within {_TO_START:g} s") from None
        launcher = psutil.Process(self._launcher.pid)
        self.pids = {launcher.pid, *(process.pid for process in launcher.children(recursive=True))}
        self.pids.update(map(_peer, self._ranks))

    def call(self, folder: Path, limit: float, env: Mapping[str, str], timeout: float) -> Completed:
        """Make the call that lies in `folder`, as `hvdp.testing.worker` does.

        When a rank fails, the launcher ends the job as it does always; so does this, when time is up.

        Args:
            limit: seconds after which a rank dumps its stacks and ends.
            env: variables on top of this process's own.
            timeout: seconds.
        """
        began = time.monotonic()
        starts = [path.stat().st_size for path in self._printed]
        order = json.dumps([str(folder), limit, dict(env)])
        for rank in self._ranks:
            rank.sendall(f"{order}\n".encode())
        status, timed_out = 0, False
        if not self._all_returned(began + timeout):
            self.alive = False
            *_, timed_out = await_end(self._launcher, began + timeout - time.monotonic())
            status = self._launcher.returncode
        stdout, stderr = (
            path.read_bytes()[start:].decode(errors="replace")
            for path, start in zip(self._printed, starts, strict=True)
        )
        return Completed(status, stdout, stderr, time.monotonic() - began, timed_out)

    def _all_returned(self, deadline: float) -> bool:
        """Whether all have, in time; a rank that has failed closes its socket."""
        with selectors.DefaultSelector() as waiting:
            for rank in self._ranks:
                waiting.register(rank, selectors.EVENT_READ)
            while waiting.get_map():
                ready = waiting.select(deadline - time.monotonic())
                if not ready or not all(key.fileobj.recv(1) for key, _ in ready):  # type: ignore[union-attr]
                    return False
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
        return True

    def end(self) -> None:
        """Let the ranks go."""
        self.alive = False
        for rank in self._ranks:
            rank.close()
        await_end(self._launcher, 10)
        shutil.rmtree(self._folder, ignore_errors=True)


def _peer(link: socket.socket) -> int:
    """The pid of the process at the other end."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
