"""The collectives on NumPy arrays.

Every function here is collective: all members of the process set call it with the same
name, shape, dtype and options, in any order and from any thread. A disagreement raises
MismatchError on every member, a wrong argument on any rank InvalidArgumentError on every
member, and the death of a rank HorovodInternalError; nothing hangs.

Calls without a name are matched by their order on each rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hvdp._core import submit
from hvdp._core.arrays import Array
from hvdp._core.handles import Handle
from hvdp._core.objects import allgather_object, broadcast_object

__all__ = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "poll",
    "synchronize",
]


def allreduce(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce over all ranks into a new array of the same shape and dtype.

    Args:
        average: the older way to say `op`: True is Average, False is Sum.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor, postscale_factor: each rank's values are multiplied before, the result after.
    """
    handle = allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor)
    result: Array = handle.wait()
    return result


def allreduce_async(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`allreduce` that returns a handle at once; `tensor` may be reused at once."""
    data = np.array(tensor, order="C")
    handle = submit.allreduce(data, average, name, op, prescale_factor, postscale_factor)
    return handle.then(lambda flat: flat.reshape(data.shape))


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """`allreduce` in place; returns `tensor`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor)
    result: Array = handle.wait()
    return result


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`allreduce_` that returns a handle; leave `tensor` alone until it completes."""
    data = submit.workspace(tensor)
    handle = submit.allreduce(data, average, name, op, prescale_factor, postscale_factor)
    return handle.then(lambda flat: submit.write_back(tensor, data))


def broadcast(tensor: ArrayLike, root_rank: int, name: str | None = None) -> Array:
    """Rank `root_rank`'s values in a new array; `tensor` gives shape and dtype on the others."""
    result: Array = broadcast_async(tensor, root_rank, name).wait()
    return result


def broadcast_async(tensor: ArrayLike, root_rank: int, name: str | None = None) -> Handle:
    """`broadcast` that returns a handle at once; `tensor` may be reused at once."""
    return submit.broadcast(np.array(tensor, order="C"), root_rank, name)


def broadcast_(tensor: Array, root_rank: int, name: str | None = None) -> Array:
    """`broadcast` in place; returns `tensor`."""
    result: Array = broadcast_async_(tensor, root_rank, name).wait()
    return result


def broadcast_async_(tensor: Array, root_rank: int, name: str | None = None) -> Handle:
    """`broadcast_` that returns a handle; leave `tensor` alone until it completes."""
    data = submit.workspace(tensor)
    return submit.broadcast(data, root_rank, name).then(lambda _: submit.write_back(tensor, data))


def allgather(tensor: ArrayLike, name: str | None = None) -> Array:
    """All ranks' arrays joined along the first dimension, in rank order.

    First dimensions may differ between ranks (0 is allowed), the others may not; a scalar
    counts as an array of one.
    """
    result: Array = allgather_async(tensor, name).wait()
    return result


def allgather_async(tensor: ArrayLike, name: str | None = None) -> Handle:
    """`allgather` that returns a handle at once; `tensor` may be reused at once."""
    return submit.allgather(np.array(tensor, order="C"), name)


def barrier() -> None:
    """Return on no rank before all have called."""
    submit.barrier().wait()


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous call; its result, or its error."""
    return handle.wait()
