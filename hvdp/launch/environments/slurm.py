"""Started by Slurm's `srun`."""

from __future__ import annotations

from collections.abc import Mapping

from hvdp._core.topology import Place
from hvdp.launch.environments._values import complete, has, number, unix_name

__all__ = ["Slurm"]


class Slurm:
    """A batch script has a SLURM_PROCID too, though `srun` did not start it: the step id tells them apart."""

    name = "srun"

    def detect(self, env: Mapping[str, str]) -> Place | None:
        """Raises: RendezvousError where its variables contradict each other."""
        if not has(env, "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
            return None
        rank, size = complete(env, self.name, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
        if number(env, "SLURM_STEP_NUM_NODES", self.name, least=1) > 1:
            return Place(rank, size, self.name, "mpi")
        job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID", "")
        return Place(rank, size, self.name, unix_name("slurm", f"{job}.{env['SLURM_STEP_ID']}"))
