"""`--check-build`: what is installed here and what hvdp can use of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping

from hvdp._version import __version__
from hvdp.errors import LaunchError
from hvdp.launch.mpiexec import find, without_outer

__all__ = ["report"]

# (name shown, distributions that carry it, module)
_FRAMEWORKS = (
    ("PyTorch", ("torch",), "torch"),
    ("Keras", ("keras",), "keras"),
    ("TensorFlow", ("tensorflow", "tensorflow-cpu"), "tensorflow"),
    ("JAX", ("jax",), "jax"),
)
_MPI_VERSION = "from mpi4py import MPI; import sys; sys.stdout.write(MPI.Get_library_version())"


def report(env: Mapping[str, str]) -> str:
    """The whole report; never raises, however broken a package may be."""
    lines = [f"hvdp {__version__}, Python {sys.version.split()[0]}", "", "Available frameworks:"]
    lines += [_box(name, _version(dists, module)) for name, dists, module in _FRAMEWORKS]
    lines += ["", "Available transports:"]
    lines += [_box("shm (ranks of one host)", "built in" if sys.platform == "linux" else None)]
    lines += [_box("mpi (between hosts)", _mpi_library(env))]
    lines += [_box("nccl (between GPUs)", _nccl())]
    lines += [
        "",
        "Available launchers:",
        _box("hvdprun on one host", "built in"),
        _box("mpiexec", _mpiexec(env)),
    ]
    return "\n".join(lines) + "\n"


def _box(name: str, found: str | None) -> str:
    return f"    [{' ' if found is None else 'X'}] {name}{'' if found is None else f': {found}'}"


def _version(distributions: tuple[str, ...], module: str) -> str | None:
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except (ImportError, ValueError):
        return None
    for name in distributions:
        # A package with broken metadata must not end the report.
        with contextlib.suppress(Exception):
            return importlib.metadata.version(name) or "version unknown"
    return "version unknown"


def _mpi_library(env: Mapping[str, str]) -> str | None:
    """What the MPI that mpi4py loads calls itself; asked in a process that may crash."""
    if _version(("mpi4py",), "mpi4py") is None:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MPI_VERSION],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=30,
            env=without_outer(env),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = " ".join(done.stdout.replace("\0", "").partition("\n")[0].split())
    return first if done.returncode == 0 and first else None


def _nccl() -> str | None:
    found = _version(("nccl4py",), "nccl")
    return found if found is not None and shutil.which("nvidia-smi") else None


def _mpiexec(env: Mapping[str, str]) -> str | None:
    try:
        mpiexec = find(env)
    except LaunchError:
        return None
    return f"{mpiexec.path} ({mpiexec.dialect} {mpiexec.version})"
