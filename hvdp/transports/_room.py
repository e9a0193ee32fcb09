"""The memory that a group's members share: step counters, the board for offers, staging areas."""

from __future__ import annotations

import os
import platform
import select
import threading
import time
from functools import cache
from pathlib import Path

from hvdp._core.arrays import Array
from hvdp._core.offers import LINE_WORDS
from hvdp._core.process_sets import Group
from hvdp.transports.base import Pause

__all__ = ["CACHE_LINE", "PAGE", "Room", "round_up"]

CACHE_LINE = 8 * LINE_WORDS
PAGE = 4096
_SPINS = 200
_YIELD_SECONDS = 0.0005
_PAUSE_SECONDS = 0.0005
_LEAST_STAGE_BYTES, _MOST_STAGE_BYTES = 1 << 20, 1 << 21
_L2_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
_NEEDS_FENCE = platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")
_fence_lock = threading.Lock()


def _fence() -> None:
    """Order memory accesses before and after: two lock cycles are a full barrier on ARMv8
    (an acquire is never taken before an earlier release); x86 orders stores by itself."""
    if _NEEDS_FENCE:
        for _ in range(2):
            with _fence_lock:
                pass


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@cache
def _stage_bytes() -> int:
    """As large as a core's L2 cache: a peer reads faster what has left the cache of who wrote it."""
    try:
        kib = int(_L2_CACHE.read_text().strip().removesuffix("K"))
    except (OSError, ValueError):
        return _LEAST_STAGE_BYTES
    return min(max(kib << 10, _LEAST_STAGE_BYTES), _MOST_STAGE_BYTES) // PAGE * PAGE


class Room:
    """One group's counters and staging areas.

    Args:
        segment: of `nbytes` bytes as the member that created it counts them; zero at first.

    Attributes:
        stage_bytes: the size of a staging area.
    """

    def __init__(self, segment: Array, group: Group, pause: Pause) -> None:
        self._me = group.index
        self._pause = pause
        # A memoryview: reading one item of it costs a third of reading a NumPy item.
        self._counters = segment[: group.size * CACHE_LINE].data.cast("Q")
        self._slots = [i * CACHE_LINE // 8 for i in range(group.size)]
        self._others = [slot for i, slot in enumerate(self._slots) if i != group.index]
        self._step = 0
        self._turn = 0
        self.board = segment[group.size * CACHE_LINE : 2 * group.size * CACHE_LINE].data.cast("Q")
        start = round_up(2 * group.size * CACHE_LINE, PAGE)
        areas = segment[start:].reshape(2, group.size, -1)
        self.stage_bytes = areas.shape[2]
        self._stages = [list(areas[turn]) for turn in range(2)]

    @staticmethod
    def nbytes(members: int) -> int:
        return round_up(2 * members * CACHE_LINE, PAGE) + 2 * members * _stage_bytes()

    def next_stages(self) -> list[Array]:
        """The members' staging areas for the next chunk."""
        self._turn ^= 1
        return self._stages[self._turn]

    def signal(self) -> None:
        """Tell the peers that everything written so far may be read."""
        self._step += 1
        _fence()
        self._counters[self._slots[self._me]] = self._step

    def wait(self) -> None:
        """Until every peer has signalled as often as we have."""
        counters, step = self._counters, self._step
        for slot in self._others:
            if counters[slot] < step:
                self._wait_for(slot, step)
        _fence()

    def _wait_for(self, slot: int, step: int) -> None:
        """Spin while the peer is surely about to signal, then give the core away, then sleep."""
        counters = self._counters
        for _ in range(_SPINS):
            if counters[slot] >= step:
                return
        until = time.perf_counter() + _YIELD_SECONDS
        while time.perf_counter() < until:
            # To other processes, and to this one's other threads: a sleep of 0 s would take 70 us.
            os.sched_yield()
            select.select([], [], [], 0)
            if counters[slot] >= step:
                return
        while counters[slot] < step:
            self._pause(_PAUSE_SECONDS)
