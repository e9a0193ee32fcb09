"""Joining and leaving the job, and this process's place in it."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import sys
from dataclasses import replace
from typing import Any

import psutil

from hvdp._core.config import Config, environment
from hvdp._core.engine import Engine
from hvdp._core.operations import Barrier
from hvdp._core.rendezvous import Listener, Meeting, meet
from hvdp._core.runtime import runtime
from hvdp._core.stall import StallWatch
from hvdp._core.topology import Place, Topology
from hvdp._version import __version__
from hvdp.errors import RendezvousError, TransportError
from hvdp.launch.environments import detect
from hvdp.transports.base import Transport
from hvdp.transports.local import LocalTransport
from hvdp.transports.mpi import MpiTransport, share_over_mpi, start_mpi
from hvdp.transports.shm import ShmTransport

__all__ = [
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

_log = logging.getLogger("hvdp")


def init() -> None:
    """Join the job; every rank must call it, before any other call.

    Where this process stands is read from what its launcher left in the environment;
    started by nobody, it is a world of one. A second call does nothing; after `shutdown`
    it joins anew.

    Raises:
        RendezvousError: ranks are missing or do not fit together.
        TransportError: no transport can serve these ranks.
        InvalidArgumentError: an environment variable has a value that cannot be meant.
    """
    if runtime.engine is not None:
        return
    config = Config.from_env()
    _set_up_logging(config.log_level)
    place = detect(environment())
    listener = None
    generation = runtime.starts
    runtime.starts += 1
    if place.address == "mpi":
        place, listener = _meet_over_mpi(place)
    meeting = meet(place, _facts(place, config), _agree, config.start_timeout, generation, listener)
    engine = Engine(
        meeting,
        _make_transport(meeting, place, generation),
        config.cache_capacity,
        StallWatch(config.stall_warning, config.stall_shutdown),
        lambda rank: _blame(place.supervisor_fd, rank),
    )
    runtime.start(engine)
    if generation == 0:
        atexit.register(_leave_at_exit)
    engine.run(Barrier("init", 0))


def shutdown() -> None:
    """Leave the job. Peers that still wait for this rank raise HorovodInternalError."""
    runtime.stop("called hvd.shutdown()")


def is_initialized() -> bool:
    """Whether `init` has been called and `shutdown` has not since."""
    return runtime.engine is not None


def rank() -> int:
    """This process's number among all, from 0."""
    return runtime.require("rank").topology.rank


def size() -> int:
    """The number of processes."""
    return runtime.require("size").topology.size


def local_rank() -> int:
    """This process's number on its host, from 0: the GPU to use."""
    return runtime.require("local_rank").topology.local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return runtime.require("local_size").topology.local_size


def cross_rank() -> int:
    """The number of this host among those that have this local rank, from 0."""
    return runtime.require("cross_rank").topology.cross_rank


def cross_size() -> int:
    """The number of hosts that have this local rank."""
    return runtime.require("cross_size").topology.cross_size


def is_homogeneous() -> bool:
    """Whether every host runs equally many processes."""
    return runtime.require("is_homogeneous").topology.is_homogeneous


def _facts(place: Place, config: Config) -> dict[str, Any]:
    """What rank 0 compares before the job starts."""
    facts = {
        "version": __version__,
        "cpu_operations": config.cpu_operations,
        "fusion_threshold": config.fusion_threshold,
        "cache_capacity": config.cache_capacity,
        "mpi_fault": "",
    }
    if place.size > 1 and (config.cpu_operations == "mpi" or place.address == "mpi"):
        try:
            start_mpi(place.rank, place.size)
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


def _make_transport(meeting: Meeting, place: Place, generation: int) -> Transport:
    if meeting.transport == MpiTransport.name:
        return MpiTransport(place.rank, place.size)
    if meeting.transport == ShmTransport.name:
        name = place.address.partition(":")[2]
        return ShmTransport(f"{name}#{generation}", place.secret, place.rank)
    return LocalTransport()


def _meet_over_mpi(place: Place) -> tuple[Place, Listener | None]:
    """Ranks on several hosts: MPI carries rank 0's address and a fresh secret to the others."""
    listener = None
    offer = None
    if place.rank == 0:
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
    address, secret = share_over_mpi(place.rank, place.size, offer)
    return replace(place, address=address, secret=secret), listener


def _blame(supervisor_fd: int | None, rank: int) -> None:
    """Tell the launcher who failed first; it takes the earliest word."""
    if supervisor_fd is not None:
        try:
            os.write(supervisor_fd, f"failed {rank}\n".encode())
        except OSError as error:
            _log.debug("the launcher has gone: %s", error)


def _leave_at_exit() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    runtime.stop(f"raised {type(error).__name__}: {error}" if error is not None else "exited")


def _set_up_logging(level: str) -> None:
    """Show our own few lines on stderr, unless the program has set up logging itself."""
    names = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}
    _log.setLevel(names.get(level, level))
    if not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hvdp: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        _log.addHandler(handler)
