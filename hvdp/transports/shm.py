"""Shared memory between the ranks of one host.

Each group owns one anonymous segment: a step counter per member, and two staging areas per
member. A member writes its part of a chunk into its staging area, raises its counter, and
reads its peers' areas once their counters have come as far. Two areas are enough: a peer
raises its counter for chunk k only after it has read chunk k-1.

An allreduce of a chunk goes by shards: member i reduces shard i of all members (so every
element is summed once, in rank order, and is bitwise equal everywhere), and the others
copy the result from its staging area. Two members, or any number with little to reduce, each
reduce the whole chunk instead: that moves no more bytes and waits half as often. Buckets
allocated here skip the staging: every member reads and writes its peers' buckets directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hvdp._core.arrays import Array, as_bytes
from hvdp._core.casts import is_narrow
from hvdp._core.kernels import pieces, reduce_into
from hvdp._core.ops import Reduction
from hvdp._core.process_sets import Group
from hvdp.transports._memory import SegmentExchange
from hvdp.transports._room import CACHE_LINE, PAGE, Room, round_up
from hvdp.transports.base import Buffer, Transport

__all__ = ["ShmTransport"]

_SMALL_BYTES = 1 << 15


def _chunk_bytes(nbytes: int, most: int, narrow: bool) -> int:
    """Small enough to overlap staging with reducing, large enough to make little of the waiting.

    16-bit floats take so long to reduce that there is less to gain from the overlap.
    """
    return min(most, max(most // 8, round_up(nbytes // (2 if narrow else 4), PAGE)))


def _shards(count: int, members: int, itemsize: int) -> list[tuple[int, int]]:
    """Element ranges by member, cut at cache lines so that no two members write to one."""
    step = round_up(-(-count // members), max(1, CACHE_LINE // itemsize))
    return [(min(i * step, count), min((i + 1) * step, count)) for i in range(members)]


def _offsets(counts: Sequence[int]) -> list[int]:
    """Where each part begins, and where the last one ends."""
    return [0, *accumulate(counts)]


class _SharedBuffer(Buffer):
    """A bucket together with its peers' ones."""

    def __init__(self, areas: list[Array], index: int) -> None:
        super().__init__(areas[index])
        self.areas = areas


class ShmTransport(Transport):
    """All members of every group must be on this host.

    Args:
        name: unique to this job and start; names the sockets over which memory is handed around.
        secret: shared by the ranks of the job.
        rank: this process's global rank.
    """

    name = "shm"

    def __init__(self, name: str, secret: bytes, rank: int) -> None:
        super().__init__()
        self._exchange = SegmentExchange(name, secret, rank)
        self._rooms: dict[int, Room] = {}
        self._segments: dict[int, int] = {}

    def close(self) -> None:
        self._exchange.close()
        self._rooms.clear()

    def abandon(self) -> None:
        self._exchange.close()

    def _segment(self, group: Group, nbytes: int) -> Array:
        serial = self._segments[group.number] = self._segments.get(group.number, 0) + 1
        key = f"{group.number}.{serial}"
        if group.index == 0:
            return self._exchange.create(key, nbytes, group.size - 1, self.pause)
        return self._exchange.fetch(key, group.ranks[0], self.pause)

    def _room(self, group: Group) -> Room:
        room = self._rooms.get(group.number)
        if room is None:
            segment = self._segment(group, Room.nbytes(group.size))
            room = self._rooms[group.number] = Room(segment, group, lambda seconds: self.pause(seconds))
        return room

    def board(self) -> memoryview | None:
        room = self._rooms.get(0)
        return room.board if room is not None else None

    def allocate(self, group: Group, nbytes: int) -> Buffer:
        if group.size == 1 or nbytes == 0:
            return super().allocate(group, nbytes)
        stride = round_up(nbytes, PAGE)
        segment = self._segment(group, stride * group.size).reshape(group.size, stride)
        return _SharedBuffer([area[:nbytes] for area in segment], group.index)

    def reduce_buffer(
        self, group: Group, buffer: Buffer, dtype: np.dtype[Any], count: int, reduction: Reduction
    ) -> None:
        if not isinstance(buffer, _SharedBuffer):
            super().reduce_buffer(group, buffer, dtype, count, reduction)
            return
        me = group.index
        areas = [area[: count * dtype.itemsize].view(dtype) for area in buffer.areas]
        for lo, hi in pieces(*_shards(count, group.size, dtype.itemsize)[me], dtype.itemsize):
            parts = [area[lo:hi] for area in areas]
            reduce_into(parts[me], parts, reduction)
            for index, part in enumerate(parts):
                if index != me:
                    np.copyto(part, parts[me])
        self.barrier(group)

    def allreduce(self, group: Group, data: Array, reduction: Reduction) -> None:
        if group.size == 1 or not data.size:
            reduce_into(data, [data], reduction)
        elif data.nbytes <= _SMALL_BYTES or (group.size == 2 and not is_narrow(data.dtype)):
            self._allreduce_exchanged(group, data, reduction)
        else:
            self._allreduce_sharded(group, data, reduction)

    def _allreduce_exchanged(self, group: Group, data: Array, reduction: Reduction) -> None:
        """Every member reduces everything for itself."""
        room, me = self._room(group), group.index
        step = room.stage_bytes // data.itemsize

        def stage(chunk: Array) -> list[Array]:
            stages = [area[: chunk.nbytes].view(chunk.dtype) for area in room.next_stages()]
            np.copyto(stages[me], chunk)
            return stages

        following = stage(data[:step])
        for lo in range(0, data.size, step):
            parts = following
            room.signal()
            room.wait()
            if lo + step < data.size:
                following = stage(data[lo + step : lo + 2 * step])
            parts[me] = chunk = data[lo : lo + step]
            reduce_into(chunk, parts, reduction)

    def _allreduce_sharded(self, group: Group, data: Array, reduction: Reduction) -> None:
        room, me, itemsize = self._room(group), group.index, data.itemsize
        step = _chunk_bytes(data.nbytes, room.stage_bytes, is_narrow(data.dtype)) // itemsize
        chunks = [data[lo : lo + step] for lo in range(0, data.size, step)]

        def stage(chunk: Array) -> tuple[Array, list[Array], list[tuple[int, int]]]:
            stages = [area[: chunk.nbytes].view(chunk.dtype) for area in room.next_stages()]
            shards = _shards(chunk.size, group.size, itemsize)
            for index, (lo, hi) in enumerate(shards):
                if index != me:
                    np.copyto(stages[me][lo:hi], chunk[lo:hi])
            return chunk, stages, shards

        following = stage(chunks[0])
        for number in range(len(chunks)):
            chunk, stages, shards = following
            room.signal()
            room.wait()
            for lo, hi in pieces(*shards[me], itemsize):
                parts = [area[lo:hi] for area in stages]
                parts[me] = chunk[lo:hi]
                reduce_into(chunk[lo:hi], parts, reduction)
                np.copyto(stages[me][lo:hi], chunk[lo:hi])
            room.signal()
            if number + 1 < len(chunks):
                following = stage(chunks[number + 1])
            room.wait()
            for index, (lo, hi) in enumerate(shards):
                if index != me:
                    np.copyto(chunk[lo:hi], stages[index][lo:hi])

    def broadcast(self, group: Group, data: Array, root: int) -> None:
        if group.size == 1:
            return
        room = self._room(group)
        for lo in range(0, data.size, room.stage_bytes):
            chunk = data[lo : lo + room.stage_bytes]
            stage = room.next_stages()[root][: chunk.size]
            if group.index == root:
                np.copyto(stage, chunk)
            room.signal()
            room.wait()
            if group.index != root:
                np.copyto(chunk, stage)

    def allgather(self, group: Group, data: Array, out: Array, counts: Sequence[int]) -> None:
        starts = _offsets(counts)
        parts = [out[starts[i] : starts[i + 1]] for i in range(group.size)]
        np.copyto(parts[group.index], data)
        if group.size == 1:
            return
        room = self._room(group)
        for lo in range(0, max(counts), room.stage_bytes):
            stages = room.next_stages()
            mine = as_bytes(data)[lo : lo + room.stage_bytes]
            np.copyto(stages[group.index][: mine.size], mine)
            room.signal()
            room.wait()
            for index, part in enumerate(parts):
                chunk = part[lo : lo + room.stage_bytes]
                if index != group.index:
                    np.copyto(chunk, stages[index][: chunk.size])

    def alltoall(self, group: Group, data: Array, out: Array, counts: Sequence[Sequence[int]]) -> None:
        """In rounds: in round r member i stages what it has for member i + r."""
        me, size = group.index, group.size
        sends, receives = _offsets(counts[me]), _offsets([row[me] for row in counts])
        np.copyto(out[receives[me] : receives[me + 1]], data[sends[me] : sends[me + 1]])
        for shift in range(1, size):
            room = self._room(group)
            to, source = (me + shift) % size, (me - shift) % size
            sending, receiving = data[sends[to] : sends[to + 1]], out[receives[source] : receives[source + 1]]
            for lo in range(0, max(counts[i][(i + shift) % size] for i in range(size)), room.stage_bytes):
                stages = room.next_stages()
                chunk = sending[lo : lo + room.stage_bytes]
                np.copyto(stages[me][: chunk.size], chunk)
                room.signal()
                room.wait()
                chunk = receiving[lo : lo + room.stage_bytes]
                np.copyto(chunk, stages[source][: chunk.size])

    def reducescatter(
        self, group: Group, data: Array, out: Array, counts: Sequence[int], reduction: Reduction
    ) -> None:
        """By chunks that hold an equal share for every member, so that all work all the time."""
        me, size, itemsize = group.index, group.size, data.itemsize
        if size == 1:
            reduce_into(out, [data], reduction)
            return
        room = self._room(group)
        starts = _offsets(counts)
        share = room.stage_bytes // size // CACHE_LINE * CACHE_LINE // itemsize
        for lo in range(0, max(counts), share):
            stages = [stage.view(data.dtype) for stage in room.next_stages()]
            for index in range(size):
                part = data[starts[index] + lo : min(starts[index] + lo + share, starts[index + 1])]
                if index != me:
                    np.copyto(stages[me][index * share : index * share + part.size], part)
            room.signal()
            room.wait()
            mine = data[starts[me] + lo : min(starts[me] + lo + share, starts[me + 1])]
            for first, last in pieces(0, mine.size, itemsize):
                parts = [stage[me * share + first : me * share + last] for stage in stages]
                parts[me] = mine[first:last]
                reduce_into(out[lo + first : lo + last], parts, reduction)

    def forget(self, group: Group) -> None:
        self._rooms.pop(group.number, None)

    def barrier(self, group: Group) -> None:
        if group.size > 1:
            room = self._room(group)
            room.signal()
            room.wait()
