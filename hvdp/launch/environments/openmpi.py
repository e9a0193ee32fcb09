"""Started by Open MPI's `mpiexec`."""

from __future__ import annotations

from collections.abc import Mapping

from hvdp._core.topology import Place
from hvdp.launch.environments._ancestor import nearest_outside
from hvdp.launch.environments._values import complete, has, inherited_pipe, number, unix_name

__all__ = ["OpenMpi"]


class OpenMpi:
    """On one host the PMIx namespace names the job; between hosts the address travels over MPI."""

    name = "Open MPI"

    def detect(self, env: Mapping[str, str]) -> Place | None:
        """Raises: RendezvousError where its variables contradict each other."""
        if not has(env, "OMPI_COMM_WORLD_RANK"):
            return None
        rank, size = complete(env, self.name, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        pipe = inherited_pipe(env)
        if number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", self.name, least=1) != size:
            return Place(rank, size, self.name, "mpi", supervisor_fd=pipe)
        job = env.get("PMIX_NAMESPACE") or nearest_outside("OMPI_COMM_WORLD_RANK")
        return Place(rank, size, self.name, unix_name("openmpi", job), supervisor_fd=pipe)
