"""Whether all ranks have counted the same, told by a sum that is made anyway."""

from __future__ import annotations

__all__ = ["all_equal", "terms"]

_MODULUS = 1 << 20
"""So that the sums over thousands of ranks are exact in float64, however long a job runs."""


def terms(count: int) -> tuple[float, float, float]:
    """A rank's share of the three sums that `all_equal` takes."""
    number = float(count % _MODULUS)
    return 1.0, number, number * number


def all_equal(ranks: float, numbers: float, squares: float) -> bool:
    """Whether the counts summed up were the same on all ranks: whether their variance is 0."""
    return ranks * squares == numbers * numbers
