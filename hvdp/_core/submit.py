"""From arguments to submitted operations: what every adapter's collectives share."""

from __future__ import annotations

import numpy as np

from hvdp._core import operations as _operations  # noqa: F401 - the package, before its modules
from hvdp._core.arrays import Array
from hvdp._core.engine import Engine
from hvdp._core.handles import Handle
from hvdp._core.operations.allgather import Allgather
from hvdp._core.operations.allreduce import Allreduce
from hvdp._core.operations.barrier import Barrier
from hvdp._core.operations.broadcast import Broadcast
from hvdp._core.ops import ReduceOp
from hvdp._core.runtime import runtime
from hvdp.errors import InvalidArgumentError

__all__ = ["allgather", "allreduce", "barrier", "broadcast", "workspace", "write_back"]


def workspace(tensor: Array) -> Array:
    """What an in-place operation works on: `tensor` itself, or a copy where it is not contiguous.

    Raises:
        InvalidArgumentError: not a writable array.
    """
    if not isinstance(tensor, np.ndarray) or not tensor.flags.writeable:
        what = "a read-only array" if isinstance(tensor, np.ndarray) else type(tensor).__name__
        raise InvalidArgumentError(f"an in-place operation needs a writable numpy.ndarray. Received: {what}")
    return tensor if tensor.flags.c_contiguous else np.array(tensor, order="C")


def write_back(tensor: Array, data: Array) -> Array:
    """Copy the result into `tensor` where `workspace` had to copy; returns `tensor`."""
    if data is not tensor:
        tensor[...] = data
    return tensor


def allreduce(
    data: Array,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
) -> Handle:
    """In place on `data`, C-contiguous; the handle's result is `data` as one dimension."""
    engine = runtime.require("allreduce")
    resolved = ReduceOp.resolve(average, op)
    full_name, once = _named(engine, "allreduce", name)
    return engine.submit(
        Allreduce(
            full_name,
            data,
            data.shape,
            resolved,
            float(prescale_factor),
            float(postscale_factor),
            process_set=0,
            once=once,
        )
    )


def broadcast(data: Array, root_rank: int, name: str | None) -> Handle:
    """In place on `data`, C-contiguous, which is the handle's result."""
    engine = runtime.require("broadcast")
    full_name, once = _named(engine, "broadcast", name)
    members = engine.group(0).ranks
    return engine.submit(Broadcast(full_name, data, data.shape, root_rank, 0, members, once))


def allgather(data: Array, name: str | None) -> Handle:
    """Reads `data`, C-contiguous; the handle's result is a new array."""
    engine = runtime.require("allgather")
    full_name, once = _named(engine, "allgather", name)
    return engine.submit(Allgather(full_name, data, 0, once))


def barrier() -> Handle:
    engine = runtime.require("barrier")
    return engine.submit(Barrier(engine.unnamed("barrier", 0), 0))


def _named(engine: Engine, kind: str, name: str | None) -> tuple[str, bool]:
    """The name, prefixed by its kind as Horovod does, and whether it was made up."""
    if name is None:
        return engine.unnamed(kind, 0), True
    return f"{kind}.{name}", False
