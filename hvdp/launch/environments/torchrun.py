"""Started by `torchrun`."""

from __future__ import annotations

from collections.abc import Mapping

from hvdp._core.topology import Place
from hvdp.errors import RendezvousError
from hvdp.launch.environments._values import complete, has, number, unix_name

__all__ = ["Torchrun"]


class Torchrun:
    """On one host the run id, port and restart count name the job; else we meet one port above theirs."""

    name = "torchrun"

    def detect(self, env: Mapping[str, str]) -> Place | None:
        """Raises: RendezvousError where its variables contradict each other."""
        if not has(env, "TORCHELASTIC_RUN_ID", "RANK"):
            return None
        rank, size = complete(env, self.name, "RANK", "WORLD_SIZE")
        local_size = number(env, "LOCAL_WORLD_SIZE", self.name, least=1)
        port = number(env, "MASTER_PORT", self.name, least=1)
        restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        if local_size == size:
            address = unix_name("torchrun", env["TORCHELASTIC_RUN_ID"], port, restart)
            return Place(rank, size, self.name, address)
        if not has(env, "MASTER_ADDR"):
            raise RendezvousError(
                "torchrun should have set MASTER_ADDR to the host of rank 0. "
                "Give torchrun --master-addr or --rdzv-endpoint. Received: MASTER_ADDR is not set"
            )
        return Place(rank, size, self.name, f"tcp:{env['MASTER_ADDR']}:{port + 1}")
