"""The rows that reduce: what every rank holds, and what comes out, in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kits import COMPLEX, DTYPES, FLOATS, INTS, LAYOUTS, Kit, dtype_of, epsilon

OPS = ("Average", "Sum", "Min", "Max", "Product")
SHAPES = ((), (0,), (0, 3), (1,), (7,), (3, 5))
SCATTERED = ((0,), (0, 3), (1,), (8, 0), (4, 2))
CUBE = (3, 4, 5, 2)  # no two dimensions alike, so that a permutation shows


def has_meaning(op: str, dtype: str) -> bool:
    if op == "Adasum":
        return dtype in FLOATS
    return not (op == "Average" and dtype == "bool") and not (op in ("Min", "Max") and dtype in COMPLEX)


def held(rank: int, size: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Item i of rank r is (i % 3)(r + 1), and a part i % 2 where complex; of bools i % (size + 2) > r."""
    items = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    if dtype == "bool":
        return items % (size + 2) > rank
    values = items % 3 * (rank + 1)
    if dtype in COMPLEX:
        return (values + 1j * (items % 2)).astype(dtype)
    return values.astype(dtype_of(dtype))


def reduced(op: str, size: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Of what all ranks hold."""
    items = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    if dtype == "bool":
        least = 0 if op in ("Sum", "Max") else size - 1  # some rank, or every rank
        return items % (size + 2) > least
    base, total = items % 3, size * (size + 1) // 2
    part = 1j * (items % 2) if dtype in COMPLEX else 0
    if op == "Product":
        product = np.ones_like(base + part)
        for rank in range(size):
            product = product * (base * (rank + 1) + part)
        return product.astype(dtype_of(dtype))
    if op == "Average":
        mean = base * total // size if dtype in INTS else base * total / size
        return (mean + part).astype(dtype_of(dtype))
    closed = {"Sum": base * total + part * size, "Min": base, "Max": base * size}[op]
    return closed.astype(dtype_of(dtype))


@dataclass(frozen=True)
class Row:
    """One call; `how` says which."""

    how: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = "plain"

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        """Make the call, check the result, and return what must be bitwise equal on all ranks."""
        mine = held(rank, size, self.shape, self.dtype)
        wanted = reduced(self.op, size, self.shape, self.dtype)
        tensor = kit.laid_out(mine, self.layout)
        strides, op = kit.strides(tensor), getattr(kit.hvd, self.op)
        if self.how.startswith("scattered"):
            each = [self.shape[0] // size + (r < self.shape[0] % size) for r in range(size)]
            wanted = wanted[sum(each[:rank]) : sum(each[: rank + 1])]
        calls = {
            "new": lambda: [kit.call("allreduce")(tensor, op=op)],
            "in place": lambda: [kit.call("allreduce_")(tensor, op=op)],
            "grouped": lambda: kit.call("grouped_allreduce")([tensor, kit.of(mine)], op=op),
            "grouped in place": lambda: kit.call("grouped_allreduce_")([tensor, kit.of(mine)], op=op),
            "scattered": lambda: [kit.call("reducescatter")(tensor, op=op)],
            "scattered grouped": lambda: kit.call("grouped_reducescatter")([tensor, kit.of(mine)], op=op),
        }
        results = calls[self.how]()
        assert len(results) == 1 + ("grouped" in self.how)
        for result in results:
            check(kit.values(result), wanted, self.dtype)
        assert kit.strides(tensor) == strides
        if "in place" in self.how:
            assert results[0] is tensor
        else:
            check(kit.values(tensor), mine, self.dtype)
        return [] if "scattered" in self.how else [kit.values(r).tobytes() for r in results]


@dataclass(frozen=True)
class Mixed:
    """One group with tensors of every dtype that has the op, each dtype twice and never next to itself."""

    op: str
    count: int

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        dtypes = [dtype for dtype in DTYPES if has_meaning(self.op, dtype)] * 2
        shapes = [(self.count + number % 3,) for number, _ in enumerate(dtypes)]
        mine = [held(rank, size, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        places, op = [kit.of(values) for values in mine], getattr(kit.hvd, self.op)
        new = kit.call("grouped_allreduce")([kit.of(values) for values in mine], op=op)
        assert len(new) == len(kit.call("grouped_allreduce_")(places, op=op)) == len(dtypes)
        for shape, dtype, result, place in zip(shapes, dtypes, new, places, strict=True):
            wanted = reduced(self.op, size, shape, dtype)
            check(kit.values(result), wanted, dtype)
            check(kit.values(place), wanted, dtype)
        return [kit.values(result).tobytes() for result in (*new, *places)]


def check(found: Any, wanted: Any, dtype: str) -> None:
    """Shape, dtype and values: exactly, but for a third, which no float holds exactly."""
    assert found.dtype == dtype_of(dtype), f"dtype is {found.dtype}"
    assert found.shape == wanted.shape, f"shape is {found.shape}, not {wanted.shape}"
    if dtype in FLOATS or dtype in COMPLEX:
        wide = np.complex128 if dtype in COMPLEX else np.float64
        np.testing.assert_allclose(found.astype(wide), wanted.astype(wide), rtol=epsilon(dtype), atol=0)
    else:
        np.testing.assert_array_equal(found, wanted)


def rows() -> Iterator[Any]:
    """Every dtype with every op; every shape, layout and call with every dtype, but not all with all."""
    for turn, dtype in enumerate(DTYPES):
        ops = [op for op in OPS if has_meaning(op, dtype)]
        for number, op in enumerate(ops, turn):
            for shape in (SHAPES[-1], SHAPES[number % 5], SHAPES[(number + 2) % 5]):
                yield Row("new", op, dtype, shape)
            yield Row("grouped", op, dtype, CUBE, LAYOUTS[number % 4])
            yield Row("scattered", op, dtype, (7, 3), "transposed" if number % 2 else "plain")
            yield Row("scattered grouped", op, dtype, SCATTERED[number % 5])
        for number, layout in enumerate(LAYOUTS):
            yield Row("in place", ops[number % len(ops)], dtype, CUBE, layout)
            yield Row("grouped in place", "Sum", dtype, CUBE, layout)
        yield Row("in place", "Sum", dtype, ())
        yield from _around_thresholds(turn, dtype)
    for op in OPS:
        yield Mixed(op, 7)
    yield Mixed("Sum", 5000)


def _around_thresholds(turn: int, dtype: str) -> Iterator[Row]:
    """Where shm goes from one exchange to chunks, and from one chunk to the next."""
    itemsize = dtype_of(dtype).itemsize
    for nbytes in (
        (1 << 15, 1 << 20) if dtype in ("uint8", "bfloat16", "float32", "complex128") else (1 << 15,)
    ):
        count = nbytes // itemsize
        yield Row("new", "Sum", dtype, (count + turn % 3 - 1,))
        yield Row("scattered", "Max" if has_meaning("Max", dtype) else "Sum", dtype, (2 * count // 5 + 1, 5))
        yield Row("in place", "Product", dtype, (5, count // 5 + 1), "transposed")
