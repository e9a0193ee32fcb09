"""From a place to a running transport: who takes part, how they meet, which transport serves them."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from hvdp._core.config import Config
from hvdp._core.rendezvous import Listener, Meeting, meet
from hvdp._core.topology import Place, Topology
from hvdp._version import __version__
from hvdp.errors import InvalidArgumentError, RendezvousError, TransportError
from hvdp.transports.base import Transport
from hvdp.transports.local import LocalTransport
from hvdp.transports.mpi import MpiTransport, start_mpi
from hvdp.transports.shm import ShmTransport

__all__ = ["World", "connect", "within"]


@dataclass(frozen=True)
class World:
    """The processes of a job.

    Attributes:
        place: this process's place among them.
        comm: the mpi4py communicator of just these, where the caller gave one.
        launched: this process's (rank, size) as the launcher counts.
        ranks: which of the launched they are.
    """

    place: Place
    comm: Any
    launched: tuple[int, int]
    ranks: tuple[int, ...]


def within(place: Place, comm: Any) -> World:
    """Narrow a place down to the processes that `init(comm)` names; see there.

    Raises:
        InvalidArgumentError: `comm` is neither, or this process is not among its ranks.
    """
    launched = (place.rank, place.size)
    if comm is None:
        return World(place, None, launched, tuple(range(place.size)))
    if hasattr(comm, "Get_rank"):
        size = comm.Get_size()
        narrowed = replace(place, rank=comm.Get_rank(), size=size, address="mpi" if size > 1 else "")
        return World(narrowed, comm, launched, ())
    ranks = tuple(comm) if isinstance(comm, Sequence) else ()
    if place.rank not in ranks or len(set(ranks)) != len(ranks) or max(ranks) >= place.size:
        raise InvalidArgumentError(
            f"comm must be an mpi4py communicator, or a list of different ranks below {place.size} that has "
            f"this process's, {place.rank}. Received: {comm!r}"
        )
    address = place.address
    if address.startswith("unix:") and len(ranks) < place.size:
        address += f".{'-'.join(map(str, ranks))}"
    return World(
        replace(place, rank=ranks.index(place.rank), size=len(ranks), address=address), None, launched, ranks
    )


def connect(world: World, config: Config, generation: int) -> tuple[Meeting, Transport, Place]:
    """Meet the other processes and make the transport that all agree on; collective.

    Returns:
        The meeting, the transport, and the place with the address where they met.

    Raises:
        RendezvousError, TransportError: on every process alike, where they have met at all.
    """
    place, listener = world.place, None
    if place.address == "mpi":
        place, listener = _meet_over_mpi(world)
    meeting = meet(place, _facts(world, config), _agree, config.start_timeout, generation, listener)
    if meeting.transport == MpiTransport.name:
        return meeting, MpiTransport(_communicator(world)), place
    if meeting.transport == ShmTransport.name:
        name = place.address.partition(":")[2]
        return meeting, ShmTransport(f"{name}#{generation}", place.secret, place.rank), place
    return meeting, LocalTransport(), place


def _facts(world: World, config: Config) -> dict[str, Any]:
    """What rank 0 compares before the job starts."""
    facts = {
        "version": __version__,
        "cpu_operations": config.cpu_operations,
        "fusion_threshold": config.fusion_threshold,
        "cache_capacity": config.cache_capacity,
        "mpi_fault": "",
    }
    if world.place.size > 1 and (config.cpu_operations == "mpi" or world.place.address == "mpi"):
        try:
            start_mpi(*world.launched)
        except TransportError as error:
            facts["mpi_fault"] = str(error)
    return facts


def _agree(topology: Topology, facts: list[dict[str, Any]]) -> str:
    """On rank 0: the transport's name, from what all ranks say of themselves."""
    for key in ("version", "cpu_operations", "fusion_threshold", "cache_capacity"):
        for rank, theirs in enumerate(facts):
            if theirs[key] != facts[0][key]:
                raise RendezvousError(
                    f"{key} is {facts[0][key]} on rank 0 and {theirs[key]} on rank {rank}; "
                    "give all ranks the same installation and environment."
                )
    if topology.size == 1:
        return LocalTransport.name
    one_host = topology.local_size == topology.size
    asked = facts[0]["cpu_operations"]
    if asked == "shm" and not one_host:
        raise TransportError(
            "HVDP_CPU_OPERATIONS=shm needs all ranks on one host, these are on "
            f"{len(set(topology.hosts))}; leave it unset or use mpi."
        )
    if asked == "shm" or (asked == "auto" and one_host):
        return ShmTransport.name
    for theirs in facts:
        if theirs["mpi_fault"]:
            raise TransportError(theirs["mpi_fault"])
    return MpiTransport.name


def _communicator(world: World) -> Any:
    """A communicator of our own, so that the program's own messages stay apart."""
    MPI = start_mpi(*world.launched)
    if world.comm is not None:
        return world.comm.Dup()
    if len(world.ranks) == world.launched[1]:
        return MPI.COMM_WORLD.Dup()
    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(list(world.ranks)))


def _meet_over_mpi(world: World) -> tuple[Place, Listener | None]:
    """MPI carries rank 0's address and a fresh secret to the others."""
    comm = _communicator(world)
    listener, offer = None, None
    if world.place.rank == 0:
        listener = Listener("tcp:0")
        hosts = [
            address.address
            for interface in psutil.net_if_addrs().values()
            for address in interface
            if address.family == socket.AF_INET
        ]
        # The loopback address last: on another host it leads back to that host.
        hosts.sort(key=lambda host: host.startswith("127."))
        offer = (f"tcp:{','.join(hosts)}:{listener.port}", secrets.token_bytes(32))
    address, secret = comm.bcast(offer, root=0)
    comm.Free()
    return replace(world.place, address=address, secret=secret), listener
