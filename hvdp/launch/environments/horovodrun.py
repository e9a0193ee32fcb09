"""Started by the original `horovodrun` in its Gloo mode."""

from __future__ import annotations

from collections.abc import Mapping

from hvdp._core.topology import Place
from hvdp.errors import RendezvousError
from hvdp.launch.environments._values import complete, has, number, unix_name

__all__ = ["Horovodrun"]


class Horovodrun:
    """Its rendezvous server's host and port name the job; the server itself is not used."""

    name = "horovodrun"

    def detect(self, env: Mapping[str, str]) -> Place | None:
        """Raises: RendezvousError where its variables contradict each other, or for several hosts."""
        host = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
        port = "HOROVOD_GLOO_RENDEZVOUS_PORT"
        if not has(env, "HOROVOD_RANK", host, port):
            return None
        rank, size = complete(env, self.name, "HOROVOD_RANK", "HOROVOD_SIZE")
        local_size = number(env, "HOROVOD_LOCAL_SIZE", self.name, least=1)
        if local_size != size:
            raise RendezvousError(
                "the original horovodrun without MPI gives hvdp no meeting point between hosts. "
                "Start the job with hvdprun or mpiexec. "
                f"Received: HOROVOD_LOCAL_SIZE={local_size}, HOROVOD_SIZE={size}"
            )
        meeting = f"{env[host]}-{number(env, port, self.name)}"
        return Place(rank, size, self.name, unix_name("horovodrun", meeting))
