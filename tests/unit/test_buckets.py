"""Bucket plans: every parameter once, aligned, one dtype, within the cap."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdp._core.buckets import ParameterSpec, fingerprint, first_difference, plan

_ITEMSIZES = {"float16": 2, "float32": 4, "float64": 8, "complex128": 16}

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs_lists = st.lists(st.tuples(shapes, st.sampled_from(sorted(_ITEMSIZES))), max_size=25).map(
    lambda pairs: [
        ParameterSpec(f"p{i}", shape, dtype, _ITEMSIZES[dtype]) for i, (shape, dtype) in enumerate(pairs)
    ]
)


@given(specs_lists, st.integers(1, 4000), st.randoms())
def test_every_parameter_has_one_place_of_its_own(specs, cap: int, random) -> None:
    order = list(range(len(specs)))
    random.shuffle(order)
    buckets = plan(specs, order, cap)
    assert sorted(slot.parameter for bucket in buckets for slot in bucket.slots) == sorted(order)
    for bucket in buckets:
        assert {specs[slot.parameter].dtype for slot in bucket.slots} == {bucket.dtype}
        end = 0
        for slot in bucket.slots:
            assert slot.count == specs[slot.parameter].count
            assert slot.start >= end, "two gradients overlap"
            assert slot.start * bucket.itemsize % 64 == 0, "not at a cache line"
            end = slot.start + slot.count
        assert bucket.marks_start >= end
        assert bucket.count == bucket.marks_start + len(bucket.slots)
        assert bucket.nbytes == bucket.count * bucket.itemsize
        gradients = bucket.marks_start * bucket.itemsize
        assert gradients <= cap or len([s for s in bucket.slots if s.count]) <= 1, "beyond the cap"


@given(specs_lists, st.integers(1, 4000))
def test_within_a_dtype_the_order_is_kept(specs, cap: int) -> None:
    order = list(reversed(range(len(specs))))
    buckets = plan(specs, order, cap)
    for dtype in _ITEMSIZES:
        placed = [slot.parameter for b in buckets if b.dtype == dtype for slot in b.slots]
        assert placed == [index for index in order if specs[index].dtype == dtype]


def test_small_ones_share_and_a_large_one_is_alone() -> None:
    sizes = [16, 16, 1000, 16, 16]
    specs = [ParameterSpec(str(i), (size,), "float32", 4) for i, size in enumerate(sizes)]
    buckets = plan(specs, range(5), 256)
    assert [[slot.parameter for slot in bucket.slots] for bucket in buckets] == [[0, 1], [2], [3, 4]]


def test_an_empty_model_needs_no_bucket() -> None:
    assert plan([], [], 100) == []


_SPEC = ParameterSpec("layer.weight", (3, 4), "float32", 4)


@pytest.mark.parametrize(
    "change",
    [{"name": "layer.bias"}, {"shape": (4, 3)}, {"dtype": "float64", "itemsize": 8}, {"strides": (1, 3)}],
)
def test_whatever_must_be_equal_is_in_the_fingerprint_and_in_words(change: dict[str, object]) -> None:
    other = dataclasses.replace(_SPEC, **change)
    assert fingerprint([_SPEC]) == fingerprint([dataclasses.replace(_SPEC)])
    assert fingerprint([_SPEC]) != fingerprint([other])
    text = first_difference([0, 1, 2], [[_SPEC], [_SPEC], [other]])
    assert text == f"parameter 0 is {_SPEC} on rank 0 and {other} on rank 2"


def test_the_first_difference_of_all_ranks_is_named() -> None:
    a, b, c = (ParameterSpec(name, (1,), "float32", 4) for name in "abc")
    assert first_difference([0, 1], [[a, b], [a, b]]) == ""
    missing = first_difference([0, 1], [[a, b], [a]])
    assert missing == "parameter 1 is 'b' float32 (1,) on rank 0 and missing on rank 1"
    more = first_difference([0, 1], [[a, b], [a, b, c]])
    assert more == "parameter 2 is missing on rank 0 and 'c' float32 (1,) on rank 1"
    earliest = first_difference([2, 5, 7], [[a, b], [a, c], [b, b]])
    assert earliest == "parameter 0 is 'a' float32 (1,) on rank 2 and 'b' float32 (1,) on rank 7"
