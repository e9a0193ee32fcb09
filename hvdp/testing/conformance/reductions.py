"""Cases in which values of several members become one."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdp._core.arrays import Array
from hvdp._core.ops import Average, Max, Min, Product, ReduceOp, Reduction, Sum
from hvdp._core.process_sets import Group
from hvdp.testing.conformance.checks import Checks, noise
from hvdp.testing.conformance.expected import (
    DTYPES,
    PERIOD,
    epsilon,
    expected,
    fits,
    pattern,
    single_rounding_fault,
)

__all__ = ["Reductions"]


class Reductions(Checks):
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

    def reducescatter(self) -> None:
        members = range(self.group.size)
        for dtype in DTYPES:
            for op in (Sum, Average, Max) if dtype.kind != "c" else (Sum, Average):
                if fits(dtype, op):
                    large = max(self.thresholds) // dtype.itemsize // self.group.size + 3
                    for counts in (
                        [0 for _ in members],
                        [2 * i for i in members],
                        [large - i for i in members],
                    ):
                        self.case = f"reducescatter {op.name} of {counts} {dtype}"
                        self.scattered(self.group, dtype, counts, Reduction(op, self.group.size))

    def scattered(self, group: Group, dtype: np.dtype[Any], counts: list[int], reduction: Reduction) -> None:
        start, count = sum(counts[: group.index]), counts[group.index]
        data = np.resize(pattern(dtype, group, group.index, reduction.op), sum(counts))
        whole, out = self.guarded(np.zeros(count, dtype))
        self.transport.reducescatter(group, data, out, counts, reduction)
        self.check_guards(whole)
        wanted = np.resize(expected(dtype, group, reduction), sum(counts))[start : start + count]
        inexact = reduction.op is Average and dtype.kind not in "biu"
        self.compare(out, wanted, 4 * epsilon(dtype) if inexact else 0.0)

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
                    rows = [noise(i, 1000).astype(dtype) for i in range(self.group.size)]
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
                rows = [noise(i, count).astype(dtype) for i in range(self.group.size)]
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
