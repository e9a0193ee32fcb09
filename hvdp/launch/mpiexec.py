"""The installed MPI's `mpiexec`, and the command line it wants."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdp.errors import LaunchError
from hvdp.launch.hosts import Host

__all__ = ["OUTER", "Mpiexec", "find", "without_outer"]

# What launchers put into the environment of the processes they start.
OUTER = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "MPI_LOCAL", "HVDP_SUPERVISOR_")
_OURS = ("HVDP_ADDRESS", "HVDP_SECRET", "HOROVOD_RANK", "HOROVOD_SIZE")

# Only what hvdp and its users set needs naming to Open MPI, which sends no variable on its own.
_SENT = ("HVDP_", "HOROVOD_", "OMP_", "PYTHON", "NCCL_", "CUDA_")


def without_outer(env: Mapping[str, str]) -> dict[str, str]:
    """The environment less what tells a process that some launcher has started it."""
    return {k: v for k, v in env.items() if not k.startswith(OUTER) and k not in _OURS}


@dataclass(frozen=True)
class Mpiexec:
    """One `mpiexec` and the dialect it speaks."""

    path: str
    dialect: str  # "hydra" or "openmpi"
    version: str

    def command(
        self,
        ranks: int,
        command: Sequence[str],
        hosts: Sequence[Host],
        variables: Mapping[str, str],
        extra: str | None,
    ) -> list[str]:
        """The whole command line.

        Args:
            hosts: where to run; empty for wherever the MPI itself chooses.
            variables: environment of this process, to be had by every rank.
            extra: the user's further arguments, in shell notation.
        """
        words = [self.path, "-n", str(ranks)]
        named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        if self.dialect == "hydra":
            words += ["-hosts", named] if hosts else []
        else:
            words += ["-H", named] if hosts else []
            words += ["--oversubscribe", "--bind-to", "none"]
            words += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            for name in sorted(variables):
                words += ["-x", name] if name.startswith(_SENT) else []
        return [*words, *shlex.split(extra or ""), *command]


def find(env: Mapping[str, str]) -> Mpiexec:
    """The `mpiexec` of this Python's environment, else the first on the path.

    Raises:
        LaunchError: there is none, it does not run, or it speaks neither dialect.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec", path=env.get("PATH"))
    if path is None:
        raise LaunchError("there is no mpiexec: install an MPI, for example with pip install 'hvdp[mpich]'")
    try:
        said = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=20,
            env=without_outer(env),
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} does not run: {error}") from error
    if "HYDRA" in said or "Intel(R) MPI" in said:
        return Mpiexec(path, "hydra", _version(said))
    if "Open MPI" in said or "OpenRTE" in said or "PRRTE" in said:
        return Mpiexec(path, "openmpi", _version(said))
    raise LaunchError(
        f"{path} is neither MPICH's, Intel MPI's nor Open MPI's. Start the job with it directly: "
        f"mpiexec -n 2 python train.py. Received: {said.splitlines()[:1]}"
    )


def _version(said: str) -> str:
    for line in said.splitlines():
        words = line.replace(")", " ").split()
        for word in words:
            if word[:1].isdigit() and "." in word:
                return word
    return "unknown"
