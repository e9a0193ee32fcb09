"""One test over several numbers of ranks and both ways of moving data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdp.testing.ranks import run_ranks

__all__ = ["World", "worlds"]


@dataclass(frozen=True)
class World:
    """So many ranks over one transport.

    Attributes:
        transport: "shm" (ranks that the launcher starts itself) or "mpi" (through mpiexec). One
            rank alone has nobody to move data to, whatever the transport.
    """

    transport: str
    size: int

    def __str__(self) -> str:
        return f"{self.transport}-{self.size}"

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        warm: bool = True,
    ) -> list[Any]:
        """As `run_ranks`, in this world."""
        settings = {"HVDP_CPU_OPERATIONS": self.transport, **(env or {})}
        mpi = self.transport == "mpi"
        return run_ranks(fn, self.size, *args, mpi=mpi, env=settings, timeout=timeout, warm=warm)


def worlds(shm: Iterable[int] = (), mpi: Iterable[int] = ()) -> list[World]:
    """For `pytest.mark.parametrize("world", worlds(shm=(1, 2), mpi=(2,)), ids=str)`."""
    return [World("shm", size) for size in shm] + [World("mpi", size) for size in mpi]
