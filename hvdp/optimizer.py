"""The mechanism of every DistributedOptimizer: gradients into buckets, buckets reduced.

An adapter tells this module when a gradient is ready and when a backward pass has ended,
and moves gradients between its tensors and the buckets' memory (`GradientStore`). What to
reduce, when, under which name and how the ranks agree on it is decided here, once for all
frameworks.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hvdp._core import sparse
from hvdp._core.agreement import check_same_parameters
from hvdp._core.arrays import Array, dtype_named
from hvdp._core.buckets import BucketPlan, ParameterSpec, Slot, plan
from hvdp._core.handles import Handle
from hvdp._core.objects import allgather_object
from hvdp._core.operations import Allocate, ReduceBucket
from hvdp._core.ops import Kind, Signature
from hvdp._core.policy import Policy
from hvdp._core.runtime import runtime
from hvdp._core.store import GradientStore
from hvdp._core.submit import Options
from hvdp.errors import HvdpError, InvalidArgumentError
from hvdp.transports.base import Buffer

__all__ = ["GradientReducer", "GradientStore", "Policy"]


_MOST_TRIMS = 16  # some milliseconds each, in the first window only


@dataclass
class _Bucket:
    plan: BucketPlan
    name: str
    buffer: Buffer
    marks: Array
    waiting: set[int] = field(default_factory=set)
    handle: Handle | None = None

    def rearm(self) -> None:
        self.handle = None
        self.waiting = {slot.parameter for slot in self.plan.slots}


class GradientReducer:
    """Reduces one model's gradients over the ranks, a bucket at a time.

    A window is the backward passes between two steps. In its last pass a bucket is
    submitted as soon as all its gradients are ready, while backward goes on; when the pass
    ends, what is missing is filled with zeros, and all gradients are reduced.

    In the first window the order in which gradients become ready is noted; the first rank's
    order decides the buckets. Every member must construct it, with equal arguments.

    Args:
        specs: the parameters, equal on all ranks.
        fault: why this rank's arguments are wrong; every rank raises it.

    Attributes:
        passes_per_step: when changed within a window, from the next one on.
        weight: this rank's, where the policy is weighted.
        steps: how many there were.
        name: unique among the process set's reducers.

    Raises:
        MismatchError: the ranks hold different parameters.
    """

    def __init__(
        self, store: GradientStore, specs: Sequence[ParameterSpec], policy: Policy, fault: str = ""
    ) -> None:
        self.policy = policy
        self.passes_per_step = self._wanted = policy.passes_per_step
        self.weight = 1.0
        self.steps = 0
        self._windows = 0
        self._joins = runtime.joins
        self.replace(store, specs, fault)

    def replace(self, store: GradientStore, specs: Sequence[ParameterSpec], fault: str = "") -> None:
        """Start again with other parameters; collective. Gradients stay where they are."""
        process_set = self.policy.process_set
        check_same_parameters("DistributedOptimizer", specs, fault, process_set, self.policy.described())
        self._store = store
        self.name = f"gradients.{runtime.serial(f'gradients/{process_set}')}"
        self._specs = specs
        self._forget_buckets()
        self._passes = 0
        self._may_skip = False
        self._reductions = 0

    def _forget_buckets(self) -> None:
        self._order: dict[int, None] = {}
        self._planned = False
        self._buckets: list[_Bucket] = []
        self._outside = list(range(len(self._specs)))
        self._bucket_of: dict[int, _Bucket] = {}
        self._sparse: dict[int, int] = {}
        self._incomplete_until = -1
        self._launching = False

    def ready(self, index: int) -> None:
        """The gradient of a parameter has got this pass's share.

        Raises:
            InvalidArgumentError: it was added to a gradient that has been reduced already, and
                reducing that again would count it more than once.
        """
        self._plan_again_after_join()
        self._refuse_to_reduce_again([index])
        bucket = self._bucket_of.get(index)
        if bucket is None:
            self._order[index] = None
            return
        if bucket.handle is not None and index not in bucket.waiting:
            raise InvalidArgumentError(
                f"the gradient of {self._specs[index].name!r} was ready twice in one backward(): with a "
                "layer in several checkpoints use_reentrant=False is needed, and after a backward() that "
                "failed optimizer.zero_grad()."
            )
        self._store.collect(index)
        if self._passes + 1 < self._passes_of_window():
            return
        self._launching = True
        bucket.waiting.discard(index)
        if not bucket.waiting and bucket.handle is None:
            self._launch(bucket)

    def prepare(self) -> list[tuple[int, ...]]:
        """Plan the buckets now, instead of after the first window; collective the first time.

        For adapters that know all gradients before the first of them is ready.

        Returns:
            The parameters in each bucket; those with sparse gradients are in none.
        """
        if not self._planned:
            self._add_buckets()
        return [tuple(slot.parameter for slot in bucket.plan.slots) for bucket in self._buckets]

    def end_pass(self) -> None:
        """A backward pass has ended; the last one of a window returns with reduced gradients."""
        wanted = self._passes_of_window()
        self._passes += 1
        if self._passes >= wanted:
            self.reduce()

    def _passes_of_window(self) -> int:
        if not self._passes:
            self._wanted = self.passes_per_step
        return self._wanted

    @property
    def within_window(self) -> bool:
        """Whether some passes of a window are done and others not."""
        return self._passes > 0

    def cleared(self) -> None:
        """The gradients were zeroed: a window begins anew."""
        self._passes = 0
        self._reductions = 0
        self._store.forget_reduced()
        if self._launching:  # by a backward that failed
            self._abandon()

    def announce_step(self) -> None:
        """A step may follow, or be skipped for what this rank sees in gradients that are not reduced yet."""
        self._may_skip = self._passes > 0

    def before_step(self) -> None:
        """Reduce what no window's end has reduced: the last passes, or all there is before this step."""
        self._may_skip = False
        if self._passes or not self._reductions or self._store.lost_reduced(self.policy.repeatable):
            self.reduce()

    def after_step(self) -> None:
        self._passes = 0
        self._may_skip = False
        self._reductions = 0
        self.steps += 1
        self._windows += 1
        if self.policy.repeatable:
            self._store.forget_reduced()
        else:
            self._store.keep_used()

    def reduce(self) -> None:
        """Reduce now whatever has not been launched, and wait for everything."""
        if self._reductions:
            self._refuse_to_reduce_again(range(len(self._specs)))
        if not self.policy.repeatable:
            self._store.share_used(runtime.require("step").group(self.policy.process_set).size)
        self._passes = 0
        self._reductions += 1
        self._plan_again_after_join()
        if not self._planned:
            self._add_buckets()
        if self._reduce(self._buckets, self._sparse):
            known = set(self._sparse)
            added = self._add_buckets()
            self._reduce(added, [index for index in self._sparse if index not in known])
        self._launching = False

    def _reduce(self, buckets: Sequence[_Bucket], sparse_ones: Iterable[int]) -> bool:
        """Whether a parameter without a bucket may have a gradient, on any rank."""
        gathered = {index: self._launch_sparse(index) for index in sparse_ones}
        for bucket in buckets:
            if bucket.handle is None:
                self._launch(bucket)
        try:
            unfrozen = [self._finish(bucket) for bucket in buckets]
            for index, handle in gathered.items():
                sparse.finish(self._store, index, self.policy.op, handle)
        except HvdpError:
            self._abandon(gathered.values())
            raise
        return any(unfrozen)

    def _abandon(self, gathered: Iterable[Handle] = ()) -> None:
        """Let what is in flight end, however it ends, and be ready to begin anew."""
        for handle in [*gathered, *(bucket.handle for bucket in self._buckets)]:
            with contextlib.suppress(HvdpError):
                if handle is not None:
                    handle.wait()
        for bucket in self._buckets:
            bucket.rearm()
        self._launching = False

    def _window(self) -> int:
        """This window's number since the ranks last joined, before which they may have made fewer steps."""
        if self._joins != runtime.joins:
            self._joins, self._windows, self._may_skip = runtime.joins, 0, False
        if self._may_skip:
            self._windows += 1
            self._may_skip = False
        return self._windows

    def _refuse_to_reduce_again(self, indices: Iterable[int]) -> None:
        if not self.policy.repeatable and any(map(self._store.holds_reduced, indices)):
            raise InvalidArgumentError(
                f"gradients were computed again before step() with op={self.policy.op.name}, or before "
                "zero_grad(): set backward_passes_per_step to the number of backward() calls for each "
                "step(), and call zero_grad() after it, or in its closure."
            )

    def _plan_again_after_join(self) -> None:
        """A rank that had joined when buckets were made has none; it comes back after the join."""
        if 0 <= self._incomplete_until < runtime.joins:
            self._forget_buckets()

    def _launch(self, bucket: _Bucket) -> None:
        for mark, slot in enumerate(bucket.plan.slots):
            bucket.marks[mark] = self._store.collect(slot.parameter)
        signature = Signature(
            Kind.BUCKET,
            bucket.name,
            self.policy.process_set,
            dtype=bucket.plan.dtype,
            shape=(bucket.plan.count,),
            op=self.policy.op.name,
            prescale_factor=1.0 / self.policy.predivide,
            postscale_factor=self.policy.predivide,
        )
        unfrozen = bucket is self._buckets[0] and any(map(self._store.awaits, self._outside))
        weight = self.weight if self.policy.weighted else None
        operation = ReduceBucket(signature, bucket.buffer, self._window(), unfrozen, weight)
        (bucket.handle,) = runtime.require("DistributedOptimizer").submit(operation)

    def _finish(self, bucket: _Bucket) -> bool:
        assert bucket.handle is not None
        unfrozen = bucket.handle.wait()
        for mark, slot in enumerate(bucket.plan.slots):
            if bucket.marks[mark]:
                self._store.deliver(slot.parameter)
            else:
                self._store.withdraw(slot.parameter)
        bucket.rearm()
        return bool(unfrozen)

    def _launch_sparse(self, index: int) -> Handle:
        weight = self.weight if self.policy.weighted else None
        options = Options(f"{self.name}.sparse.{index}", self.policy.process_set)
        return sparse.launch(self._store, index, self._sparse[index], weight, self._window(), options)

    def _add_buckets(self) -> list[_Bucket]:
        """Agree on which parameters get buckets now, in which order, and which have sparse gradients.

        Parameters that are frozen on all ranks get none, as long as others have one: a rank's
        submission for the first bucket tells the others that it has unfrozen some.
        """
        engine = runtime.require("DistributedOptimizer")
        policy, store, outside = self.policy, self._store, self._outside
        unseen = [index for index in reversed(outside) if index not in self._order]
        views = allgather_object(
            (
                [*(index for index in self._order if index not in self._bucket_of), *unseen],
                {index: store.sparse_dimensions(index) for index in outside},
                [index for index in outside if store.awaits(index)],
            ),
            f"{self.name}.order",
            policy.process_set,
        )
        awaited = {index for _, _, theirs in views for index in theirs}
        dimensions = {index: max(theirs[index] for _, theirs, _ in views) for index in outside}
        if not self._buckets and all(dimensions[index] for index in awaited):
            awaited = set(outside)
        self._sparse.update({index: dimensions[index] for index in sorted(awaited) if dimensions[index]})
        self._outside = [index for index in outside if index not in awaited]
        if self._outside or len(views) < engine.group(policy.process_set).size:
            self._incomplete_until = runtime.joins
        order = [index for index in views[0][0] if index in awaited and not dimensions[index]]
        plans = plan(self._specs, order, policy.bucket_bytes, policy.groups, policy.group_count)
        total, moved = sum(bucket_plan.nbytes for bucket_plan in plans), 0
        added = []
        for number, bucket_plan in enumerate(plans, len(self._buckets)):
            name = f"{self.name}.{number}"
            buffer = engine.run(Allocate(name, bucket_plan.nbytes, policy.process_set, engine.executor))
            assert isinstance(buffer, Buffer)
            memory = buffer.view(dtype_named(bucket_plan.dtype), bucket_plan.count)
            bucket = _Bucket(bucket_plan, name, buffer, memory[bucket_plan.marks_start :])
            bucket.rearm()
            for slot in bucket_plan.slots:
                self._bucket_of[slot.parameter] = bucket
                self._bind(slot, memory)
            added.append(bucket)
            moved += bucket_plan.nbytes
            if moved * _MOST_TRIMS >= total:
                _return_freed_memory()
                moved = 0
        self._planned = True
        self._buckets += added
        return added

    def _bind(self, slot: Slot, memory: Array) -> None:
        self._store.bind(slot.parameter, memory[slot.start : slot.start + slot.count])
        # At once, so that gradients and buckets are not both in memory for the whole model.
        self._store.collect(slot.parameter)


def _return_freed_memory() -> None:
    """The C library would keep the gradients that were freed: a second copy of the model, unused."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
