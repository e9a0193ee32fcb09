"""The contract of a transport, and buffers that it may allocate.

A transport moves flat, C-contiguous, one-dimensional arrays between the members of a
group. Every method but the last three is collective: all members of the group call it in the
same order with fitting arguments, which the control plane has made sure of beforehand.
One thread, the engine's, calls all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvdp._core.arrays import Array
from hvdp._core.ops import Reduction
from hvdp._core.process_sets import Group

__all__ = ["Buffer", "Pause", "Transport"]

Pause = Callable[[float], None]
"""Wait up to so many seconds for a word from the control plane; raises if the job has failed.

A transport that waits for a peer inside an operation calls it again and again, so that a
dead peer ends the wait.
"""


class Buffer:
    """Memory for a bucket, `nbytes` long and zeroed, as a flat uint8 array `data`."""

    def __init__(self, data: Array) -> None:
        self.data = data

    def view(self, dtype: np.dtype[Any], count: int) -> Array:
        """The first `count` items as `dtype`; shares memory."""
        return self.data[: count * dtype.itemsize].view(dtype)


class Transport(ABC):
    """One way between ranks.

    Attributes:
        name: as in HVDP_CPU_OPERATIONS.
        order_free: an element's result does not depend on what is reduced together with it,
            so that tensors may be fused without changing a bit.
        pause: set by the engine before the first operation.
        broken: set by the engine before `close` if a peer has died: do not wait for it.
    """

    name: ClassVar[str]
    order_free: ClassVar[bool] = True

    def __init__(self) -> None:
        self.pause: Pause = lambda seconds: None
        self.broken = False

    def board(self) -> memoryview | None:
        """Zeroed memory that all ranks of the job see: `offers.LINE_WORDS` uint64 words for each.

        Not collective; None where there is none, or not before the first operation.
        """
        return None

    def allocate(self, group: Group, nbytes: int) -> Buffer:
        """Zeroed memory from which this transport reduces fastest.

        Raises:
            TransportError: there is no room; on every member.
        """
        return Buffer(np.zeros(nbytes, np.uint8))

    def reduce_buffer(
        self, group: Group, buffer: Buffer, dtype: np.dtype[Any], count: int, reduction: Reduction
    ) -> None:
        """Allreduce in place the first `count` items of a buffer from `allocate`."""
        self.allreduce(group, buffer.view(dtype, count), reduction)

    @abstractmethod
    def allreduce(self, group: Group, data: Array, reduction: Reduction) -> None:
        """Reduce `data` over the members in place; bitwise equal on all of them afterwards."""

    @abstractmethod
    def broadcast(self, group: Group, data: Array, root: int) -> None:
        """Overwrite `data` (uint8) with that of the member at index `root`."""

    @abstractmethod
    def allgather(self, group: Group, data: Array, out: Array, counts: Sequence[int]) -> None:
        """Concatenate the members' `data` (uint8, `counts[index]` bytes) into `out`, in member order."""

    @abstractmethod
    def alltoall(self, group: Group, data: Array, out: Array, counts: Sequence[Sequence[int]]) -> None:
        """Exchange bytes: counts[i][j] of them go from member i to member j.

        `data` and `out` (uint8) hold what this member sends, and receives, in member order.
        """

    @abstractmethod
    def reducescatter(
        self, group: Group, data: Array, out: Array, counts: Sequence[int], reduction: Reduction
    ) -> None:
        """Reduce `data` over the members; member i gets the i-th counts[i] items in `out`."""

    @abstractmethod
    def barrier(self, group: Group) -> None:
        """Return on no member before all have called."""

    def forget(self, group: Group) -> None:  # noqa: B027 - most have nothing to forget
        """The group will not be used again."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything; not collective; buffers stay readable while referenced."""

    def abandon(self) -> None:  # noqa: B027 - most have none
        """In a forked child: close descriptors whose copies would outlive this process."""
