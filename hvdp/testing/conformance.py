"""`check_transport()`: the contract of `hvdp.transports.base` as a test of any transport."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdp._core.arrays import Array, as_bytes
from hvdp._core.ops import Average, Max, Min, Product, ReduceOp, Reduction, Sum
from hvdp._core.process_sets import Group
from hvdp._core.rendezvous import host_key
from hvdp.testing._expected import DTYPES, PERIOD, epsilon, expected, fits, pattern, single_rounding_fault
from hvdp.transports.base import Transport

__all__ = ["check_transport"]

_GUARD = 16
_FIRST_SUBGROUP = 1000


def check_transport(
    transport: Transport,
    group: Group,
    *,
    thresholds: Sequence[int] = (1 << 15, 1 << 21),
    timeout: float = 60.0,
) -> None:
    """Put a transport through everything its contract promises; collective over `group`.

    Call it on every member, each with its own ready transport, in processes of their own:

        def check() -> None:
            place = detect(os.environ)
            check_transport(MyTransport(...), Group(0, tuple(range(place.size)), place.rank))

        run_ranks(check, 3)

    and for one, two, three and four ranks: the ways of one, of a pair, of an odd number and
    of a power of two often differ. No engine may be running on the transport. It is closed at
    the end; what an operation does after that is left to the transport, for the engine makes none.

    Args:
        thresholds: sizes in bytes at which the transport changes its ways; checked are sizes
            just below, at and above each, and well beyond the largest.
        timeout: seconds that waiting for peers may take in all. It is noticed by a transport
            that waits as it should, calling its `pause`.

    Raises:
        AssertionError: names every case that failed, the ranks and the values. A rank goes on
            after a wrong value, so that its peers get to the end too.
    """
    kit = _Kit(transport, group, thresholds)
    engines_pause = transport.pause
    deadline = time.monotonic() + timeout

    def pause(seconds: float) -> None:
        engines_pause(seconds)
        time.sleep(seconds)
        if time.monotonic() > deadline:
            kit.fault("waited in vain for a peer")
            raise AssertionError(kit.account())

    transport.pause = pause
    try:
        kit.run()
    finally:
        transport.pause = engines_pause
    assert not kit.faults, kit.account()


class _Kit:
    def __init__(self, transport: Transport, group: Group, thresholds: Sequence[int]) -> None:
        self.transport = transport
        self.group = group
        self.thresholds = thresholds
        self.faults: list[str] = []
        self.case = ""

    def run(self) -> None:
        self.allgather()
        self.broadcast()
        self.barrier()
        self.allreduce()
        self.scaling()
        self.averages_do_not_overflow()
        self.rounds_once()
        self.random_floats()
        self.buffers()
        self.mixture()
        self.subgroups()
        self.close()

    # What went wrong ----------------------------------------------------------------------

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

    # Cases --------------------------------------------------------------------------------

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

    def reduced(self, group: Group, dtype: np.dtype[Any], count: int, reduction: Reduction) -> Array:
        whole, part = self.guarded(np.resize(pattern(dtype, group, group.index, reduction.op), count))
        self.transport.allreduce(group, part, reduction)
        self.check_guards(whole)
        wanted = np.resize(expected(dtype, group, reduction), count)
        # A factor that is no power of two may be rounded at another place.
        exact = reduction.op is not Average and reduction.prescale == reduction.postscale == 1.0
        inexact = dtype.kind not in "biu" and not exact
        self.compare(part, wanted, 4 * epsilon(dtype) if inexact else 0.0)
        return part

    def allreduce(self) -> None:
        for dtype in DTYPES:
            for op in ReduceOp:
                if fits(dtype, op):
                    sizes = self.sizes(dtype.itemsize) if op in (Sum, Average) else [1, 2 * PERIOD]
                    for count in sizes:
                        self.case = f"allreduce {op.name} of {count} {dtype}"
                        self.same(self.reduced(self.group, dtype, count, Reduction(op, self.group.size)))

    def scaling(self) -> None:
        for dtype in DTYPES:
            for op, before, after in ((Sum, 0.5, 1.0), (Average, 3.0, 0.25), (Sum, 1.0, 1 / 3)):
                if fits(dtype, op) and dtype.kind != "b":
                    self.case = f"allreduce {op.name} of {dtype} scaled by {before} before and {after} after"
                    scaled = Reduction(op, self.group.size, before, after)
                    self.same(self.reduced(self.group, dtype, PERIOD, scaled))

    def averages_do_not_overflow(self) -> None:
        for dtype in DTYPES:
            if dtype.kind in "bc" or (dtype.itemsize == 8 and dtype.kind in "iu"):
                continue
            big = {"float16": 40000.0, "bfloat16": 3e38, "float32": 3e38, "float64": 1.5e308}.get(dtype.name)
            value = dtype.type(np.iinfo(dtype).max if big is None else big)
            self.case = f"average of {value} and {value} in {dtype}"
            data = np.full(PERIOD, value)
            self.transport.allreduce(self.group, data, Reduction(Average, self.group.size))
            self.compare(data, np.full(PERIOD, value), 4 * epsilon(dtype))

    def rounds_once(self) -> None:
        for dtype in DTYPES:
            if dtype.name in ("float16", "bfloat16"):
                for op in (Sum, Average):
                    self.case = f"one rounding in {op.name} of {dtype}"
                    rows = [_noise(i, 1000, "rounding").astype(dtype) for i in range(self.group.size)]
                    data = rows[self.group.index].copy()
                    self.transport.allreduce(self.group, data, Reduction(op, self.group.size))
                    if text := single_rounding_fault(data, rows, op):
                        self.fault(text)
                    self.same(data)

    def random_floats(self) -> None:
        count = max(self.thresholds) // 4 + 5
        for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
            for op in (Sum, Average):
                self.case = f"{op.name} of {count} random {dtype}"
                rows = [_noise(i, count, "floats").astype(dtype) for i in range(self.group.size)]
                data = rows[self.group.index].copy()
                self.transport.allreduce(self.group, data, Reduction(op, self.group.size))
                exact = np.sum(rows, axis=0, dtype=np.float64) / (self.group.size if op is Average else 1)
                room = self.group.size * float(np.finfo(dtype).eps) * np.sum(np.abs(rows), axis=0)
                wrong = np.abs(data - exact) > room
                self.compare(np.where(wrong, data, 0), np.where(wrong, exact, 0))
                self.same(data)
        self.case = "Sum with NaN and infinities"
        data = np.array([1.0, np.nan if self.group.index == 0 else 1.0, np.inf])
        self.transport.allreduce(self.group, data, Reduction(Sum, self.group.size))
        if not (np.isnan(data[1]) and np.isposinf(data[2]) and data[0] == self.group.size):
            self.fault(f"the result is {data}")

    def broadcast(self) -> None:
        for root in range(self.group.size):
            for count in self.sizes(1):
                self.case = f"broadcast of {count} bytes from index {root}"
                self.broadcasted(self.group, root, count)

    def broadcasted(self, group: Group, root: int, count: int) -> None:
        whole, part = self.guarded(_bytes(group.index, count))
        self.transport.broadcast(group, part, root)
        self.check_guards(whole)
        self.compare(part, _bytes(root, count))

    def allgather(self) -> None:
        size = self.group.size
        beyond = 2 * max(self.thresholds) + 5
        for counts in (
            [0] * size,
            [8] * size,
            [3 * i for i in range(size)],
            [0] * (size - 1) + [5],
            [beyond if i == size // 2 else i for i in range(size)],
            [self.thresholds[0] + 1 - i for i in range(size)],
        ):
            self.case = f"allgather of {counts} bytes"
            self.gathered(self.group, counts)

    def gathered(self, group: Group, counts: list[int]) -> None:
        whole, out = self.guarded(np.zeros(sum(counts), np.uint8))
        self.transport.allgather(group, _bytes(group.index, counts[group.index]), out, counts)
        self.check_guards(whole)
        self.compare(out, np.concatenate([_bytes(i, count) for i, count in enumerate(counts)]))

    def barrier(self) -> None:
        """Members of this host share a clock: none may leave before the last one has come."""
        host = int.from_bytes(hashlib.sha256(host_key().encode()).digest()[:6], "little")
        for late in range(self.group.size):
            self.case = f"barrier, index {late} comes late"
            if late == self.group.index:
                time.sleep(0.02)
            came = time.monotonic_ns()
            self.transport.barrier(self.group)
            mine = np.array([host, came, time.monotonic_ns()], np.int64)
            everyone = np.empty(3 * self.group.size, np.int64)
            self.transport.allgather(self.group, as_bytes(mine), as_bytes(everyone), [24] * self.group.size)
            here = everyone.reshape(-1, 3)[everyone[::3] == host]
            if here[:, 1].max() > here[:, 2].min():
                self.fault(f"a rank left {here[:, 1].max() - here[:, 2].min()} ns before the last one came")

    def buffers(self) -> None:
        """The barrier stands for the agreement, which finds that all members have filled theirs."""
        dtypes = [dtype for dtype in DTYPES if dtype.name in ("float32", "float16", "int64")]
        buffers = []
        for dtype in dtypes:
            for count in (1, PERIOD, max(self.thresholds) // dtype.itemsize + 3):
                self.case = f"allocate {count} {dtype}"
                buffer = self.transport.allocate(self.group, count * dtype.itemsize + 8)
                nbytes, dirt = buffer.data.nbytes, int(np.count_nonzero(buffer.data))
                if nbytes != count * dtype.itemsize + 8 or dirt:
                    self.fault(f"{nbytes} bytes, of which {dirt} are not 0")
                buffers.append((dtype, count, buffer))
        for turn, op in enumerate((Sum, Average, Sum, Max, Min, Product)):
            reduction = Reduction(op, self.group.size)
            for dtype, count, buffer in buffers:
                self.case = f"reduce_buffer {op.name} of {count} {dtype}, turn {turn}"
                view = buffer.view(dtype, count)
                view[...] = np.resize(pattern(dtype, self.group, self.group.index, op), count)
                buffer.data[-8:] = 7
                self.transport.barrier(self.group)
                self.transport.reduce_buffer(self.group, buffer, dtype, count, reduction)
                exact = op is not Average or dtype.kind == "i"
                tolerance = 0.0 if exact else 4 * epsilon(dtype)
                self.compare(view, np.resize(expected(dtype, self.group, reduction), count), tolerance)
                if (buffer.data[-8:] != 7).any():
                    self.fault("items beyond the count were overwritten")
        for _, _, buffer in buffers:
            self.same(buffer.data)

    def mixture(self) -> None:
        """Small operations of all kinds without a pause between them: staging memory is reused."""
        choice = random.Random(0)
        for number in range(300):
            self.case = f"mixture, operation {number}"
            self.one_of(choice, self.group)

    def one_of(self, choice: random.Random, group: Group) -> None:
        kind, count = choice.randrange(4), choice.randrange(1, 2000)
        if kind == 0:
            self.reduced(group, choice.choice(DTYPES[1:]), count, Reduction(Sum, group.size))
        elif kind == 1:
            self.broadcasted(group, choice.randrange(group.size), count)
        elif kind == 2:
            self.gathered(group, [choice.randrange(count) for _ in group.ranks])
        else:
            self.transport.barrier(group)

    def subgroups(self) -> None:
        """Members of different groups are busy with different things, all members in between."""
        ranks, me = self.group.ranks, self.group.ranks[self.group.index]
        subsets = [ranks[::2], ranks[1::2], ranks[1:], ranks[-1:]]
        choice = random.Random(1)
        choices = [random.Random(number) for number in range(len(subsets))]
        for turn in range(3):
            for number, subset in enumerate(subsets):
                if me in subset:
                    group = Group(_FIRST_SUBGROUP + number, subset, subset.index(me))
                    self.case = f"group of ranks {list(subset)} among {list(ranks)}, turn {turn}"
                    for _ in range(turn + number):
                        self.one_of(choices[number], group)
                    self.broadcasted(group, group.size - 1, 33)
                    self.gathered(group, [5 * i for i in range(group.size)])
                    self.reduced(group, np.dtype(np.float32), PERIOD, Reduction(Average, group.size))
                    self.transport.barrier(group)
            self.case = f"all ranks after their groups, turn {turn}"
            self.one_of(choice, self.group)

    def close(self) -> None:
        self.case = "close"
        buffer = self.transport.allocate(self.group, 64)
        buffer.data[...] = 5
        self.transport.barrier(self.group)
        self.transport.close()
        if (buffer.data != 5).any():
            self.fault("a buffer has lost its content")


def _noise(index: int, count: int, what: str) -> Array:
    """The same on every rank for one index; of a magnitude that sums exactly in float32 when 16-bit."""
    noise = np.random.default_rng([index, count, len(what)]).uniform(0.25, 4, count)
    return np.where(np.arange(count) % 3 == index % 3, -noise, noise)


def _bytes(index: int, count: int) -> Array:
    return np.resize((np.arange(PERIOD) * (index + 2) + index).astype(np.uint8), count)
