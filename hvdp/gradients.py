"""Gradients that an adapter hands over as arrays, pass by pass, and gets back reduced.

For frameworks whose optimizers are given a list of gradients, in contrast to PyTorch's,
which find them beside the parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvdp._core.arrays import Array, dtype_named
from hvdp._core.buckets import ParameterSpec
from hvdp._core.objects import allgather_object
from hvdp.optimizer import GradientReducer, Policy

__all__ = ["ArrayReducer", "Rows"]


class Rows(NamedTuple):
    """A gradient that is zero except for some rows; equal indices add up."""

    indices: Array
    values: Array


Gradient = Array | Rows


class _Arrays:
    """The GradientStore: a gradient that was given is added to its place in a bucket.

    Those of the parameters from `shared` on, which have none, add up here.
    """

    def __init__(self, specs: Sequence[ParameterSpec], shared: int) -> None:
        self._specs = specs
        self._shared = shared
        self.sparse: Collection[int] = ()
        self.given: dict[int, Gradient] = {}
        self.results: dict[int, Gradient] = {}
        self._places: dict[int, Array] = {}
        self._filled: set[int] = set()

    def give(self, index: int, gradient: Gradient) -> None:
        earlier = self.given.get(index)
        if earlier is not None:
            gradient = _sum(earlier, gradient)
        elif index >= self._shared:
            gradient = np.array(gradient)  # whose memory is someone else's after this pass
        self.given[index] = gradient

    def taken(self) -> dict[int, Gradient]:
        """The reduced gradients, and an empty start for the next window."""
        results, self.results = self.results, {}
        results.update((index, given) for index, given in self.given.items() if index >= self._shared)
        self._filled.clear()
        self.given.clear()
        return results

    def awaits(self, index: int) -> bool:
        return True

    def bind(self, index: int, memory: Array) -> None:
        self._places[index] = memory

    def collect(self, index: int) -> bool:
        place = self._places[index]
        gradient = self.given.pop(index, None)
        if gradient is not None:
            values = _dense(gradient, self._specs[index].shape).reshape(-1)
            if index in self._filled:
                place += values
            else:
                place[...] = values
                self._filled.add(index)
        elif index not in self._filled:
            place[...] = 0
        return index in self._filled

    def deliver(self, index: int) -> None:
        self.results[index] = self._places[index].reshape(self._specs[index].shape)

    def withdraw(self, index: int) -> None:
        self.results.pop(index, None)

    def holds_reduced(self, index: int) -> bool:
        return False

    def lost_reduced(self, or_replaced: bool) -> bool:
        return False

    def forget_reduced(self) -> None:
        pass

    def keep_used(self) -> None:
        pass

    def share_used(self, ranks: int) -> None:
        pass

    def sparse_dimensions(self, index: int) -> int:
        return 1 if index in self.sparse else 0

    def sparse_entries(self, index: int, dimensions: int) -> tuple[Array, Array, bool]:
        spec, gradient = self._specs[index], self.given.get(index)
        if gradient is None:
            nothing = np.empty((0, *spec.shape[1:]), spec.dtype)
            return np.empty((0, 1), np.int64), nothing, False
        if not isinstance(gradient, Rows):
            gradient = Rows(np.arange(spec.shape[0]), gradient)
        rows = _merged(gradient)
        return rows.indices.astype(np.int64)[:, None], np.ascontiguousarray(rows.values), True

    def deliver_sparse(self, index: int, coordinates: Array, values: Array) -> None:
        rows, dtype = _merged(Rows(coordinates[:, 0], values)), dtype_named(self._specs[index].dtype)
        self.results[index] = Rows(rows.indices, rows.values.astype(dtype, copy=False))


class ArrayReducer:
    """Reduces a list of gradients over the ranks; every member must make it, with equal arguments.

    For each pass `give` the gradients, in one call or many, then `finish`.

    Args:
        local: parameters of this rank alone, which follow the others: their dense gradients only
            add up over the passes of a window.

    Attributes:
        present: parameters that have a gradient on some rank, once `prepare` was called.
        sparse: those whose gradients are gathered as rows.
        windows: how many have been reduced since the last time that all ranks began anew.
        given: the parameters whose gradients of this pass have been given.

    Raises:
        MismatchError: the ranks hold different parameters.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        policy: Policy,
        fault: str = "",
        local: Sequence[ParameterSpec] = (),
    ) -> None:
        self.specs = [*specs, *local]
        self.present: set[int] | None = None
        self.sparse: frozenset[int] = frozenset()
        self.windows = 0
        self.given: set[int] = set()
        self._local = range(len(specs), len(self.specs))
        self._store = _Arrays(self.specs, len(specs))
        self.reducer = GradientReducer(self._store, specs, policy, fault)
        self._buckets: list[tuple[int, ...]] = []
        self._passes = 0

    def prepare(self, present: Collection[int], sparse: Collection[int]) -> list[tuple[int, ...]]:
        """Plan the buckets, which are returned, and the local parameters; collective the first time.

        Args:
            present: the parameters that have a gradient on this rank.
            sparse: those among them whose gradients are Rows.
        """
        if self.present is None:
            process_set = self.reducer.policy.process_set
            shared = set(present).difference(self._local)
            views = allgather_object((shared, set(sparse)), f"{self.reducer.name}.present", process_set)
            self.present = set().union(*(has for has, _ in views))
            self.sparse = frozenset().union(*(rows for _, rows in views))
            self._store.sparse = self.sparse
            self._buckets = self.reducer.prepare()
        self.present |= set(present)
        return [*self._buckets, tuple(self._local)]

    def give(self, gradients: Mapping[int, Gradient]) -> None:
        """Add gradients of this pass; buckets that are complete in the window's last pass start at once."""
        for index, gradient in gradients.items():
            self._store.give(index, gradient)
        self.given |= gradients.keys()
        for index in gradients:
            if index not in self.sparse and index not in self._local:
                self.reducer.ready(index)

    def finish(self) -> dict[int, Gradient] | None:
        """The pass is over: the reduced gradients after a window's last one, else None.

        They are views of the buckets' memory, right until the next `give`.
        """
        self.given.clear()
        self._passes += 1
        if self._passes < self.reducer.passes_per_step:
            self.reducer.end_pass()
            return None
        self._passes = 0
        try:
            self.reducer.end_pass()
        finally:
            self.reducer.after_step()
            results = self._store.taken()
        self.windows += 1
        return results

    def begin_anew(self) -> None:
        """Forget the passes of a window that is not full: a join has used the buckets' memory.

        For every rank at once.
        """
        self.windows = 0
        self.drop()

    def drop(self) -> None:
        """Forget what was given since the last window; what has started is waited for."""
        self.given.clear()
        self._passes = 0
        self.reducer.cleared()
        self._store.taken()

    def empty(self, index: int) -> Gradient:
        """Stands for a gradient that no rank has."""
        spec = self.specs[index]
        if index in self.sparse:
            return Rows(np.empty(0, np.int64), np.empty((0, *spec.shape[1:]), spec.dtype))
        return np.zeros(spec.shape, spec.dtype)


def _sum(first: Gradient, second: Gradient) -> Gradient:
    if isinstance(first, Rows) and isinstance(second, Rows):
        pairs = zip(first, second, strict=True)
        return Rows(*(np.concatenate(pair) for pair in pairs))
    shape = (second if isinstance(first, Rows) else first).shape  # type: ignore[union-attr]
    total: Array = _dense(first, shape) + _dense(second, shape)
    return total


def _dense(gradient: Gradient, shape: tuple[int, ...]) -> Array:
    if not isinstance(gradient, Rows):
        return gradient
    dense = np.zeros(shape, gradient.values.dtype)
    np.add.at(dense, gradient.indices, gradient.values)
    return dense


def _merged(rows: Rows) -> Rows:
    """The same with every index once."""
    indices, where = np.unique(rows.indices, return_inverse=True)
    if len(indices) == len(rows.indices):
        return rows
    values = np.zeros((len(indices), *rows.values.shape[1:]), rows.values.dtype)
    np.add.at(values, where.reshape(-1), rows.values)
    return Rows(indices, values)
