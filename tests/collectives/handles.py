"""The rows about calls that return at once: what their handles give, and when an input is free again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvdp.errors import InvalidArgumentError

from .kits import Kit
from .movements import same, stamped
from .reductions import held, reduced

# A handle, the arrays that it must give, and the tensors that these must be in.
Started = tuple[Any, list[Any], list[Any]]


@dataclass(frozen=True)
class InFlight:
    """Every call at once, then waited for, the last first."""

    dtype: str
    columns: int

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        started = [*self._reductions(kit, rank, size), *self._movements(kit, rank, size)]
        for handle, wanted, places in reversed(started):
            found = kit.hvd.synchronize(handle)
            results = list(found) if isinstance(found, list | tuple) else [found]
            for result, values in zip(results, wanted, strict=True):
                same(kit, result, values)
            for result, place in zip(results, places, strict=bool(places)):
                assert result is place
            assert kit.hvd.poll(handle)
        return []

    def _reductions(self, kit: Kit, rank: int, size: int) -> Iterator[Started]:
        shapes = ((2 * size, self.columns), (2 * size,))
        mine = [held(rank, size, shape, self.dtype) for shape in shapes]
        wanted = [reduced("Sum", size, shape, self.dtype) for shape in shapes]
        own = [values[2 * rank : 2 * rank + 2] for values in wanted]
        tensors, places, more = ([kit.of(values) for values in mine] for _ in range(3))
        op = kit.hvd.Sum
        yield kit.call("allreduce_async")(tensors[0], op=op), wanted[:1], []
        yield kit.call("allreduce_async_")(places[0], op=op), wanted[:1], places[:1]
        yield kit.call("grouped_allreduce_async")(tensors, op=op), wanted, []
        yield kit.call("grouped_allreduce_async_")(more, op=op), wanted, more
        yield kit.call("reducescatter_async")(tensors[0], op=op), own[:1], []
        yield kit.call("grouped_reducescatter_async")(tensors, op=op), own, []

    def _movements(self, kit: Kit, rank: int, size: int) -> Iterator[Started]:
        rest, last = (self.columns,), size - 1

        def of(source: int, to: int, rows: int) -> Any:
            return stamped(source, to, rows, rest, self.dtype)

        everyones = [of(source, 0, source + 1) for source in range(size)]
        mine, gathered = kit.of(everyones[rank]), np.concatenate(everyones)
        yield kit.call("allgather_async")(mine), [gathered], []
        tops = np.concatenate([rows[:1] for rows in everyones])
        yield kit.call("grouped_allgather_async")([mine, mine[:1]]), [gathered, tops], []
        place = kit.of(of(rank, 0, 3))
        yield kit.call("broadcast_async")(kit.of(of(rank, 0, 3)), last), [of(last, 0, 3)], []
        yield kit.call("broadcast_async_")(place, last), [of(last, 0, 3)], [place]
        sent = kit.of(np.concatenate([of(rank, to, 2) for to in range(size)]))
        even = np.concatenate([of(source, rank, 2) for source in range(size)])
        yield kit.call("alltoall_async")(sent), [even], []
        counts = [[(source + 2 * to) % 3 for to in range(size)] for source in range(size)]
        sent = kit.of(np.concatenate([of(rank, to, counts[rank][to]) for to in range(size)]))
        uneven = np.concatenate([of(source, rank, counts[source][rank]) for source in range(size)])
        received = np.array([counts[source][rank] for source in range(size)])
        for splits in (counts[rank], kit.of(np.array(counts[rank], np.int32))):
            yield kit.call("alltoall_async")(sent, splits), [uneven, received], []


@dataclass(frozen=True)
class Overwritten:
    """Inputs may change as soon as the call has returned."""

    call: str
    dtype: str
    count: int

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        tensor = kit.of(held(rank, size, (self.count,), self.dtype))
        total = reduced("Sum", size, (self.count,), self.dtype)
        wanted = held(0, size, (self.count,), self.dtype) if "broadcast" in self.call else total

        def start() -> Any:
            if "broadcast" in self.call:
                handle = kit.call(self.call)(tensor, 0)
            else:
                tensors = [tensor] if "grouped" in self.call else tensor
                handle = kit.call(self.call)(tensors, op=kit.hvd.Sum)
            tensor[...] = 0
            return handle

        # Nothing can have been sent before the last rank comes, and the others' are 0 by then.
        handle = start() if rank < size - 1 else None
        kit.hvd.barrier()
        found = (handle or start()).wait()
        same(kit, found[0] if "grouped" in self.call else found, wanted)
        assert not kit.values(tensor).any()
        return []


@dataclass(frozen=True)
class Again:
    """A name is in flight until its caller knows that it is not: the same on every rank, early or late."""

    call: str

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        tensor = kit.of(held(rank, size, (4,), "float32"))

        def start() -> Any:
            call = kit.hvd.__dict__[self.call]
            if "broadcast" in self.call:
                return call(tensor, 0, name="again")
            return call([tensor] if "grouped" in self.call else tensor, name="again")

        handle = start()
        kit.hvd.barrier()  # by which it is complete
        with pytest.raises(InvalidArgumentError, match=rf"rank {rank} .*again.* in flight"):
            start()
        kit.hvd.synchronize(handle)
        second = start()
        kit.hvd.barrier()
        assert kit.hvd.poll(second)
        dropped = start()
        kit.hvd.barrier()
        del dropped
        kit.hvd.synchronize(start())
        return []


def rows() -> Iterator[Any]:
    for call in ("allreduce_async", "grouped_allreduce_async", "broadcast_async", "allgather_async"):
        yield Again(call)
    for dtype in ("bool", "int64", "bfloat16", "float32", "complex64"):
        yield InFlight(dtype, 3)
    yield InFlight("float32", 10_000)
    for call in ("allreduce_async", "grouped_allreduce_async", "broadcast_async"):
        for dtype, count in (("float32", 5), ("float64", 300_007), ("bfloat16", 20_000)):
            yield Overwritten(call, dtype, count)
