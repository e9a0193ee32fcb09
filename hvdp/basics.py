"""Joining and leaving the job, and this process's place in it."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from hvdp._core.config import Config, environment
from hvdp._core.engine import Engine
from hvdp._core.operations import Barrier
from hvdp._core.runtime import runtime
from hvdp._core.stall import StallWatch
from hvdp._core.wording import farewell
from hvdp.connect import connect, within
from hvdp.errors import InvalidArgumentError
from hvdp.launch.environments import detect
from hvdp.process_sets import ProcessSet, add_process_set
from hvdp.timeline import start_timeline

__all__ = [
    "cross_rank",
    "cross_size",
    "cuda_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]

_log = logging.getLogger("hvdp")


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job; every rank must call it, before any other call.

    Where this process stands is read from what its launcher left in the environment;
    started by nobody, it is a world of one. A second call does nothing; after `shutdown`
    it joins anew.

    Args:
        comm: only these processes form the job: an mpi4py communicator, or a list of ranks
            as the launcher counts them. Only they may call.
        process_sets: added as by `add_process_set`. "dynamic" is accepted as Horovod accepts
            it: sets can always be added later.

    Raises:
        RendezvousError: ranks are missing or do not fit together.
        TransportError: no transport can serve these ranks.
        InvalidArgumentError: an argument or environment variable has a value that cannot be meant.
    """
    if runtime.engine is not None:
        return
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise InvalidArgumentError(f'process_sets must be a list or "dynamic". Received: {process_sets!r}')
    config = Config.from_env()
    _set_up_logging(config.log_level)
    world = within(detect(environment()), comm)
    generation = runtime.starts
    runtime.starts += 1
    meeting, transport, place = connect(world, config, generation)
    engine = Engine(
        meeting,
        transport,
        config.cache_capacity,
        StallWatch(config.stall_warning, config.stall_shutdown),
        lambda rank: _blame(place.supervisor_fd, rank),
    )
    runtime.start(engine, _leave_at_exit)
    engine.run(Barrier("init", 0))
    if config.timeline:
        start_timeline(config.timeline, config.timeline_mark_cycles)
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Leave the job. Peers that still wait for this rank raise HorovodInternalError.

    Rank 0 should leave last: it coordinates every call, also in process sets that it is not in.
    """
    _leave("called hvd.shutdown()")


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


def mpi_built() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether this job's data goes over MPI."""
    return runtime.require("mpi_enabled").transport.name == "mpi"


def mpi_threads_supported() -> bool:
    """Whether the program may call MPI from several threads beside hvdp.

    Raises:
        InvalidArgumentError: the job does not use MPI.
    """
    if not mpi_enabled():
        raise InvalidArgumentError("mpi_threads_supported() needs MPI; start with horovodrun --mpi")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """False: hvdp's own control plane and shared memory take Gloo's place."""
    return False


def gloo_enabled() -> bool:
    """Whether the job runs without MPI, as it would over Gloo in Horovod."""
    return not mpi_enabled()


def nccl_built() -> int:
    """0: no transport over NCCL."""
    return 0


def cuda_built() -> bool:
    """False: nothing is compiled against CUDA; tensors on a GPU travel through host memory."""
    return False


def rocm_built() -> bool:
    """False; see `cuda_built`."""
    return False


def _blame(supervisor_fd: int | None, rank: int) -> None:
    """Tell the launcher who failed first; it takes the earliest word."""
    if supervisor_fd is not None:
        try:
            os.write(supervisor_fd, f"failed {rank}\n".encode())
        except OSError as error:
            _log.debug("the launcher has gone: %s", error)


def _leave(how: str) -> None:
    """In good order; `how` is told to the peers that still need this rank."""
    if runtime.engine is not None:
        runtime.stop(farewell(runtime.engine.rank, how))


def _leave_at_exit() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        _leave("exited")
    else:
        # One line: TensorFlow's messages have hundreds, with tracebacks in them that are not the others'.
        first = str(error).strip().partition("\n")[0]
        runtime.stop(f"raised {type(error).__name__}: {first}")


def _set_up_logging(level: str) -> None:
    """Show our own few lines on stderr, unless the program has set up logging itself."""
    names = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}
    _log.setLevel(names.get(level, level))
    if not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hvdp: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        _log.addHandler(handler)
