"""Every test must leave the machine as it found it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvdp.testing.warm import warm_processes

# Inherited by every process a test starts, so that other work on the machine is not mistaken for ours.
_MARK = "HVDP_TEST_SESSION"
os.environ[_MARK] = uuid.uuid4().hex

_TO_FADE = 2.0  # seconds; what a killed process held goes with its last thread


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What others leave in the machine's temporary folder is not our tests' doing."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def _nothing_left_behind(_own_temporary_folder: None) -> Iterator[None]:
    processes, files, sockets = _processes(), _files(), _sockets()
    yield
    left = [p for pid, p in _processes().items() if pid not in processes and pid not in warm_processes()]
    _, alive = psutil.wait_procs(left, timeout=_TO_FADE)
    told = [_describe(p) for p in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    new_files = {f for f in _files() - files if not _is_anothers(f)}
    until = time.monotonic() + _TO_FADE
    while new_files and time.monotonic() < until:
        # Another job's may be without a process for a moment, when it starts or ends.
        time.sleep(0.1)
        new_files = {f for f in new_files if not _is_anothers(f)}
    new_sockets = sorted(_sockets() - sockets)
    assert not told, f"processes left behind: {told}"
    assert not new_files, f"files left behind: {new_files}"
    assert not new_sockets, f"sockets left behind: {new_sockets}"


def _processes() -> dict[int, psutil.Process]:
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(_MARK) == os.environ[_MARK]
            ):
                found[process.pid] = process
    return found


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)


def _files() -> set[Path]:
    temporary = Path(tempfile.gettempdir())
    return {*Path("/dev/shm").iterdir(), *temporary.glob("hvdp*"), *Path("/tmp").glob("hydra_*")}


def _is_anothers(file: Path) -> bool:
    """Whether the file has gone by now, or belongs to a process that no test has started."""
    # A semaphore of multiprocessing's that another program holds shows in nobody's maps for a moment.
    if not file.exists() or file.name.startswith("sem."):
        return True
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if environment.get(_MARK) == os.environ[_MARK]:
                continue
            # Ranks have the file named; before they start only the process that made it is there.
            made = file.name.startswith("hydra_") and process.name() == "hydra_pmi_proxy"
            if made or str(file) in environment.values():
                return True
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            if str(file) in maps or any(str(file) == opened.path for opened in process.open_files()):
                return True
    return False


def _sockets() -> set[str]:
    """Abstract sockets of hvdp that this very process holds open."""
    own = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(fd))
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[7].startswith("@hvdp-") and f"socket:[{words[6]}]" in own:
            found.add(words[7])
    return found
