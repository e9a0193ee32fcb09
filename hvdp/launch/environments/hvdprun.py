"""Started by this package's own launcher on one host."""

from __future__ import annotations

from collections.abc import Mapping

from hvdp._core.topology import Place
from hvdp.errors import RendezvousError
from hvdp.launch.environments._values import complete, has, inherited_pipe

__all__ = ["Hvdprun"]


class Hvdprun:
    """`HVDP_ADDRESS` says where to meet; only this launcher hands out a secret and a pipe."""

    name = "hvdprun"

    def detect(self, env: Mapping[str, str]) -> Place | None:
        """Raises: RendezvousError where the address is set but the rest is wrong."""
        if not has(env, "HVDP_ADDRESS"):
            return None
        rank, size = complete(env, self.name, "HOROVOD_RANK", "HOROVOD_SIZE")
        text = env.get("HVDP_SECRET", "")
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            raise RendezvousError(
                "hvdprun should have set HVDP_SECRET to hexadecimal digits. "
                f"Unset it, or start the job again with hvdprun. Received: {len(text)} characters"
            ) from None
        return Place(
            rank=rank,
            size=size,
            launcher=self.name,
            address=env["HVDP_ADDRESS"],
            secret=secret,
            supervisor_fd=inherited_pipe(env),
        )
