"""Started by hydra, the `mpiexec` of MPICH and Intel MPI."""

from __future__ import annotations

from collections.abc import Mapping

from hvdp._core.topology import Place
from hvdp.launch.environments._ancestor import nearest_outside
from hvdp.launch.environments._values import complete, has, inherited_pipe, number, unix_name

__all__ = ["Hydra"]


class Hydra:
    """It gives a job no name, so on one host the launching process stands for it."""

    name = "mpiexec"

    def detect(self, env: Mapping[str, str]) -> Place | None:
        """Raises: RendezvousError where its variables contradict each other."""
        if not has(env, "PMI_RANK"):
            return None
        rank, size = complete(env, self.name, "PMI_RANK", "PMI_SIZE")
        pipe = inherited_pipe(env)
        # Older hydras do not say how many ranks are local: assume nothing and ask MPI.
        local_size = number(env, "MPI_LOCALNRANKS", self.name, least=1) if "MPI_LOCALNRANKS" in env else None
        if local_size != size:
            return Place(rank, size, self.name, "mpi", supervisor_fd=pipe)
        return Place(
            rank, size, self.name, unix_name("mpiexec", nearest_outside("PMI_RANK")), supervisor_fd=pipe
        )
