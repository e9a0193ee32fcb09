"""Equal and different counts, told apart by their sums."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvdp._core.counts import all_equal, terms

counts = st.integers(0, 10**9)


def _sums(numbers: list[int]) -> np.ndarray:
    return np.sum([terms(number) for number in numbers], axis=0)


@given(counts, st.integers(1, 4096))
def test_equal_counts_are_found_equal_after_any_number_of_steps(count: int, ranks: int) -> None:
    assert all_equal(*_sums([count] * ranks))


@given(counts, st.integers(1, 1000), st.integers(1, 300), st.integers(1, 300))
def test_different_counts_are_found_different(count: int, more: int, some: int, others: int) -> None:
    assert not all_equal(*_sums([count] * some + [count + more] * others))
