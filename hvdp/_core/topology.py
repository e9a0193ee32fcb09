"""Where this process stands among the others."""

from __future__ import annotations

from dataclasses import dataclass

from hvdp.errors import RendezvousError

__all__ = ["Place", "Topology"]


@dataclass(frozen=True)
class Place:
    """What a launcher told this process before it has met any other.

    Attributes:
        rank, size: global rank and number of processes.
        launcher: who started us, for messages ("hvdprun", "mpiexec", "torchrun", ...).
        address: where the ranks meet: "unix:NAME" (abstract Unix socket, one host),
            "tcp:HOST:PORT", or "mpi" (the address is broadcast over MPI at start).
        secret: key shared by the ranks of the job; empty where a Unix socket's
            kernel-checked user id is all there is.
        supervisor_fd: inherited pipe on which a rank tells the launcher who failed first.
    """

    rank: int
    size: int
    launcher: str
    address: str
    secret: bytes = b""
    supervisor_fd: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise RendezvousError(
                f"{self.launcher} gave this process rank {self.rank} of {self.size}: "
                "a rank lies between 0 and the size less one. Start the job again with one launcher."
            )


@dataclass(frozen=True)
class Topology:
    """The whole job as every rank sees it, agreed at start.

    Attributes:
        rank: this process's global rank.
        hosts: for each rank the index of its host; hosts are numbered by their lowest rank.
    """

    rank: int
    hosts: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Global ranks on this host, ascending."""
        return tuple(r for r, host in enumerate(self.hosts) if host == self.hosts[self.rank])

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.local_ranks)

    @property
    def _peers_across(self) -> tuple[int, ...]:
        """Ranks with this local rank, one a host that has so many."""
        seen: dict[int, int] = {}
        peers = []
        for rank, host in enumerate(self.hosts):
            if seen.get(host, 0) == self.local_rank:
                peers.append(rank)
            seen[host] = seen.get(host, 0) + 1
        return tuple(peers)

    @property
    def cross_rank(self) -> int:
        """Index of this host among the hosts that have this local rank."""
        return self._peers_across.index(self.rank)

    @property
    def cross_size(self) -> int:
        return len(self._peers_across)

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host runs equally many ranks."""
        return len({self.hosts.count(host) for host in set(self.hosts)}) <= 1
