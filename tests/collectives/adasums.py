"""The rows about Adasum: its formula written down once more, and two cases that need no formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kits import FLOATS, Kit, dtype_of, epsilon


def combined(vectors: list[Any]) -> Any:
    """Of float64 vectors, as in arXiv:2006.02924.

    Down from the root of the tree, where hvdp goes up from its leaves: on the left are as many
    as the largest power of two below their number.
    """
    if len(vectors) == 1:
        return vectors[0]
    left = 1 << (len(vectors) - 1).bit_length() - 1
    a, b = combined(vectors[:left]), combined(vectors[left:])
    return (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b


def drawn(rank: int, count: int, dtype: str) -> Any:
    """Alike in part, and of very different lengths, or the cosine alone would do for a weight."""
    common, own = (np.random.default_rng(seed).normal(size=count) for seed in ([count], [count, rank + 1]))
    return ((common + own) * 3.0**rank).astype(dtype_of(dtype))


def of_ranks(ranks: list[int], count: int, dtype: str) -> Any:
    return combined([drawn(rank, count, dtype).astype(np.float64) for rank in ranks])


def _tolerance(dtype: str) -> float:
    return 4 * max(epsilon(dtype), epsilon("float32") if dtype != "float64" else 0)


def _close(kit: Kit, found: Any, wanted: Any, dtype: str) -> None:
    values = kit.values(found)
    assert values.dtype == dtype_of(dtype), f"dtype is {values.dtype}"
    # Where two terms nearly cancel, what is left is as exact as they were.
    allowed = _tolerance(dtype) * np.abs(wanted).max()
    np.testing.assert_allclose(values.astype(np.float64), wanted, rtol=0, atol=allowed)


@dataclass(frozen=True)
class Formula:
    """Into a new tensor, in place and grouped, with factors before and after."""

    dtype: str
    count: int
    before: float
    after: float

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        options = {
            "op": kit.hvd.Adasum,
            "prescale_factor": self.before,
            "postscale_factor": self.after,
        }
        counts = (self.count, self.count + 2)
        mine = [drawn(rank, count, self.dtype) for count in counts]
        wanted = [
            of_ranks(list(range(size)), count, self.dtype) * self.before * self.after for count in counts
        ]
        place, places = kit.of(mine[0]), [kit.of(values) for values in mine]
        assert kit.call("allreduce_")(place, **options) is place
        found = kit.call("grouped_allreduce_")(places, **options)
        assert all(result is tensor for result, tensor in zip(found, places, strict=True))
        results = [kit.call("allreduce")(kit.of(mine[0]), **options), place]
        _close(kit, results[0], wanted[0], self.dtype)
        _close(kit, results[1], wanted[0], self.dtype)
        for group in (found, kit.call("grouped_allreduce")([kit.of(values) for values in mine], **options)):
            # Tensor by tensor: each has weights of its own.
            for result, exact in zip(group, wanted, strict=True):
                _close(kit, result, exact, self.dtype)
            results += group
        return [kit.values(result).tobytes() for result in results]


@dataclass(frozen=True)
class InASet:
    """Of the first rank and the last."""

    dtype: str

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        ranks = sorted({0, size - 1})
        some = kit.hvd.add_process_set(ranks)
        if some.included():
            mine = kit.of(drawn(rank, 9, self.dtype))
            found = kit.call("allreduce")(mine, op=kit.hvd.Adasum, process_set=some)
            _close(kit, found, of_ranks(ranks, 9, self.dtype), self.dtype)
        kit.hvd.remove_process_set(some)
        return []


@dataclass(frozen=True)
class WithoutTheLast:
    """The last rank has joined and is left out."""

    dtype: str

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        ranks = list(range(max(1, size - 1)))
        found = None
        if rank in ranks:
            mine = kit.of(drawn(rank, 9, self.dtype))
            found = kit.call("allreduce")(mine, op=kit.hvd.Adasum, prescale_factor=2.0)
        kit.hvd.join()
        if found is not None:
            _close(kit, found, of_ranks(ranks, 9, self.dtype) * 2, self.dtype)
        return []


@dataclass(frozen=True)
class AlikeOrApart:
    """Alike in direction their mean, pair by pair; at right angles their sum."""

    dtype: str
    alike: bool
    count: int

    def run(self, kit: Kit, rank: int, size: int) -> list[Any]:
        items = np.arange(self.count) % 5 - 2.0
        if self.alike:
            mine, lengths = items * (rank + 1), [r + 1.0 for r in range(size)]
            while len(lengths) > 1:
                pairs = zip(lengths[::2], lengths[1::2], strict=False)
                lengths = [(a + b) / 2 for a, b in pairs] + lengths[len(lengths) // 2 * 2 :]
            wanted = items * lengths[0]
        else:
            mine = np.where(np.arange(self.count) % size == rank, items, 0.0)
            wanted = items
        tensor = kit.of(mine.astype(dtype_of(self.dtype)))
        found = kit.values(kit.call("allreduce")(tensor, op=kit.hvd.Adasum))
        tolerance = _tolerance(self.dtype)
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)
        return [found.tobytes()]


def rows() -> Iterator[Any]:
    factors = ((1.0, 1.0), (2.0, 0.5), (3.0, 2.0), (1.0, 0.5))
    for turn, dtype in enumerate(FLOATS):
        for count in (1, 12, 20_000):
            yield AlikeOrApart(dtype, True, count)
            yield AlikeOrApart(dtype, False, count)
        for number, count in enumerate((1, 5, 1001, 40_003), turn):
            yield Formula(dtype, count, *factors[number % 4])
        yield InASet(dtype)
        yield WithoutTheLast(dtype)
