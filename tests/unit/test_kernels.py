"""Element-wise reductions against closed forms and exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdp._core.kernels import pieces, reduce_into
from hvdp._core.ops import Average, Max, Min, Product, Reduction, Sum
from hvdp._core.scratch import PIECE_BYTES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
INTS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]


def reduced(sources: list[Any], dtype: Any, op: Any, prescale: float = 1.0, postscale: float = 1.0) -> Any:
    """Into new memory and over the first source: both must give the same, bit for bit."""
    arrays = [np.array(source, dtype) for source in sources]
    kept = [array.copy() for array in arrays]
    reduction = Reduction(op, len(arrays), prescale, postscale)
    out = np.empty_like(arrays[0])
    reduce_into(out, arrays, reduction)
    for array, before in zip(arrays, kept, strict=True):
        assert array.tobytes() == before.tobytes(), "a source was changed"
    for place in range(len(arrays)):
        again = [array.copy() for array in arrays]
        reduce_into(again[place], again, reduction)
        assert again[place].tobytes() == out.tobytes(), f"over source {place} the result is another"
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=str)
def test_closed_forms(dtype: np.dtype[Any], ranks: int) -> None:
    sources = [[r + 1, 2 * r, 3] for r in range(ranks)]
    total = ranks * (ranks + 1) // 2
    wide = np.float64 if dtype in FLOATS else np.int64
    assert reduced(sources, dtype, Sum).astype(wide).tolist() == [total, 2 * total - 2 * ranks, 3 * ranks]
    assert reduced(sources, dtype, Min).astype(wide).tolist() == [1, 0, 3]
    assert reduced(sources, dtype, Max).astype(wide).tolist() == [ranks, 2 * ranks - 2, 3]
    average = reduced(sources, dtype, Average).astype(wide).tolist()
    exact = [total / ranks, ranks - 1, 3]
    assert average == ([int(x) for x in exact] if dtype in INTS else exact)
    twos = [[2 if r < 3 else 1] for r in range(ranks)]
    assert reduced(twos, dtype, Product).astype(wide).tolist() == [2 ** min(3, ranks)]


@given(st.lists(st.integers(-(2**55), 2**55), min_size=1, max_size=9))
def test_integers_are_averaged_downwards_and_exactly(values: list[int]) -> None:
    assert reduced([[v] for v in values], np.int64, Average).tolist() == [sum(values) // len(values)]


@pytest.mark.parametrize("dtype", [d for d in INTS if d.itemsize < 8], ids=str)
def test_an_average_of_extremes_does_not_wrap(dtype: np.dtype[Any]) -> None:
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    found = reduced([[low, high, high]] * 2 + [[low, high, low]], dtype, Average)
    assert found.tolist() == [low, high, (2 * high + low) // 3]


@given(
    st.lists(st.integers(-100, 100), min_size=1, max_size=5),
    st.sampled_from([0.5, 2.0, 0.25, 3.0]),
    st.sampled_from([0.5, 1.0, 4.0]),
)
def test_scaled_integers_are_rounded_down_once(values: list[int], before: float, after: float) -> None:
    found = reduced([[v] for v in values], np.int32, Sum, before, after)
    exact = sum(Fraction(before) * v for v in values) * Fraction(after)
    assert found.tolist() == [exact.__floor__()]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_an_average_does_not_overflow_where_it_can_be_told(dtype: np.dtype[Any], ranks: int) -> None:
    top = float(ml_dtypes.finfo(dtype).max) * 0.9
    found = reduced([[top, 1.0, -top, top if r else -top] for r in range(ranks)], dtype, Average)
    as_float = found.astype(np.float64)
    stored = float(dtype.type(top))
    exact = [stored, 1.0, -stored, stored / ranks * (ranks - 2)]
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(as_float, exact, rtol=2 * epsilon, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_an_overflow_next_to_it_does_not_change_a_result(dtype: Any, ranks: int) -> None:
    """Small tensors are fused, so an item's bits must not depend on its neighbours."""
    noise = np.random.default_rng(ranks).normal(size=(ranks, 1000)).astype(dtype)
    alone = reduced(list(noise), dtype, Average)
    crowded = np.concatenate([noise, np.full((ranks, 1), np.finfo(dtype).max)], axis=1)
    assert reduced(list(crowded), dtype, Average)[:-1].tobytes() == alone.tobytes()


def test_a_sum_that_overflows_is_infinite_without_a_warning() -> None:
    with np.errstate(all="raise", over="ignore"):
        assert reduced([[3e38], [3e38]], np.float32, Sum).tolist() == [np.inf]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinities_stay(dtype: np.dtype[Any]) -> None:
    sources = [[np.nan, np.inf, np.inf, -np.inf], [1.0, 1.0, -np.inf, 1.0], [1.0, 1.0, 1.0, 1.0]]
    with np.errstate(invalid="ignore"):
        for op in (Sum, Average):
            found = reduced(sources, dtype, op).astype(np.float64)
            np.testing.assert_array_equal(found, [np.nan, np.inf, np.nan, -np.inf])
        assert np.isnan(reduced(sources, dtype, Max).astype(np.float64)[0])


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype: np.dtype[Any]) -> None:
    """One large term and many that each vanish beside it, but not together."""
    large = 2.0 / float(ml_dtypes.finfo(dtype).eps)
    sources = [[large]] + [[1.0]] * 4
    assert float(reduced(sources, dtype, Sum)[0]) == large + 4
    assert float(dtype.type(large) + dtype.type(1.0)) == large


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex(dtype: Any) -> None:
    sources = [[1 + 2j], [3 - 1j], [0.5j]]
    assert reduced(sources, dtype, Sum).tolist() == [4 + 1.5j]
    np.testing.assert_allclose(reduced(sources, dtype, Average), [(4 + 1.5j) / 3], rtol=1e-6)
    np.testing.assert_allclose(reduced(sources, dtype, Product), [(1 + 2j) * (3 - 1j) * 0.5j], rtol=1e-6)
    assert reduced(sources, dtype, Sum, 2.0, 0.5).tolist() == [4 + 1.5j]


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5))
def test_bools_are_logic(rows: list[list[bool]]) -> None:
    columns = list(zip(*rows, strict=True))
    for op, logic in ((Sum, any), (Max, any), (Min, all), (Product, all)):
        assert reduced(rows, bool, op).tolist() == [logic(column) for column in columns]


@pytest.mark.parametrize("op", [Sum, Average, Min, Max, Product])
def test_scaling_is_before_and_after(op: Any) -> None:
    sources = [[1.0, -2.0], [4.0, 8.0], [0.5, 2.0]]
    found = reduced(sources, np.float64, op, 2.0, 0.25)
    terms = np.array(sources) * 2.0
    plain = {Sum: np.sum, Average: np.mean, Min: np.min, Max: np.max, Product: np.prod}[op](terms, axis=0)
    np.testing.assert_allclose(found, plain * 0.25, rtol=1e-15)


@given(st.integers(0, 10), st.integers(0, 10**6), st.sampled_from([1, 2, 4, 8, 16]))
def test_pieces_cover_a_range_once(start: int, length: int, itemsize: int) -> None:
    cut = pieces(start, start + length, itemsize)
    most = PIECE_BYTES // itemsize
    assert all(lo < hi <= lo + most for lo, hi in cut)
    assert [lo for lo, _ in cut] == [start, *(hi for _, hi in cut)][: len(cut)]
    assert (cut[-1][1] if cut else start) == start + length


def test_longer_than_a_piece_and_empty() -> None:
    count = PIECE_BYTES  # of 8 bytes each: larger than the scratch memory
    data = [np.arange(count, dtype=np.float64) * (r + 1) for r in range(3)]
    assert (reduced(data, np.float64, Sum) == np.arange(count) * 6.0).all()
    assert reduced([[], []], np.float32, Average).size == 0
