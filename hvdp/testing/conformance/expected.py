"""What reductions should give, computed another way than the kernels do it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from hvdp._core.arrays import Array, dtype_named
from hvdp._core.ops import Adasum, Average, Max, Min, Product, ReduceOp, Reduction, Sum
from hvdp._core.process_sets import Group

__all__ = ["DTYPES", "PERIOD", "epsilon", "expected", "fits", "pattern", "single_rounding_fault"]

DTYPES: list[np.dtype[Any]] = [
    dtype_named(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
]
PERIOD = 251
"""Length of a pattern: prime, so that no size or alignment of a transport is a multiple of it."""


def epsilon(dtype: np.dtype[Any]) -> float:
    """Distance of 1 to the next number; 0 for what is no floating-point number."""
    if dtype.kind in "biu":
        return 0.0
    finfo: Any = np.finfo if dtype.kind == "c" else ml_dtypes.finfo
    return float(finfo(dtype).eps)


def fits(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Whether a transport is ever asked for this."""
    if op is Adasum or (dtype.kind == "b" and op is Average):
        return False
    return dtype.kind != "c" or op in (Sum, Average, Product)


def pattern(dtype: np.dtype[Any], group: Group, index: int, op: ReduceOp) -> Array:
    """One period of a member's values: small whole numbers, whose sums and products are exact."""
    items = np.arange(PERIOD)
    if op is Product:
        # Two on one member, one on all others: fits any dtype whatever the size of the group.
        return np.where(items % (2 * group.size) == index, 2, 1).astype(dtype)
    values = (items * (index + 3) + index) % 4
    if dtype.kind == "b":
        return (values > index % 3).astype(dtype)
    if dtype.kind == "u":
        return values.astype(dtype)
    if dtype.kind == "c":
        return (values - 2 + 1j * ((items + index) % 3)).astype(dtype)
    return (values - 2).astype(dtype)


def expected(dtype: np.dtype[Any], group: Group, reduction: Reduction) -> Array:
    """One period of the result."""
    columns = zip(*(pattern(dtype, group, i, reduction.op).tolist() for i in range(group.size)), strict=True)
    return np.array([_reduced(dtype.kind, column, reduction) for column in columns]).astype(dtype)


def _reduced(kind: str, terms: tuple[Any, ...], reduction: Reduction) -> Any:
    if kind == "b":
        return any(terms) if reduction.op in (Sum, Max) else all(terms)
    if reduction.prescale != 1.0:
        terms = tuple(term * reduction.prescale for term in terms)
    folds: dict[ReduceOp, Any] = {Sum: sum, Average: sum, Min: min, Max: max, Product: math.prod}
    result = folds[reduction.op](terms)
    if kind in "iu":
        scaled = result * reduction.postscale if reduction.postscale != 1.0 else result
        return math.floor(scaled) if reduction.op is not Average else math.floor(scaled / len(terms))
    return result * reduction.postscale / (len(terms) if reduction.op is Average else 1)


def single_rounding_fault(found: Array, rows: Sequence[Array], op: ReduceOp) -> str:
    """Words for the first item that is further from the exact result than one rounding explains; or ""."""
    exact = np.sum([row.astype(np.float64) for row in rows], axis=0)
    exact = exact / len(rows) if op is Average else exact
    unit = np.abs(np.spacing(exact.astype(found.dtype)).astype(np.float64))
    wrong = np.abs(found.astype(np.float64) - exact) > unit * 0.501
    if not wrong.any():
        return ""
    at = int(np.argmax(wrong))
    return f"item {at} is {found[at]}, but {exact[at]} rounded once is {exact.astype(found.dtype)[at]}"
