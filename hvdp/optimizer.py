"""The mechanism of every DistributedOptimizer: gradients into buckets, buckets reduced.

An adapter tells this module when a gradient is ready and when a backward pass has ended,
and moves gradients between its tensors and the buckets' memory (`GradientStore`). What to
reduce, when, under which name and how the ranks agree on it is decided here, once for all
frameworks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hvdp._core.agreement import check_same_parameters
from hvdp._core.arrays import Array, dtype_named
from hvdp._core.buckets import BucketPlan, ParameterSpec, Slot, plan
from hvdp._core.handles import Handle
from hvdp._core.objects import broadcast_object
from hvdp._core.operations import Allocate, ReduceBucket
from hvdp._core.ops import Average, Kind, ReduceOp, Signature
from hvdp._core.runtime import runtime
from hvdp.errors import InvalidArgumentError
from hvdp.transports.base import Buffer

__all__ = ["GradientReducer", "GradientStore"]


class GradientStore(Protocol):
    """What an adapter does for parameter number `index`; called on the thread of backward or step."""

    def bind(self, index: int, memory: Array) -> None:
        """From now on `memory` (flat, the parameter's dtype and count) is its place in a bucket."""

    def collect(self, index: int) -> bool:
        """Bring the current gradient into its place, or zeros if there is none; whether there is one."""

    def deliver(self, index: int) -> None:
        """Make the averaged content of its place the gradient."""


@dataclass
class _Bucket:
    plan: BucketPlan
    buffer: Buffer
    marks: Array
    waiting: set[int] = field(default_factory=set)
    handle: Handle | None = None

    def rearm(self) -> None:
        self.handle = None
        self.waiting = {slot.parameter for slot in self.plan.slots}


class GradientReducer:
    """Averages one model's gradients over the ranks, a bucket at a time.

    A window is the backward passes between two steps. In its last pass a bucket is
    submitted as soon as all its gradients are ready, while backward goes on; when the pass
    ends, what is missing is filled with zeros, and all gradients are the average.

    In the first window the order in which gradients become ready is noted; rank 0's order
    decides the buckets. Every rank must construct it, with equal arguments.

    Args:
        specs: the parameters, equal on all ranks.
        passes_per_step: backward passes in a window.
        fault: why this rank's arguments are wrong; every rank raises it.

    Raises:
        MismatchError: the ranks hold different parameters.
    """

    def __init__(
        self,
        store: GradientStore,
        specs: Sequence[ParameterSpec],
        op: ReduceOp,
        passes_per_step: int,
        bucket_bytes: int,
        fault: str = "",
    ) -> None:
        self._op = op
        self._bucket_bytes = bucket_bytes
        self.passes_per_step = passes_per_step
        self.replace(store, specs, fault)

    def replace(self, store: GradientStore, specs: Sequence[ParameterSpec], fault: str = "") -> None:
        """Start again with other parameters; collective. Gradients stay where they are."""
        check_same_parameters("DistributedOptimizer", specs, fault)
        self._store = store
        self._name = f"gradients.{runtime.serial('gradients')}"
        self._specs = specs
        self._order: dict[int, None] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._passes = 0
        self._reductions = 0

    def ready(self, index: int) -> None:
        """The gradient of a parameter has got this pass's share."""
        bucket = self._bucket_of.get(index)
        if bucket is None:
            self._order[index] = None
            return
        self._store.collect(index)
        if self._passes + 1 < self.passes_per_step:
            return
        bucket.waiting.discard(index)
        if not bucket.waiting and bucket.handle is None:
            self._launch(bucket)

    def end_pass(self) -> None:
        """A backward pass has ended; the last one of a window returns with averaged gradients."""
        self._passes += 1
        if self._passes >= self.passes_per_step:
            self.reduce()

    def before_step(self) -> None:
        """Reduce what the passes so far have left, if the window is not full."""
        if not self._reductions:
            self.reduce()

    def after_step(self) -> None:
        self._passes = 0
        self._reductions = 0

    def reduce(self) -> None:
        """Reduce now whatever has not been launched, and wait for all buckets.

        Raises:
            InvalidArgumentError: a second reduction before `after_step` whose result would be wrong.
        """
        self._passes = 0
        if self._reductions and self._op is not Average:
            # An average of averages is the average; a sum of sums counts the first pass N times.
            raise InvalidArgumentError(
                f"gradients were computed again before step() with op={self._op.name}: set "
                "backward_passes_per_step to the number of backward() calls for each step()."
            )
        self._reductions += 1
        if not self._buckets:
            self._make_buckets()
        for bucket in self._buckets:
            if bucket.handle is None:
                self._launch(bucket)
        for bucket in self._buckets:
            self._finish(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        for mark, slot in enumerate(bucket.plan.slots):
            bucket.marks[mark] = self._store.collect(slot.parameter)
        engine = runtime.require("DistributedOptimizer")
        number = self._buckets.index(bucket)
        signature = Signature(
            Kind.BUCKET,
            f"{self._name}.{number}",
            dtype=bucket.plan.dtype,
            shape=(bucket.plan.count,),
            op=self._op.name,
        )
        (bucket.handle,) = engine.submit(ReduceBucket(signature, bucket.buffer))

    def _finish(self, bucket: _Bucket) -> None:
        assert bucket.handle is not None
        bucket.handle.wait()
        for mark, slot in enumerate(bucket.plan.slots):
            if bucket.marks[mark]:
                self._store.deliver(slot.parameter)
        bucket.rearm()

    def _make_buckets(self) -> None:
        engine = runtime.require("DistributedOptimizer")
        seen = list(self._order)
        unseen = [index for index in reversed(range(len(self._specs))) if index not in self._order]
        order = broadcast_object(seen + unseen, 0, f"{self._name}.order")
        for number, bucket_plan in enumerate(plan(self._specs, order, self._bucket_bytes)):
            buffer = engine.run(Allocate(f"{self._name}.{number}", bucket_plan.nbytes, 0, engine.executor))
            assert isinstance(buffer, Buffer)
            memory = buffer.view(dtype_named(bucket_plan.dtype), bucket_plan.count)
            bucket = _Bucket(bucket_plan, buffer, memory[bucket_plan.marks_start :])
            bucket.rearm()
            for slot in bucket_plan.slots:
                self._bucket_of[slot.parameter] = bucket
                self._bind(slot, memory)
            self._buckets.append(bucket)

    def _bind(self, slot: Slot, memory: Array) -> None:
        self._store.bind(slot.parameter, memory[slot.start : slot.start + slot.count])
        # At once, so that gradients and buckets are not both in memory for the whole model.
        self._store.collect(slot.parameter)
