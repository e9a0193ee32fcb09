"""The rows that move values and do not change them, with what comes out in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kits import DTYPES, LAYOUTS, Kit, dtype_of

RESTS = ((), (3,), (0,), (2, 3, 2))


def stamped(rank: int, to: int, rows: int, rest: tuple[int, ...], dtype: str) -> Any:
    """Rows that tell whence and whither: whole numbers below 100, or for bools their parity."""
    items = np.arange(rows * int(np.prod(rest))).reshape(rows, *rest) % 7
    values = items + 10 * rank + 3 * to
    return (values % 2 == 0) if dtype == "bool" else values.astype(dtype_of(dtype))


def same(kit: Kit, found: Any, wanted: Any) -> None:
    values = kit.values(found)
    assert values.dtype == wanted.dtype, f"dtype is {values.dtype}"
    assert values.shape == wanted.shape, f"shape is {values.shape}, not {wanted.shape}"
    assert values.tobytes() == np.ascontiguousarray(wanted).tobytes()


@dataclass(frozen=True)
class Row:
    """One call with rows of shape `rest`; `rows` per rank where ranks hold equally many."""

    call: str
    dtype: str
    rest: tuple[int, ...]
    layout: str = "plain"
    rows: int = 0

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        getattr(self, f"_{self.call}")(kit, rank, size)
        return []

    def _of(self, rank: int, to: int, rows: int) -> Any:
        return stamped(rank, to, rows, self.rest, self.dtype)

    def _uneven(self, size: int) -> list[int]:
        """Rows by rank, of some none."""
        return [(2 * r + self.rows) % 4 for r in range(size)]

    def _allgather(self, kit: Kit, rank: int, size: int) -> None:
        parts = [self._of(r, 0, rows) for r, rows in enumerate(self._uneven(size))]
        tensor = kit.laid_out(parts[rank], self.layout)
        same(kit, kit.call("allgather")(tensor), np.concatenate(parts))
        same(kit, tensor, parts[rank])

    def _grouped_allgather(self, kit: Kit, rank: int, size: int) -> None:
        parts = [[self._of(r, n, rows + n) for r, rows in enumerate(self._uneven(size))] for n in range(3)]
        found = kit.call("grouped_allgather")([kit.laid_out(part[rank], self.layout) for part in parts])
        assert len(found) == 3
        for result, part in zip(found, parts, strict=True):
            same(kit, result, np.concatenate(part))

    def _broadcast(self, kit: Kit, rank: int, size: int) -> None:
        for root in range(size):
            mine = self._of(rank, 0, self.rows)
            tensor = kit.laid_out(mine, self.layout)
            same(kit, kit.call("broadcast")(tensor, root), self._of(root, 0, self.rows))
            same(kit, tensor, mine)

    def _broadcast_(self, kit: Kit, rank: int, size: int) -> None:
        root = size - 1
        tensor = kit.laid_out(self._of(rank, 0, self.rows), self.layout)
        strides = kit.strides(tensor)
        assert kit.call("broadcast_")(tensor, root) is tensor
        assert kit.strides(tensor) == strides
        same(kit, tensor, self._of(root, 0, self.rows))

    def _scalars(self, kit: Kit, rank: int, size: int) -> None:
        scalars = [self._of(r, 0, 1).reshape(-1)[0:1].reshape(()) for r in range(size)]
        same(kit, kit.call("broadcast")(kit.of(scalars[rank]), size - 1), scalars[-1])
        same(kit, kit.call("allgather")(kit.of(scalars[rank])), np.stack(scalars))

    def _alltoall(self, kit: Kit, rank: int, size: int) -> None:
        sent = [self._of(rank, to, self.rows) for to in range(size)]
        tensor = kit.laid_out(np.concatenate(sent), self.layout)
        wanted = np.concatenate([self._of(source, rank, self.rows) for source in range(size)])
        same(kit, kit.call("alltoall")(tensor), wanted)

    def _alltoall_with_splits(self, kit: Kit, rank: int, size: int) -> None:
        counts = [[(source + 2 * to + self.rows) % 3 for to in range(size)] for source in range(size)]
        sent = [self._of(rank, to, counts[rank][to]) for to in range(size)]
        tensor = kit.laid_out(np.concatenate(sent), self.layout)
        wanted = np.concatenate([self._of(source, rank, counts[source][rank]) for source in range(size)])
        for splits in (counts[rank], kit.of(np.array(counts[rank], np.int32))):
            rows, received = kit.call("alltoall")(tensor, splits)
            same(kit, rows, wanted)
            same(kit, received, np.array([counts[source][rank] for source in range(size)], np.int64))


CALLS = ("allgather", "grouped_allgather", "broadcast", "broadcast_", "alltoall", "alltoall_with_splits")


def rows() -> Iterator[Row]:
    """Every call with every dtype, shape and layout, but not all with all: bytes are bytes."""
    for turn, dtype in enumerate(DTYPES):
        yield Row("scalars", dtype, ())
        for number, call in enumerate(CALLS, turn):
            for more in (0, 2):
                yield Row(call, dtype, RESTS[(number + more) % len(RESTS)], rows=(number + more) % 4)
            yield Row(call, dtype, RESTS[-1], LAYOUTS[1 + number % 3], rows=3)
    for dtype in ("uint8", "complex128"):
        # Around the size of a staging area.
        for count in ((1 << 20) - 1, 1 << 20, (1 << 20) + 1):
            for call in CALLS:
                yield Row(call, dtype, (count // dtype_of(dtype).itemsize,), rows=1)
