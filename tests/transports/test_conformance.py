"""Every transport passes the published kit, and the kit catches transports that are wrong."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

from hvdp._core.ops import Average, Reduction
from hvdp._core.process_sets import Group
from hvdp.launch.environments import detect
from hvdp.testing import World, check_transport, run_ranks, worlds
from hvdp.transports.base import Buffer, Transport
from hvdp.transports.local import LocalTransport
from hvdp.transports.mpi import MpiTransport
from hvdp.transports.shm import ShmTransport


def _everyone() -> Group:
    place = detect(os.environ)
    return Group(0, tuple(range(place.size)), place.rank)


def _shm(kind: type[ShmTransport], number: int = 0) -> ShmTransport:
    place = detect(os.environ)
    return kind(f"{place.address.partition(':')[2]}.kit.{number}", place.secret, place.rank)


def _check(name: str) -> None:
    group = _everyone()
    if name == "shm":
        transport: Transport = _shm(ShmTransport)
    else:
        from mpi4py import MPI

        transport = MpiTransport(MPI.COMM_WORLD.Dup())
    check_transport(transport, group)


@pytest.mark.parametrize("world", worlds(shm=(1, 2, 3, 4), mpi=(2, 3, 4)), ids=str)
def test_transport_keeps_the_contract(world: World) -> None:
    world.run(_check, world.transport)


def test_local_keeps_the_contract() -> None:
    check_transport(LocalTransport(), Group(0, (0,), 0))


class _LosesTheEnd(ShmTransport):
    """Wrong in the last item beyond a size."""

    def allreduce(self, group, data, reduction):
        kept = data[-1:].copy()
        super().allreduce(group, data, reduction)
        if data.nbytes > 1 << 12:
            data[-1:] = kept


class _DiffersInABit(ShmTransport):
    """One rank rounds another way."""

    def allreduce(self, group, data, reduction):
        super().allreduce(group, data, reduction)
        if group.index == 1 and data.dtype.name == "float32" and data.size > 200:
            data[200] = np.nextafter(data[200], np.float32(np.inf))


class _Overflows(ShmTransport):
    """Averages by way of the plain sum."""

    def allreduce(self, group, data, reduction):
        if reduction.op is Average and data.dtype.kind in "fV":
            super().allreduce(group, data, Reduction(Average, 1, reduction.prescale, reduction.postscale))
            data /= data.dtype.type(group.size)
        else:
            super().allreduce(group, data, reduction)


class _RoundsTwice(ShmTransport):
    """Sums 16-bit floats as they are."""

    def allreduce(self, group, data, reduction):
        if data.dtype.name not in ("float16", "bfloat16") or reduction != Reduction(reduction.op, group.size):
            super().allreduce(group, data, reduction)
            return
        rows = np.zeros((group.size, data.size), np.float32)
        rows[group.index] = data
        flat = rows.reshape(-1)
        super().allreduce(group, flat, Reduction(Average, 1))
        narrow = rows.astype(data.dtype)
        total = narrow[0]
        for row in narrow[1:]:
            total = total + row
        data[...] = total / data.dtype.type(group.size) if reduction.op is Average else total


class _IgnoresScaling(ShmTransport):
    def allreduce(self, group, data, reduction):
        super().allreduce(group, data, Reduction(reduction.op, reduction.divisor, reduction.prescale))


class _WritesBeyond(ShmTransport):
    def allgather(self, group, data, out, counts):
        super().allgather(group, data, out, counts)
        if out.base is not None and out.size > 100:
            out.base[-1] += 1


class _AlwaysFromTheFirst(ShmTransport):
    def broadcast(self, group, data, root):
        super().broadcast(group, data, 0)


class _MixesUp(ShmTransport):
    """Members' parts in the wrong order where all are equally long."""

    def allgather(self, group, data, out, counts):
        super().allgather(group, data, out, counts)
        if len(set(counts)) == 1 and group.size > 1:
            out[...] = np.roll(out, counts[0])


class _SendsBack(ShmTransport):
    """Gives every member its own part for the first one."""

    def alltoall(self, group, data, out, counts):
        super().alltoall(group, data, out, counts)
        mine = counts[group.index][0]
        if group.index and mine == counts[0][group.index]:
            out[:mine] = data[:mine]


class _ScattersEvenly(ShmTransport):
    """Takes parts to be equally long."""

    def reducescatter(self, group, data, out, counts, reduction):
        mean = sum(counts) // group.size
        super().allreduce(group, data, reduction)
        out[...] = np.resize(data[mean * group.index :], out.size)


class _NeverWaits(ShmTransport):
    def barrier(self, group):
        if group.number:
            super().barrier(group)


class _Dirty(ShmTransport):
    def allocate(self, group, nbytes):
        buffer = super().allocate(group, nbytes)
        buffer.data[nbytes // 2] = 1
        return buffer


class _ReducesAll(ShmTransport):
    """Takes the whole buffer for its content."""

    def reduce_buffer(self, group, buffer, dtype, count, reduction):
        super().reduce_buffer(group, buffer, dtype, buffer.data.nbytes // dtype.itemsize, reduction)


class _OneGroupOnly(ShmTransport):
    """Takes every group's members for counted from its first."""

    def broadcast(self, group, data, root):
        super().broadcast(group, data, root if len(group.ranks) == group.ranks[-1] + 1 else 0)


class _Forgets(ShmTransport):
    def __init__(self, *args):
        super().__init__(*args)
        self.given: list[Buffer] = []

    def allocate(self, group, nbytes):
        self.given.append(super().allocate(group, nbytes))
        return self.given[-1]

    def close(self):
        super().close()
        for buffer in self.given:
            buffer.data[...] = 0


class _StaysAway(ShmTransport):
    """One rank does not take part, so that the others wait for ever."""

    def barrier(self, group):
        while group.index == 1:
            self.pause(0.01)
        super().barrier(group)


_BROKEN: dict[type[ShmTransport], str] = {
    _LosesTheEnd: r"allreduce Sum of \d+ uint8, on rank 0 of ranks \[0, 1\]: item \d+ is -?\d+, not -?\d+",
    _DiffersInABit: r"float32, on rank 0 of ranks \[0, 1\]: not bitwise equal: ranks \[1\] differ",
    _Overflows: r"average of 40000.0 and 40000.0 in float16.*inf",
    _RoundsTwice: r"one rounding in Sum of bfloat16",
    _IgnoresScaling: r"allreduce Average of uint16 scaled by 3.0 before and 0.25 after",
    _WritesBeyond: r"allgather of \[.*\] bytes.*: memory beside the array was overwritten",
    _AlwaysFromTheFirst: r"broadcast of 7 bytes from index 1",
    _MixesUp: r"allgather of \[8, 8\] bytes",
    _SendsBack: r"alltoall of \[\[8, 8\], \[8, 8\]\] bytes, on rank 1",
    _ScattersEvenly: r"reducescatter Sum of \[0, 2\] uint8, on rank 1",
    _NeverWaits: r"barrier, index 1 comes late.*a rank left \d+ ns before the last one came",
    _Dirty: r"allocate 1 float16, on rank 0.* of which 1 are not 0",
    _ReducesAll: r"reduce_buffer Sum of 1 int64, turn 0.*: items beyond the count were overwritten",
    _OneGroupOnly: r"group of ranks \[1, 2\] among \[0, 1, 2\]",
    _Forgets: r"close, on rank 0 of ranks \[0, 1\]: a buffer has lost its content",
    _StaysAway: r"waited in vain for a peer",
}


def _check_broken(kinds: list[type[ShmTransport]]) -> list[str]:
    return [_said_of(kind, number) for number, kind in enumerate(kinds)]


def _said_of(kind: type[ShmTransport], number: int) -> str:
    timeout = 2.0 if kind is _StaysAway else 60.0
    try:
        check_transport(_shm(kind, number), _everyone(), thresholds=(1 << 10, 1 << 13), timeout=timeout)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def said() -> dict[type[ShmTransport], list[str]]:
    """What the kit says of each broken transport, by rank."""
    said = {}
    for size, kinds in ((2, _BROKEN), (3, [_RoundsTwice, _OneGroupOnly])):
        by_rank = run_ranks(_check_broken, size, list(kinds), timeout=90, warm=True)
        said.update(zip(kinds, zip(*by_rank, strict=True), strict=True))
    return said


@pytest.mark.parametrize("kind", _BROKEN, ids=lambda kind: kind.__name__[1:])
def test_the_kit_catches(kind: type[ShmTransport], said: dict[type[ShmTransport], list[str]]) -> None:
    texts = said[kind]
    assert any(texts), f"nobody noticed that {kind.__doc__}"
    assert any(re.search(_BROKEN[kind], line) for text in texts for line in text.splitlines()), texts
