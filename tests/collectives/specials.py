"""The rows about single items that are no finite numbers, among items that are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kits import FLOATS, Kit, dtype_of
from .reductions import OPS, check


@dataclass(frozen=True)
class Special:
    """All are 1 but for a NaN on the last rank alone, and an inf on rank 0 that meets a -inf on the last."""

    op: str
    dtype: str
    count: int
    nan_at: int
    inf_at: int

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        ones = np.ones(self.count, dtype_of(self.dtype))
        mine = ones.copy()
        if rank == 0:
            mine[self.inf_at] = math.inf
        if rank == size - 1:
            mine[self.nan_at], mine[self.inf_at] = math.nan, -math.inf
        plain = np.full(self.count, float(size) if self.op == "Sum" else 1.0)
        wanted = plain.copy()
        wanted[self.nan_at] = math.nan
        met = {"Min": -math.inf, "Max": math.inf, "Product": -math.inf}.get(self.op, math.nan)
        wanted[self.inf_at] = met if size > 1 else -math.inf
        op = getattr(kit.hvd, self.op)
        found = [kit.call("allreduce")(kit.of(mine), op=op)]
        check(kit.values(found[0]), wanted, self.dtype)
        if self.count < 100:
            # These travel as one.
            found += kit.call("grouped_allreduce")([kit.of(ones), kit.of(mine), kit.of(ones)], op=op)
            for result, exact in zip(found[1:], (plain, wanted, plain), strict=True):
                check(kit.values(result), exact, self.dtype)
        return [kit.values(result).tobytes() for result in found]


def rows() -> Iterator[Special]:
    for turn, dtype in enumerate(FLOATS):
        for number, op in enumerate(OPS, turn):
            for count in (7, 20_000, 300_007) if op in ("Sum", "Max") else (7, 20_000):
                places = (0, count // 2, count - 1)
                yield Special(op, dtype, count, places[number % 3], places[(number + 1) % 3])
