"""Ranks that stay: each call runs in a fresh child of every rank, which has its imports already.

Starting torch takes a process seconds, longer than most tests take. So the launcher starts the
ranks once. For every call each of them forks, and the children are a job's ranks to each other.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from hvdp.testing.scripts import Completed, await_end

__all__ = ["WarmRanks", "warm_processes", "warm_ranks"]

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


def warm_processes() -> set[int]:
    """The pids of all ranks that wait for calls, and of their launchers."""
    return {pid for ranks in _kept.values() if ranks.alive for pid in ranks.pids}


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}


@atexit.register
def _end_all() -> None:
    for ranks in _kept.values():
        ranks.end()


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
        preloaded = _PRELOADED if "torch" in sys.modules else ["hvdp"]
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
                    *(sys.executable, "-m", "hvdp.testing.worker", "--warm", address, *preloaded),
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
