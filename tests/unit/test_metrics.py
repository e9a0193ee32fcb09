"""`hvdp.metrics` on one rank: what counts, and how much."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

import hvdp
from hvdp import metrics
from hvdp.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    hvdp.init()
    yield
    hvdp.shutdown()


def test_means_are_weighted() -> None:
    mean = metrics.Mean()
    assert math.isnan(mean.compute())
    mean.update(3.0)
    mean.update([1.0, 2.0, 3.0])
    assert mean.compute() == 9 / 4
    mean.update(10.0, weight=4)
    assert mean.compute() == mean.compute() == 49 / 8
    mean.reset()
    mean.update(np.array([[1, 3], [5, 700]]), weight=[2, 0])
    assert mean.compute() == 2.0


def test_padding_does_not_count_whatever_it_holds() -> None:
    mean = metrics.Mean()
    mean.update([1.0, float("nan"), float("inf")], weight=[True, False, False])
    assert mean.compute() == 1.0
    mean.update([float("nan")])
    assert math.isnan(mean.compute())


def test_sums_accuracy_and_squares() -> None:
    total, accuracy, squares = metrics.Sum(), metrics.Accuracy(), metrics.MeanSquaredError()
    total.update(2.5)
    total.update([1, 2], weight=[3, 0])
    assert total.compute() == 5.5
    accuracy.update([1, 2, 3], [1, 0, 3])
    assert accuracy.compute() == 2 / 3
    accuracy.update(np.eye(3), [0, 1, 0], weight=[1, 1, 0])
    assert accuracy.compute() == 4 / 5
    positions = metrics.Accuracy(class_dim=1)  # two samples, three classes, four positions
    wanted = np.array([[0, 1, 2, 0], [2, 2, 1, 0]])
    positions.update(np.moveaxis(np.eye(3)[wanted], -1, 1), wanted * (wanted < 2))
    assert positions.compute() == 5 / 8
    one_position = metrics.Accuracy(class_dim=1)
    one_position.update([[[0.1], [0.9], [0.2]]], [[1]])
    assert one_position.compute() == 1
    logits = metrics.Accuracy(threshold=0.0, class_dim=1)
    logits.update(np.full((2, 1, 4), 0.5), [[1, 1, 1, 0], [1, 1, 1, 1]])
    assert logits.compute() == 7 / 8
    squares.update([1.0, 2.0], [0.0, 4.0])
    assert squares.compute() == 2.5


def test_shapes_must_fit() -> None:
    for update in (
        lambda: metrics.Mean().update([1.0, 2.0], weight=[1, 2, 3]),
        lambda: metrics.Accuracy().update([1, 2], [1, 2, 3]),
        lambda: metrics.MeanSquaredError().update([[1.0], [2.0]], [1.0, 2.0]),
    ):
        with pytest.raises(InvalidArgumentError, match="Received"):
            update()
    with pytest.raises(InvalidArgumentError, match=r"class_dim=1.*\(2, 3, 4\) for targets of \(2, 4\)"):
        metrics.Accuracy().update(np.zeros((2, 3, 4)), np.zeros((2, 4)))
    with pytest.raises(InvalidArgumentError, match="dimension 3 of the scores"):
        metrics.Accuracy(class_dim=3).update(np.zeros((2, 3)), np.zeros(2))
