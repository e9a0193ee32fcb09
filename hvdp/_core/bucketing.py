"""A model's buckets: planned by all ranks together, filled from its gradients, reduced, and given back."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdp._core.arrays import Array, dtype_named
from hvdp._core.buckets import BucketPlan, ParameterSpec, Slot, plan
from hvdp._core.handles import Handle
from hvdp._core.objects import allgather_object
from hvdp._core.operations import Allocate, ReduceBucket
from hvdp._core.ops import Kind, Signature
from hvdp._core.policy import Policy
from hvdp._core.runtime import runtime
from hvdp._core.store import GradientStore
from hvdp.errors import HvdpError
from hvdp.transports.base import Buffer

__all__ = ["Bucket", "Bucketing"]

_LARGEST_COUNTED_BYTES = (32 << 20) - (64 << 10)
_MOST_TRIMS = 16  # some milliseconds each, in the first window only


@dataclass
class Bucket:
    """Memory for some gradients, and where their reduction has got to.

    Attributes:
        marks: which of the gradients there are, reduced with them.
        waiting: parameters that are not ready in this window's last pass.
        handle: of the reduction, once launched.
    """

    plan: BucketPlan
    name: str
    buffer: Buffer
    marks: Array
    waiting: set[int] = field(default_factory=set)
    handle: Handle | None = None

    def rearm(self) -> None:
        """Begin a new window."""
        self.handle = None
        self.waiting = {slot.parameter for slot in self.plan.slots}


class Bucketing:
    """Which gradients share which bucket.

    Parameters that are frozen on all ranks are in none, as long as others are: a rank's
    submission for the first bucket tells the others that it has unfrozen some.

    Args:
        name: unique among the process set's models.

    Attributes:
        buckets: in the order in which they are expected to be ready.
        sparse: parameters whose gradients are gathered instead, and how many of their dimensions are sparse.
        planned: whether `add` has been called.
    """

    def __init__(
        self, name: str, store: GradientStore, specs: Sequence[ParameterSpec], policy: Policy
    ) -> None:
        self._name = name
        self._store = store
        self._specs = specs
        self._policy = policy
        self.buckets: list[Bucket] = []
        self.sparse: dict[int, int] = {}
        self.planned = False
        self._order: dict[int, None] = {}
        self._outside = list(range(len(specs)))
        self._bucket_of: dict[int, Bucket] = {}
        self._incomplete_until = -1

    @property
    def outdated(self) -> bool:
        """Whether a rank that had joined when these were made, and so has none, has come back."""
        return 0 <= self._incomplete_until < runtime.joins

    def of(self, index: int) -> Bucket | None:
        """The parameter's bucket."""
        return self._bucket_of.get(index)

    def note(self, index: int) -> None:
        """A gradient that has no bucket is ready; the first rank's order decides the buckets."""
        self._order[index] = None

    def add(self) -> list[Bucket]:
        """Agree on which parameters get buckets, in which order, and which have sparse gradients; collective.

        Returns:
            The new buckets.
        """
        engine = runtime.require("DistributedOptimizer")
        policy, store, outside = self._policy, self._store, self._outside
        unseen = [index for index in reversed(outside) if index not in self._order]
        views = allgather_object(
            (
                [*(index for index in self._order if index not in self._bucket_of), *unseen],
                {index: store.sparse_dimensions(index) for index in outside},
                [index for index in outside if store.awaits(index)],
            ),
            f"{self._name}.order",
            policy.process_set,
        )
        awaited = {index for _, _, theirs in views for index in theirs}
        dimensions = {index: max(theirs[index] for _, theirs, _ in views) for index in outside}
        if not self.buckets and all(dimensions[index] for index in awaited):
            awaited = set(outside)
        self.sparse.update({index: dimensions[index] for index in sorted(awaited) if dimensions[index]})
        self._outside = [index for index in outside if index not in awaited]
        if self._outside or len(views) < engine.group(policy.process_set).size:
            self._incomplete_until = runtime.joins
        order = [index for index in views[0][0] if index in awaited and not dimensions[index]]
        plans = plan(self._specs, order, policy.bucket_bytes, policy.groups, policy.group_count)
        _keep_freed_memory()
        total, moved = sum(bucket_plan.nbytes for bucket_plan in plans), 0
        added = []
        for number, bucket_plan in enumerate(plans, len(self.buckets)):
            added.append(self._made(f"{self._name}.{number}", bucket_plan))
            moved += bucket_plan.nbytes
            if moved * _MOST_TRIMS >= total:
                _return_freed_memory()
                moved = 0
        self.planned = True
        self.buckets += added
        return added

    def launch(self, bucket: Bucket, window: int, weight: float | None) -> None:
        """Submit its reduction, with zeros for what there is not.

        Args:
            weight: this rank's, where the policy is weighted.
        """
        for mark, slot in enumerate(bucket.plan.slots):
            bucket.marks[mark] = self._store.collect(slot.parameter)
        signature = Signature(
            Kind.BUCKET,
            bucket.name,
            self._policy.process_set,
            dtype=bucket.plan.dtype,
            shape=(bucket.plan.count,),
            op=self._policy.op.name,
            prescale_factor=1.0 / self._policy.predivide,
            postscale_factor=self._policy.predivide,
        )
        unfrozen = bucket is self.buckets[0] and any(map(self._store.awaits, self._outside))
        operation = ReduceBucket(signature, bucket.buffer, window, unfrozen, weight)
        (bucket.handle,) = runtime.require("DistributedOptimizer").submit(operation)

    def finish(self, bucket: Bucket) -> bool:
        """Wait for it, and give the gradients back; whether a rank has unfrozen a parameter in no bucket."""
        assert bucket.handle is not None
        unfrozen = bucket.handle.wait()
        for mark, slot in enumerate(bucket.plan.slots):
            if bucket.marks[mark]:
                self._store.deliver(slot.parameter)
            else:
                self._store.withdraw(slot.parameter)
        bucket.rearm()
        return bool(unfrozen)

    def abandon(self) -> None:
        """Let what is in flight end, however it ends, and be ready to begin anew."""
        for bucket in self.buckets:
            if bucket.handle is not None:
                with contextlib.suppress(HvdpError):
                    bucket.handle.wait()
        for bucket in self.buckets:
            bucket.rearm()

    def _made(self, name: str, bucket_plan: BucketPlan) -> Bucket:
        engine, process_set = runtime.require("DistributedOptimizer"), self._policy.process_set
        buffer = engine.run(Allocate(name, bucket_plan.nbytes, process_set, engine.executor))
        assert isinstance(buffer, Buffer)
        memory = buffer.view(dtype_named(bucket_plan.dtype), bucket_plan.count)
        bucket = Bucket(bucket_plan, name, buffer, memory[bucket_plan.marks_start :])
        bucket.rearm()
        for slot in bucket_plan.slots:
            self._bucket_of[slot.parameter] = bucket
            self._bind(slot, memory)
        return bucket

    def _bind(self, slot: Slot, memory: Array) -> None:
        self._store.bind(slot.parameter, memory[slot.start : slot.start + slot.count])
        # At once, so that gradients and buckets are not both in memory for the whole model.
        self._store.collect(slot.parameter)


def _keep_freed_memory() -> None:
    """From now on each gradient is freed when it is in its bucket, amid a backward pass that needs memory.

    glibc gives free memory back beyond twice the largest block freed so far, counted up to 32 MiB
    (mallopt(3), M_MMAP_THRESHOLD). Until then each step gets pages anew: 4,000 of them, 12 ms, for a
    model of 5 million parameters.
    """
    np.empty(_LARGEST_COUNTED_BYTES, np.uint8)


def _return_freed_memory() -> None:
    """The C library would keep the gradients that were freed: a second copy of the model, unused."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
