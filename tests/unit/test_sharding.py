"""`hvdp.sharding`: whose element is which; pure index logic."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdp
from hvdp.errors import InvalidArgumentError
from hvdp.sharding import Partition, Shard, order

lengths = st.integers(0, 60)
sizes = st.integers(1, 9)
numbers = st.integers(0, 1000)


def _partitions(size: int, drop_last: bool = False, pad: bool = True) -> list[Partition]:
    return [Partition(rank, size, drop_last, pad) for rank in range(size)]


def test_nine_elements_on_two_ranks() -> None:
    nine = np.arange(9)
    padded, dropped, uneven = (
        [p.of(nine).tolist() for p in _partitions(2, **options)]
        for options in ({}, {"drop_last": True}, {"pad": False})
    )
    assert padded == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 1]]
    assert dropped == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert uneven == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    assert [p.is_padding(9).tolist() for p in _partitions(2)] == [[False] * 5, [False] * 4 + [True]]


@given(lengths, sizes, numbers, numbers)
def test_padding_covers_everything_once_beside_what_it_says(
    length: int, size: int, seed: int, epoch: int
) -> None:
    elements = order(length, epoch, seed)
    parts = [(p.of(elements), p.is_padding(length)) for p in _partitions(size)]
    assert {len(part) for part, _ in parts} == {-(-length // size)}
    assert all(len(part) == len(mask) for part, mask in parts)
    real = chain.from_iterable(part[~mask].tolist() for part, mask in parts)
    assert sorted(real) == list(range(length))
    assert all(set(part.tolist()) <= set(range(length)) for part, _ in parts)


@given(lengths, sizes, numbers)
def test_uneven_covers_everything_once(length: int, size: int, seed: int) -> None:
    parts = [p.of(order(length, 0, seed)) for p in _partitions(size, pad=False)]
    assert sorted(chain.from_iterable(part.tolist() for part in parts)) == list(range(length))
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert counts == [p.count(length) for p in _partitions(size, pad=False)]
    assert not any(p.is_padding(length).any() for p in _partitions(size, pad=False))


@given(lengths, sizes, numbers, st.booleans())
def test_dropping_shares_nothing_and_loses_less_than_one_a_rank(
    length: int, size: int, seed: int, pad: bool
) -> None:
    parts = [p.of(order(length, 0, seed)).tolist() for p in _partitions(size, drop_last=True, pad=pad)]
    assert {len(part) for part in parts} == {length // size}
    kept = list(chain.from_iterable(parts))
    assert len(set(kept)) == len(kept) > length - size


@given(lengths, sizes, st.booleans(), st.booleans(), st.integers(1, 4))
def test_streams_are_divided_like_sequences(
    length: int, size: int, drop_last: bool, pad: bool, workers: int
) -> None:
    for partition in _partitions(size, drop_last, pad):
        whole = list(partition.pick(iter(range(length))))
        expected = partition.of(np.arange(length)).tolist()
        padding = partition.is_padding(length)
        assert len(whole) == len(expected)
        assert [x for x, pads in zip(whole, padding, strict=True) if not pads] == [
            x for x, pads in zip(expected, padding, strict=True) if not pads
        ]
        shares = [list(partition.pick(range(length), worker, workers)) for worker in range(workers)]
        assert sorted(chain.from_iterable(shares)) == sorted(whole)
        assert all(share == whole[worker::workers] for worker, share in enumerate(shares))


@given(st.integers(2, 5), st.integers(1, 4))
def test_a_step_of_all_ranks_is_a_step_of_one_process(size: int, batch: int) -> None:
    """The order does not depend on the number of ranks."""
    length = size * batch * 3
    alone = order(length, 7, 1)
    shares = [p.of(order(length, 7, 1)) for p in _partitions(size)]
    for step in range(3):
        together = np.concatenate([share[step * batch : (step + 1) * batch] for share in shares])
        wanted = alone[step * batch * size : (step + 1) * batch * size]
        assert sorted(together.tolist()) == sorted(wanted.tolist())


def test_epochs_advance_by_themselves() -> None:
    first, second, other = (Shard(20, Partition(0, 2), seed) for seed in (3, 3, 4))
    epochs = [list(first) for _ in range(3)]
    assert epochs == [list(second) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert list(other) != epochs[0]
    iter(first)  # made, but not used
    assert first.epoch == 3
    resumed = Shard(20, Partition(0, 2), 3, epoch=1)
    assert [list(resumed), list(resumed)] == epochs[1:]
    first.set_epoch(0)
    assert next(iter(first)) == epochs[0][0]
    assert first.epoch == 1
    still = Shard(5, Partition(1, 2), shuffle=False)
    assert list(still) == list(still) == [1, 3, 1]
    assert len(still) == 3
    with pytest.raises(InvalidArgumentError):
        first.set_epoch(-1)


def test_one_process_shards_everything_to_itself() -> None:
    hvdp.init()
    try:
        assert sorted(hvdp.shard(7)) == list(range(7))
        assert hvdp.shard(np.arange(6).reshape(3, 2)).tolist() == [[0, 1], [2, 3], [4, 5]]
        assert hvdp.shard(["a", "b"]) == ["a", "b"]
        assert list(hvdp.shard(iter("ab"))) == ["a", "b"]
        shuffled = [hvdp.shard(np.arange(50), shuffle=True, seed=1, epoch=e).tolist() for e in (0, 0, 1)]
        assert shuffled[0] == shuffled[1] != shuffled[2]
        for wrong in (None, "text", {"a": 1}, -1, (np.zeros(2), np.zeros(2)), np.array(1)):
            with pytest.raises(InvalidArgumentError):
                hvdp.shard(wrong)
        for options in ({"seed": -1}, {"seed": 0.5}, {"epoch": -1}):
            with pytest.raises(InvalidArgumentError):
                hvdp.shard(3, **options)
        with pytest.raises(InvalidArgumentError, match="its own order"):
            hvdp.shard(iter([]), shuffle=True)
    finally:
        hvdp.shutdown()
