"""Metrics over all ranks' samples: numerators and weights are added up, and divided once at the end.

    accuracy = hvdp.metrics.Accuracy()
    for inputs, targets in batches:
        accuracy.update(model(inputs), targets)
    print(accuracy.compute())       # collective: the same number on every rank
    accuracy.reset()

So batches of different sizes count as they should, and padding with weight 0 not at all.
Values are numbers, arrays, or tensors that NumPy can take; sums are in float64.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hvdp._core import counts
from hvdp._core.arrays import Array
from hvdp._core.objects import allgather_object
from hvdp._core.ops import Sum as _Sum
from hvdp._core.runtime import runtime
from hvdp._numpy import collectives
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.process_sets import ProcessSet, global_process_set

__all__ = ["Accuracy", "Mean", "MeanSquaredError", "Sum"]


_serials: WeakKeyDictionary[ProcessSet, count[int]] = WeakKeyDictionary()
"""Numbers the metrics of each process set, whose members make the same ones."""


class _Accumulator:
    """A weighted sum and the sum of the weights.

    Args:
        process_set: the ranks whose samples count; only they call `compute`.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        self._process_set = process_set
        self._serial = next(_serials.setdefault(process_set, count()))
        self.reset()

    def reset(self) -> None:
        """Forget this rank's samples."""
        self._sums = np.zeros(2)

    def _add(self, values: Any, weight: Any) -> None:
        numbers = _numbers(values)
        weights = _numbers(weight)
        if weights.shape != numbers.shape[: weights.ndim]:
            raise InvalidArgumentError(
                "weight must be a number, or have the leading dimensions of the values. "
                f"Received: {weights.shape} for values of {numbers.shape}"
            )
        weights = np.broadcast_to(
            weights.reshape(weights.shape + (1,) * (numbers.ndim - weights.ndim)), numbers.shape
        )
        # Not by multiplication: whatever padding gave, also NaN, does not count.
        counted = weights != 0
        self._sums += (numbers[counted] * weights[counted]).sum(), weights.sum()

    def _totals(self) -> tuple[float, float]:
        """Of all ranks; collective.

        Raises:
            MismatchError: other ranks compute another metric; on every rank.
        """
        own = np.array([*self._sums, *counts.terms(self._serial)])
        total = collectives.allreduce(own, name="metrics", op=_Sum, process_set=self._process_set)
        numerator, weight, *serials = total.tolist()
        # In the sum, since a name for each metric would let ranks wait for one another instead.
        if not counts.all_equal(*serials):
            told = (runtime.require("metrics").rank, f"{type(self).__name__} {self._serial}")
            everybodys = allgather_object(told, "metrics.order", self._process_set.number())
            raise MismatchError(
                "the ranks compute different metrics (by the order in which they were made): "
                f"{', '.join(f'rank {rank} has {theirs}' for rank, theirs in everybodys)}. "
                "All ranks must make metrics, and call compute(), in the same order."
            )
        return numerator, weight


class _Ratio(_Accumulator):
    def compute(self) -> float:
        """The value over all ranks' samples so far, NaN if there are none; collective."""
        numerator, denominator = self._totals()
        return numerator / denominator if denominator else float("nan")


class Mean(_Ratio):
    """The weighted mean of values."""

    def update(self, values: Any, weight: Any = 1.0) -> None:
        """Add values.

        Args:
            values: one, or an array of them.
            weight: how much they count, one number or one a sample: for the mean loss of a
                batch the number of its samples; for samples a mask, 0 or false for padding.
        """
        self._add(values, weight)


class Sum(_Accumulator):
    """The weighted sum of values."""

    def update(self, values: Any, weight: Any = 1.0) -> None:
        """Add values, each times its weight; as `Mean.update`."""
        self._add(values, weight)

    def compute(self) -> float:
        """The sum over all ranks' samples so far; collective."""
        return self._totals()[0]


class Accuracy(_Ratio):
    """The share of predictions that are right.

    Args:
        process_set: the ranks whose samples count; only they call `compute`.
        threshold: for two classes, where a prediction is one number a sample: the class is 1
            above it. 0.5 for probabilities, 0.0 for logits.
        class_dim: the dimension of scores that counts classes; 1 for what torch's
            CrossEntropyLoss takes: (samples, classes, positions).
    """

    def __init__(
        self,
        process_set: ProcessSet = global_process_set,
        threshold: float | None = None,
        class_dim: int = -1,
    ) -> None:
        super().__init__(process_set)
        self._threshold = threshold
        self._class_dim = class_dim

    def update(self, predictions: Any, targets: Any, weight: Any = 1.0) -> None:
        """Compare predictions with targets.

        Args:
            predictions: class numbers as `targets`, or with one more dimension, `class_dim`,
                of scores for each class. With a threshold one score a sample, shaped as `targets`
                or with one more dimension of 1.
            targets: class numbers.
            weight: one number or one a sample, 0 or false for padding.

        Raises:
            InvalidArgumentError: shapes that do not match, or one score a sample and no threshold.
        """
        found, wanted = _numbers(predictions), _numbers(targets)
        shape, dim = found.shape, self._class_dim
        scores = found.ndim == wanted.ndim + 1
        if scores and (dim < -found.ndim or shape[:dim] + shape[dim:][1:] != wanted.shape):
            raise InvalidArgumentError(
                f"Accuracy takes dimension {dim} of the scores for their classes; class_dim=1 is for scores "
                f"as torch's CrossEntropyLoss takes them. Received: {shape} for targets of {wanted.shape}"
            )
        single = scores and shape[dim] == 1
        if self._threshold is not None:
            found = found.squeeze(dim) if single else found
            found = np.where(found > self._threshold, 1.0, 0.0)
        elif single or (not scores and (np.isfinite(found) & (found != np.floor(found))).any()):
            raise InvalidArgumentError(
                "Accuracy needs a threshold where predictions are one score a sample: threshold=0.5 "
                f"for probabilities, 0.0 for logits. Received: {shape} for targets of {wanted.shape}"
            )
        elif scores:
            found = found.argmax(axis=dim).astype(np.float64)
        self._add(_alike("Accuracy", found, wanted)[0] == wanted, weight)


class MeanSquaredError(_Ratio):
    """The mean of squared differences, element by element."""

    def update(self, predictions: Any, targets: Any, weight: Any = 1.0) -> None:
        """Compare predictions with targets of the same shape; `weight` as in `Mean.update`."""
        found, wanted = _alike("MeanSquaredError", _numbers(predictions), _numbers(targets))
        self._add(np.square(found - wanted), weight)


def _numbers(values: Any) -> Array:
    """As float64; exact for class numbers."""
    if hasattr(values, "detach"):
        # Torch alone needs to be told that a gradient and the device do not matter.
        values = values.detach().cpu().double()
    return np.asarray(values).astype(np.float64)


def _alike(what: str, found: Array, wanted: Array) -> tuple[Array, Array]:
    if found.shape != wanted.shape:
        raise InvalidArgumentError(
            f"{what} compares predictions and targets of one shape. Received: {found.shape}, {wanted.shape}"
        )
    return found, wanted
