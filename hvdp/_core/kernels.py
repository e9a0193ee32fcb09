"""Element-wise reduction of several ranks' values, in pieces that stay in cache.

Numerics, the same on every transport that uses these kernels:

- 16-bit floats are widened to float32, reduced and rounded once, to nearest even; a result
  that is no number is always the same one, whoever lent the casts.
- An average of floats never overflows where the average itself is representable: where the
  plain sum does (the processor's own flag says so) it is computed again in a wider type.
- Integers are averaged with floor division of the exact 64-bit sum; scaled integers are
  computed in float64 and rounded down.
- For bool, Sum and Max are a logical or, Product and Min a logical and; Average is refused
  before it comes here.
- Terms are taken in rank order, so results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hvdp._core.arrays import Array
from hvdp._core.casts import Widened, is_narrow, narrow
from hvdp._core.ops import Average, Max, Min, Product, ReduceOp, Reduction, Sum
from hvdp._core.scratch import PIECE_BYTES, scratch

__all__ = ["PIECE_BYTES", "neutral", "pieces", "reduce_into"]

_FOLD: dict[Any, Callable[..., Any]] = {
    Average: np.add,
    Sum: np.add,
    Min: np.minimum,
    Max: np.maximum,
    Product: np.multiply,
}
_FOLD_BOOL: dict[Any, Callable[..., Any]] = {
    Sum: np.logical_or,
    Max: np.logical_or,
    Min: np.logical_and,
    Product: np.logical_and,
}


def pieces(start: int, stop: int, itemsize: int) -> list[tuple[int, int]]:
    """Cut the element range [start, stop) into ranges of at most PIECE_BYTES."""
    step = max(1, PIECE_BYTES // itemsize)
    return [(lo, min(lo + step, stop)) for lo in range(start, stop, step)]


def neutral(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """The value that changes nothing: what a rank without data gives."""
    if op is Product:
        return dtype.type(1)
    if op not in (Min, Max):
        return dtype.type(0)
    if dtype.kind == "b":
        return op is Min
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if op is Min else np.iinfo(dtype).min
    return dtype.type(np.inf if op is Min else -np.inf)


def reduce_into(out: Array, sources: Sequence[Array], reduction: Reduction) -> None:
    """Write the reduction of equally long 1-D `sources` into `out`.

    Args:
        out: same dtype and length; may be one of the sources, not overlap one otherwise.
        sources: one array a rank, in rank order; not changed unless it is `out`.
    """
    if reduction.absent:
        sources = [source for index, source in enumerate(sources) if index not in reduction.absent]
    kind = out.dtype.kind
    if is_narrow(out.dtype):
        for lo, hi in pieces(0, out.size, out.itemsize):
            _narrow_floats(out[lo:hi], [source[lo:hi] for source in sources], reduction)
    elif reduction.weights is not None:
        out[...] = _weighted(sources, reduction.weights)
    elif kind == "b":
        fold = _FOLD_BOOL[reduction.op]
        out[...] = _folded(fold, sources)
    elif kind in "iu":
        out[...] = _integers(sources, reduction)
    elif len(sources) == 2 and reduction.op is not Average and _unscaled(reduction):
        _FOLD[reduction.op](sources[0], sources[1], out=out)
    else:
        _floats(sources, reduction, out)


def _narrow_floats(out: Array, sources: Sequence[Array], reduction: Reduction) -> None:
    wide = Widened(sources)
    weights = reduction.weights
    narrow(_floats(wide, reduction) if weights is None else _weighted(wide, weights), out)


def _unscaled(reduction: Reduction) -> bool:
    return reduction.prescale == 1.0 and reduction.postscale == 1.0


def _folded(fold: Callable[..., Any], sources: Iterable[Array]) -> Array:
    """In scratch memory, valid until the next call on this thread."""
    terms = iter(sources)
    first = next(terms)
    result = scratch.take(0, first.dtype, first.size)
    second = next(terms, None)
    if second is None:
        result[...] = first
        return result
    fold(first, second, out=result)
    for source in terms:
        fold(result, source, out=result)
    return result


def _floats(sources: Iterable[Array], reduction: Reduction, out: Array | None = None) -> Array:
    fold = _FOLD[reduction.op]
    if reduction.prescale != 1.0:
        sources = [_times(s, reduction.prescale) for s in sources]
    if reduction.op is Average and reduction.divisor > 1:
        return _average(sources, reduction, out)
    result = _folded(fold, sources)
    target = result if out is None else out
    if reduction.postscale != 1.0 or target is not result:
        return _times(result, reduction.postscale, target)
    return target


def _average(sources: Iterable[Array], reduction: Reduction, out: Array | None) -> Array:
    divisor = reduction.divisor
    overflown = None
    try:
        with np.errstate(over="raise"):
            total = _folded(np.add, sources)
    except FloatingPointError:
        with np.errstate(over="ignore"):
            total = _folded(np.add, sources)
        # Only where it happened: elsewhere a result must not depend on its neighbours.
        overflown = ~np.isfinite(total)
        wide = np.result_type(total.dtype, np.longdouble)
        saved = sum(source[overflown].astype(wide) for source in sources) / divisor
    target = total if out is None else out
    if reduction.postscale == 1.0 and divisor & (divisor - 1):
        np.divide(total, total.dtype.type(divisor), out=target)
    else:
        _times(total, reduction.postscale / divisor, target)
    if overflown is not None:
        target[overflown] = saved * reduction.postscale
    return target


def _weighted(sources: Iterable[Array], weights: Sequence[float]) -> Array:
    """A rank of weight 0 is left out, whatever it holds: the mean of no samples is not a number."""
    result = None
    for source, weight in zip(sources, weights, strict=True):
        result = np.zeros_like(source) if result is None else result
        if weight:
            result += _times(source, weight)
    assert result is not None
    return result


def _times(array: Array, factor: float, out: Array | None = None) -> Array:
    product: Array = np.multiply(array, array.dtype.type(factor), out=out)
    return product


def _integers(sources: Sequence[Array], reduction: Reduction) -> Array:
    fold = _FOLD[reduction.op]
    divisor = reduction.divisor if reduction.op is Average else 1
    if not _unscaled(reduction):
        scaled = [s.astype(np.float64) * reduction.prescale for s in sources]
        rounded: Array = np.floor(_folded(fold, scaled) * (reduction.postscale / divisor))
        return rounded
    if divisor == 1:
        return _folded(fold, sources)
    wide = np.uint64 if sources[0].dtype.kind == "u" else np.int64
    total = _folded(fold, [s.astype(wide) for s in sources])
    mean: Array = np.floor_divide(total, wide(divisor))
    return mean
