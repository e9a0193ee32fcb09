"""MPI through mpi4py: any MPI library, between any hosts.

Only non-blocking MPI calls are made, so that a dead peer never holds this process: between
looks at the request the engine hears from the control plane. Floating-point and plain
integer reductions are MPI's own; what MPI has no type or exact rule for (16-bit floats,
bools, integer averages) is exchanged as bytes by shards and reduced by the common kernels.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from hvdp._core.arrays import Array, as_bytes
from hvdp._core.kernels import reduce_into
from hvdp._core.ops import Average, Max, Min, Product, Reduction, Sum
from hvdp._core.process_sets import Group
from hvdp.errors import TransportError
from hvdp.transports.base import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTransport", "share_over_mpi", "start_mpi"]

_EAGER_SECONDS = 0.2
_SLOWEST_BYTES_PER_SECOND = 50e6
_PAUSE_SECONDS = 0.0002
_NOT_MPI_TYPES = (np.dtype(bool), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_failed = False


def start_mpi(rank: int, size: int) -> Any:
    """Import mpi4py and start MPI if nobody has; returns the `mpi4py.MPI` module.

    Raises:
        TransportError: MPI is missing, or sees other processes than the launcher told of.
    """
    try:
        import mpi4py

        ours = "mpi4py.MPI" not in sys.modules
        if ours:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            f"MPI cannot be used on rank {rank}: {error}. Install it with: pip install 'hvdp[mpich]'"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if ours:
            atexit.register(_finalize, MPI)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise TransportError(
            f"MPI was started on rank {rank} without thread support; leave MPI_Init to hvd.init(), "
            "or call MPI.Init_thread(MPI.THREAD_MULTIPLE) before it."
        )
    world = MPI.COMM_WORLD
    if world.Get_size() != size or world.Get_rank() != rank:
        raise TransportError(
            f"MPI sees this process as rank {world.Get_rank()} of {world.Get_size()}, the launcher as rank "
            f"{rank} of {size}. Start with mpiexec or horovodrun --mpi of the MPI that mpi4py uses "
            f"({MPI.Get_library_version().splitlines()[0]})."
        )
    return MPI


def _finalize(MPI: Any) -> None:
    """At exit: MPI_Finalize waits for all ranks, so it is skipped once one of them is gone."""
    if not _failed and not MPI.Is_finalized():
        MPI.Finalize()


def share_over_mpi(rank: int, size: int, value: Any) -> Any:
    """Rank 0's `value` on every rank; collective over MPI_COMM_WORLD."""
    return start_mpi(rank, size).COMM_WORLD.bcast(value, root=0)


class MpiTransport(Transport):
    """Over a duplicate of MPI_COMM_WORLD, so that the user's own messages stay apart.

    Args:
        rank, size: as the launcher told; the constructor is collective.
    """

    name = "mpi"
    order_free = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._MPI = start_mpi(rank, size)
        self._world: MPI.Intracomm = self._MPI.COMM_WORLD.Dup()
        self._comms: dict[int, MPI.Intracomm] = {}
        MPI = self._MPI
        self._ops = {Sum: MPI.SUM, Average: MPI.SUM, Min: MPI.MIN, Max: MPI.MAX, Product: MPI.PROD}

    def _comm(self, group: Group) -> Any:
        comm = self._comms.get(group.number)
        if comm is None:
            members = self._world.Get_group().Incl(list(group.ranks))
            comm = self._comms[group.number] = self._world.Create_group(members, tag=group.number % 32767)
        return comm

    def _wait(self, request: Any, nbytes: int) -> None:
        """Drive the request; MPI moves data only inside its calls, so look often at first."""
        global _failed
        start = time.perf_counter()
        eager = start + _EAGER_SECONDS + nbytes / _SLOWEST_BYTES_PER_SECOND
        looked = start
        try:
            while not request.Test():
                now = time.perf_counter()
                if now > eager:
                    self.pause(_PAUSE_SECONDS)
                elif now > looked + 0.01:
                    looked = now
                    self.pause(0)
                else:
                    os.sched_yield()
        except BaseException:
            _failed = True
            raise

    def allreduce(self, group: Group, data: Array, reduction: Reduction) -> None:
        exact = reduction.op is Average or reduction.prescale != 1.0 or reduction.postscale != 1.0
        if data.dtype in _NOT_MPI_TYPES or (exact and data.dtype.kind in "iu"):
            self._allreduce_by_shards(group, data, reduction)
            return
        # Divided before the sum, an average cannot overflow inside MPI.
        scale = reduction.prescale / (reduction.divisor if reduction.op is Average else 1)
        if scale != 1.0:
            np.multiply(data, data.dtype.type(scale), out=data)
        op = self._ops[reduction.op]
        self._wait(self._comm(group).Iallreduce(self._MPI.IN_PLACE, data, op), data.nbytes)
        if reduction.postscale != 1.0:
            np.multiply(data, data.dtype.type(reduction.postscale), out=data)

    def _allreduce_by_shards(self, group: Group, data: Array, reduction: Reduction) -> None:
        comm, size = self._comm(group), group.size
        step = -(-data.size // size)
        counts = [max(0, min(step, data.size - i * step)) * data.itemsize for i in range(size)]
        mine = counts[group.index]
        gathered = np.empty((size, mine), np.uint8)
        raw = as_bytes(data)
        self._wait(comm.Ialltoallv([raw, counts], [gathered, [mine] * size]), data.nbytes)
        shard = np.empty(mine // data.itemsize, data.dtype)
        reduce_into(shard, [row.view(data.dtype) for row in gathered], reduction)
        self._wait(comm.Iallgatherv(as_bytes(shard), [raw, counts]), data.nbytes)

    def broadcast(self, group: Group, data: Array, root: int) -> None:
        self._wait(self._comm(group).Ibcast(data, root), data.nbytes)

    def allgather(self, group: Group, data: Array, out: Array, counts: Sequence[int]) -> None:
        self._wait(self._comm(group).Iallgatherv(data, [out, list(counts)]), out.nbytes)

    def barrier(self, group: Group) -> None:
        self._wait(self._comm(group).Ibarrier(), 0)

    def close(self) -> None:
        if not _failed and not self._MPI.Is_finalized():
            with contextlib.suppress(self._MPI.Exception):
                for comm in [*self._comms.values(), self._world]:
                    comm.Free()
