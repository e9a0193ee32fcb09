"""Collectives that carry no tensor, and the two calls on handles."""

from __future__ import annotations

from typing import Any

from hvdp._core import objects, submit
from hvdp._core.handles import Handle
from hvdp.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "barrier", "broadcast_object", "join", "poll", "synchronize"]


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank `root_rank`'s object on every member; the root gets its own object back.

    Any picklable object; lambdas and functions of `__main__` are pickled by value.

    Raises:
        InvalidArgumentError: on every member, if the object cannot be pickled.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set.number())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every member's object, in rank order, on every member.

    Raises:
        InvalidArgumentError: on every member, if any member's object cannot be pickled.
    """
    return objects.allgather_object(obj, name, process_set.number())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return on no member before all have called."""
    submit.barrier(process_set.number())


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Meanwhile the others go on: in their collectives this rank takes part with nothing to
    give. An Average divides by the number of ranks that still have data, other ops leave
    this one out, allgather gets no rows of it. Broadcast from a joined rank, alltoall and
    changes of process sets are errors on the ranks that call them.

    Args:
        device: accepted as Horovod accepts it; not needed.

    Returns:
        The last rank that joined.
    """
    return submit.join()


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous call; its result, or its error."""
    return handle.wait()
