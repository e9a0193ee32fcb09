"""What the cases of the kit have in common: where they are, and how they compare."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from hvdp._core.arrays import Array, as_bytes
from hvdp._core.process_sets import Group
from hvdp.testing.conformance.expected import PERIOD
from hvdp.transports.base import Transport

__all__ = ["Checks", "bytes_of", "noise"]

_GUARD = 16


class Checks:
    """One member's run of the kit; notes what is wrong and goes on.

    Attributes:
        case: what is being tried, for messages.
    """

    def __init__(self, transport: Transport, group: Group, thresholds: Sequence[int]) -> None:
        self.transport = transport
        self.group = group
        self.thresholds = thresholds
        self.faults: list[str] = []
        self.case = ""

    def fault(self, text: str) -> None:
        rank = self.group.ranks[self.group.index]
        self.faults.append(f"{self.case}, on rank {rank} of ranks {list(self.group.ranks)}: {text}")

    def account(self) -> str:
        shown = "\n".join(self.faults[:20])
        return f"{len(self.faults)} faults of transport {self.transport.name!r}:\n{shown}"

    def compare(self, found: Array, wanted: Array, tolerance: float = 0.0) -> None:
        """Equal item by item, or within a relative tolerance."""
        if found.shape != wanted.shape:
            self.fault(f"{found.shape} items instead of {wanted.shape}")
            return
        wrong = found != wanted
        if tolerance and wrong.any():
            exact = np.asarray(wanted, np.complex128)
            with np.errstate(invalid="ignore"):
                wrong &= ~(np.abs(np.asarray(found, np.complex128) - exact) <= tolerance * np.abs(exact))
        if wrong.any():
            at = int(np.argmax(wrong))
            self.fault(f"item {at} is {found[at]}, not {wanted[at]} ({int(wrong.sum())} items are wrong)")

    def same(self, data: Array) -> None:
        """Bitwise equal on all members."""
        mine = np.frombuffer(hashlib.sha256(as_bytes(data).data).digest(), np.uint8)
        all_of_them = np.empty(mine.size * self.group.size, np.uint8)
        self.transport.allgather(self.group, mine, all_of_them, [mine.size] * self.group.size)
        digests = all_of_them.reshape(self.group.size, -1)
        differing = [self.group.ranks[i] for i, digest in enumerate(digests) if (digest != digests[0]).any()]
        if differing:
            self.fault(f"not bitwise equal: ranks {differing} differ from the first, here {data[:4]}")

    def sizes(self, itemsize: int) -> list[int]:
        around = [size // itemsize + more for size in self.thresholds for more in (-1, 0, 1)]
        return [0, 1, 7, 1001, *around, 2 * max(self.thresholds) // itemsize + 3]

    def guarded(self, content: Array) -> tuple[Array, Array]:
        """Memory with other content before and behind, and the part of it to work on."""
        whole = np.full(content.size + 2 * _GUARD, content.dtype.type(1))
        part = whole[_GUARD : whole.size - _GUARD]
        part[...] = content
        return whole, part

    def check_guards(self, whole: Array) -> None:
        if (whole[:_GUARD] != 1).any() or (whole[-_GUARD:] != 1).any():
            self.fault("memory beside the array was overwritten")


def noise(index: int, count: int) -> Array:
    """The same on every rank for one index; of a magnitude that sums exactly in float32 when 16-bit."""
    values = np.random.default_rng([index, count]).uniform(0.25, 4, count)
    return np.where(np.arange(count) % 3 == index % 3, -values, values)


def bytes_of(index: int, count: int) -> Array:
    """The first `count` bytes that member `index` sends."""
    return np.resize((np.arange(PERIOD) * (index + 2) + index).astype(np.uint8), count)
