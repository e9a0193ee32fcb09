"""The collectives on torch tensors of any device and layout; see `hvdp.collectives`."""

from __future__ import annotations

from typing import Any

import torch

from hvdp._core import submit
from hvdp._core.handles import Handle
from hvdp.torch._arrays import as_array, as_tensor, workspace, write_back

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "poll",
    "synchronize",
]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce over all ranks into a new tensor of the same shape, dtype and device.

    Args:
        average: the older way to say `op`: True is Average, False is Sum.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor, postscale_factor: each rank's values are multiplied before, the result after.
    """
    handle = allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor)
    return _wait(handle)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`allreduce` that returns a handle at once; `tensor` may be reused at once."""
    work = workspace(tensor, copy=True)
    handle = submit.allreduce(as_array(work), average, name, op, prescale_factor, postscale_factor)
    return handle.then(lambda _: work.to(tensor.device))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """`allreduce` in place; returns `tensor`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor)
    return _wait(handle)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`allreduce_` that returns a handle; leave `tensor` alone until it completes."""
    work = workspace(tensor, copy=False)
    handle = submit.allreduce(as_array(work), average, name, op, prescale_factor, postscale_factor)
    return handle.then(lambda _: write_back(tensor, work))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Rank `root_rank`'s values in a new tensor; `tensor` gives shape and dtype on the others."""
    return _wait(broadcast_async(tensor, root_rank, name))


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """`broadcast` that returns a handle at once; `tensor` may be reused at once."""
    work = workspace(tensor, copy=True)
    return submit.broadcast(as_array(work), root_rank, name).then(lambda _: work.to(tensor.device))


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """`broadcast` in place; returns `tensor`."""
    return _wait(broadcast_async_(tensor, root_rank, name))


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """`broadcast_` that returns a handle; leave `tensor` alone until it completes."""
    work = workspace(tensor, copy=False)
    return submit.broadcast(as_array(work), root_rank, name).then(lambda _: write_back(tensor, work))


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """All ranks' tensors joined along the first dimension, in rank order.

    First dimensions may differ between ranks (0 is allowed), the others may not; a scalar
    counts as a tensor of one.
    """
    return _wait(allgather_async(tensor, name))


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """`allgather` that returns a handle; leave `tensor` alone until it completes."""
    work = workspace(tensor, copy=False)
    return submit.allgather(as_array(work), name).then(lambda out: as_tensor(out).to(tensor.device))


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous call; its result, or its error."""
    return handle.wait()


def _wait(handle: Handle) -> torch.Tensor:
    result: torch.Tensor = handle.wait()
    return result
