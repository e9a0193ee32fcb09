"""The rows about numbers: rounding, overflow, scaling, compression, wrapping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kits import BFLOAT16, FLOATS, INTS, Kit, dtype_of, epsilon
from .reductions import OPS, check, has_meaning, held, reduced

COUNTS = (33, 20_001, 300_007)  # in one exchange, in one chunk, in several


def _reduced(values: Any, kit: Kit, **options: Any) -> Any:
    return kit.values(kit.call("allreduce")(kit.of(values), **options))


@dataclass(frozen=True)
class Rounding:
    """Random numbers of all sizes: 16-bit floats are as a float32 sum that is rounded once."""

    op: str
    dtype: str
    count: int

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        dtype = dtype_of(self.dtype)
        everyones = []
        for r in range(size):
            random = np.random.default_rng([r, self.count])
            values = random.normal(size=self.count) * 10.0 ** random.integers(-6, 4, self.count)
            everyones.append(values.astype(dtype))
        found = _reduced(everyones[rank], kit, op=getattr(kit.hvd, self.op))
        wide = np.float32 if dtype.itemsize == 2 else dtype.type
        total = np.sum([values.astype(wide) for values in everyones], axis=0, dtype=wide)
        exact = (total / wide(size if self.op == "Average" else 1)).astype(dtype).astype(np.float64)
        # One unit in the last place of the result; wider types may add up in another order.
        magnitude = np.sum([np.abs(values.astype(np.float64)) for values in everyones], axis=0)
        unit = np.spacing(np.abs(exact).astype(np.float16)) if self.dtype == "float16" else None
        allowed = (
            unit
            if unit is not None
            else epsilon(self.dtype) * (np.abs(exact) if dtype == BFLOAT16 else 2 * magnitude)
        )
        far = np.abs(found.astype(np.float64) - exact) > allowed
        assert not far.any(), f"{found[far][:5]} is not {exact[far][:5]}"
        return [found.tobytes()]


@dataclass(frozen=True)
class Exact:
    """Every rank holds `held` (rank 0 `first` where that is not None); the result is `wanted`.

    A third of it may be off by a bit where the terms are divided first.
    """

    op: str
    dtype: str
    held: float
    wanted: float
    first: float | None = None
    count: int = 3

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        value = self.held if self.first is None or rank else self.first
        dtype = dtype_of(self.dtype)
        with np.errstate(over="ignore"):
            mine, wanted = np.full(self.count, value).astype(dtype), np.array(self.wanted).astype(dtype)
        found = _reduced(mine, kit, op=getattr(kit.hvd, self.op))
        values, tolerance = found.astype(np.float64), epsilon(self.dtype) if size == 3 else 0
        np.testing.assert_allclose(values, np.full(self.count, float(wanted)), rtol=tolerance, atol=0)
        return [found.tobytes()]


@dataclass(frozen=True)
class Wrapping:
    """Sums of integers wrap as the dtype does; their averages do not, and are rounded down."""

    dtype: str

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        limits = np.iinfo(self.dtype)
        # Of 64-bit integers the sum itself is 64 bits wide.
        ends = [limits.min, limits.max] if limits.bits < 64 else [limits.min // 8, limits.max // 8]
        mine = np.array([*ends, ends[1] if rank else ends[0], 1 if rank else 0], self.dtype)
        rest = size - 1
        exact = [ends[0] * size, ends[1] * size, ends[0] + rest * ends[1], rest]
        total = _reduced(mine, kit, op=kit.hvd.Sum)
        wrapped = [(number - limits.min) % (1 << limits.bits) + limits.min for number in exact]
        np.testing.assert_array_equal(total, np.array(wrapped, self.dtype), strict=True)
        mean = _reduced(mine, kit)
        np.testing.assert_array_equal(mean, np.array([n // size for n in exact], self.dtype), strict=True)
        return [total.tobytes(), mean.tobytes()]


@dataclass(frozen=True)
class Scaled:
    """Factors before and after, of reductions into a new tensor, in place, grouped and scattered."""

    op: str
    dtype: str
    before: float
    after: float

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        shape = (2 * size, 3)
        terms = [held(r, size, shape, self.dtype).astype(np.complex128) * self.before for r in range(size)]
        if self.dtype not in ("complex64", "complex128"):
            terms = [term.real for term in terms]
        fold = {"Min": np.min, "Max": np.max, "Product": np.prod, "Sum": np.sum, "Average": np.mean}[self.op]
        exact = fold(terms, axis=0) * self.after
        wanted = (np.floor(exact) if self.dtype in INTS else exact).astype(dtype_of(self.dtype))
        mine = held(rank, size, shape, self.dtype)
        options = {
            "op": getattr(kit.hvd, self.op),
            "prescale_factor": self.before,
            "postscale_factor": self.after,
        }
        place = kit.of(mine)
        results = [
            kit.call("allreduce")(kit.of(mine), **options),
            kit.call("allreduce_")(place, **options),
            *kit.call("grouped_allreduce")([kit.of(mine)], **options),
        ]
        scattered = [
            kit.call("reducescatter")(kit.of(mine), **options),
            *kit.call("grouped_reducescatter")([kit.of(mine)], **options),
        ]
        for result in results:
            check(kit.values(result), wanted, self.dtype)
        for result in scattered:
            check(kit.values(result), wanted[2 * rank : 2 * rank + 2], self.dtype)
        return [kit.values(result).tobytes() for result in results]


@dataclass(frozen=True)
class Compressed:
    """Small whole numbers come through a 16-bit float unharmed, and a long fraction does not."""

    how: str
    dtype: str

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        compression = getattr(kit.hvd.Compression, self.how)
        options = {"op": kit.hvd.Sum, "compression": compression}
        mine = held(rank, size, (7, 3), self.dtype)
        wanted = reduced("Sum", size, (7, 3), self.dtype)
        each = [7 // size + (r < 7 % size) for r in range(size)]
        start = sum(each[:rank])
        check(kit.values(kit.call("allreduce")(kit.of(mine), **options)), wanted, self.dtype)
        for result in kit.call("grouped_allreduce")([kit.of(mine)] * 2, **options):
            check(kit.values(result), wanted, self.dtype)
        own = wanted[start : start + each[rank]]
        check(kit.values(kit.call("reducescatter")(kit.of(mine), **options)), own, self.dtype)
        for result in kit.call("grouped_reducescatter")([kit.of(mine)] * 2, **options):
            check(kit.values(result), own, self.dtype)
        if self.dtype in ("float32", "float64"):
            fraction = np.full(3, 1 + 2.0**-12, self.dtype)
            kept = float(_reduced(fraction, kit, op=kit.hvd.Max, compression=compression)[0]) != 1.0
            assert kept == (self.how == "none")
        return []


def rows() -> Iterator[Any]:
    for dtype in FLOATS:
        for count in COUNTS:
            yield Rounding("Sum", dtype, count)
            yield Rounding("Average", dtype, count)
        for op in ("Sum", "Average", "Min", "Max", "Product"):
            for count in (3, 20_000):
                yield Exact(op, dtype, 1.0, math.nan, first=math.nan, count=count)
                yield Exact(op, dtype, math.nan, math.nan, count=count)
        for op in ("Sum", "Average", "Max"):
            yield Exact(op, dtype, math.inf, math.inf, first=math.inf)
        yield Exact("Min", dtype, -math.inf, -math.inf)
        yield Exact("Average", dtype, -math.inf, -math.inf)
    for count in (3, 20_000, 300_000):
        yield Exact("Average", "float16", 40_000, 40_000, count=count)
        yield Exact("Average", "float16", 6e-8, 6e-8, count=count)
        yield Exact("Average", "bfloat16", 3e38, 3e38, count=count)
        yield Exact("Average", "float32", 3e38, 3e38, count=count)
        yield Exact("Average", "float64", 1.7e308, 1.7e308, count=count)
    for dtype in INTS:
        yield Wrapping(dtype)
    factors = ((2.0, 0.5), (1.0, 3.0), (0.5, 1.0))
    for turn, dtype in enumerate((*FLOATS, *INTS, "complex64")):
        for number, op in enumerate(OPS, turn):
            if has_meaning(op, dtype):
                yield Scaled(op, dtype, *factors[number % 3])
    for how in ("none", "fp16", "bf16"):
        for dtype in ("float16", "bfloat16", "float32", "float64", "int32", "complex64"):
            yield Compressed(how, dtype)
