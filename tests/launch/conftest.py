"""Real launchers on real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hvdp.errors import LaunchError
from hvdp.launch.mpiexec import find

LAUNCH = [sys.executable, "-m", "hvdp.launch"]

# What every program of these tests begins with.
PRELUDE = """
import os, signal, subprocess, sys, time
from hvdp.launch.environments import detect
place = detect(os.environ)
rank = place.rank
class HorovodInternalError(RuntimeError): pass
def blocked(): signal.pause()
"""


class Running:
    """A launcher at work; its output is read all the time."""

    def __init__(self, args: list[str], env: dict[str, str]) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*LAUNCH, *args],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.stdout = b""
        self.stderr = b""
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._read, args=(name,)) for name in ("stdout", "stderr")]
        for thread in self._threads:
            thread.start()

    def _read(self, name: str) -> None:
        stream = getattr(self.process, name)
        while data := os.read(stream.fileno(), 1 << 16):
            with self._changed:
                setattr(self, name, getattr(self, name) + data)
                self._changed.notify_all()
        stream.close()

    def wait_for(self, text: str, count: int = 1) -> None:
        """Until that has been printed on stdout so many times."""
        with self._changed:
            seen = self._changed.wait_for(lambda: self.stdout.count(text.encode()) >= count, timeout=20)
        assert seen, (self.stdout, self.stderr)

    def family(self) -> list[psutil.Process]:
        """Every process that descends from the launcher."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def send(self, number: int) -> float:
        """Signal the launcher only; returns the time."""
        self.process.send_signal(number)
        return time.monotonic()

    def end(self, timeout: float = 15.0) -> int:
        """Until it has ended and both of its streams are closed; its status."""
        status = self.process.wait(timeout)
        for thread in self._threads:
            thread.join(timeout)
            assert not thread.is_alive(), "the launcher has ended but its output is held open"
        self.seconds = time.monotonic() - self.began
        return status

    @property
    def out(self) -> list[str]:
        return self.stdout.decode().splitlines()

    @property
    def err(self) -> list[str]:
        return self.stderr.decode().splitlines()


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(body, np, flags, env)` runs a program that knows its `rank`; `start(args=[...])` anything."""
    started: list[Running] = []

    def begin(
        body: str = "",
        np: int = 2,
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        args: list[str] | None = None,
    ) -> Running:
        if args is None:
            program = tmp_path / "program.py"
            program.write_text(PRELUDE + body)
            args = ["-np", str(np), *flags, sys.executable, str(program)]
        started.append(Running(args, env or {}))
        return started[-1]

    yield begin
    for running in started:
        if running.process.poll() is None:
            running.send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(8)
            running.process.kill()
        running.end()


def _has_mpiexec() -> bool:
    try:
        find(os.environ)
    except LaunchError:
        return False
    return True


needs_mpiexec = pytest.mark.skipif(not _has_mpiexec(), reason="no mpiexec is installed")


@pytest.fixture(
    params=[pytest.param((), id="direct"), pytest.param(("--mpi",), id="mpi", marks=needs_mpiexec)]
)
def how(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Flags for each of the two ways to start ranks on this host."""
    flags: tuple[str, ...] = request.param
    return flags


@pytest.fixture
def mpiexec() -> str:
    """The path of the installed MPI's mpiexec."""
    try:
        return find(os.environ).path
    except LaunchError:
        pytest.skip("no mpiexec is installed")


@pytest.fixture
def gone() -> Callable[[list[psutil.Process], float], list[psutil.Process]]:
    """`gone(processes, seconds)`: those that still run after that time at the latest.

    An orphan that has ended but waits for the system's first process to reap it does not run.
    """

    def wait(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
        deadline = time.monotonic() + seconds
        alive = processes
        while True:
            alive = [p for p in alive if p.is_running() and not _is_zombie(p)]
            if not alive or time.monotonic() >= deadline:
                return alive
            time.sleep(0.02)

    return wait


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
