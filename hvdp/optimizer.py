"""The mechanism of every DistributedOptimizer: gradients into buckets, buckets reduced.

An adapter tells this module when a gradient is ready and when a backward pass has ended,
and moves gradients between its tensors and the buckets' memory (`GradientStore`). What to
reduce, when, under which name and how the ranks agree on it is decided here, once for all
frameworks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from hvdp._core import sparse
from hvdp._core.agreement import check_same_parameters
from hvdp._core.bucketing import Bucket, Bucketing
from hvdp._core.buckets import ParameterSpec
from hvdp._core.handles import Handle
from hvdp._core.policy import Policy
from hvdp._core.runtime import runtime
from hvdp._core.store import GradientStore
from hvdp._core.submit import Options
from hvdp.errors import HvdpError, InvalidArgumentError

__all__ = ["GradientReducer", "GradientStore", "Policy"]


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
        self.weight = self._reduced_weight = 1.0
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
        self._bucketing = Bucketing(self.name, self._store, self._specs, self.policy)
        self._launching = False

    def ready(self, index: int) -> None:
        """The gradient of a parameter has got this pass's share.

        Raises:
            InvalidArgumentError: it was added to a gradient that has been reduced already, and
                reducing that again would count it more than once.
        """
        self._plan_again_after_join()
        self._refuse_to_reduce_again([index])
        bucket = self._bucketing.of(index)
        if bucket is None:
            self._bucketing.note(index)
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
        if not self._bucketing.planned:
            self._bucketing.add()
        return [tuple(slot.parameter for slot in bucket.plan.slots) for bucket in self._bucketing.buckets]

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
        """Reduce what no window's end has reduced: the last passes, or all there is before this step.

        Raises:
            InvalidArgumentError: the weight is not the one that the gradients were reduced with.
        """
        self._may_skip = False
        if self._passes or not self._reductions or self._store.lost_reduced(self.policy.repeatable):
            self.reduce()
        if self.weight != self._reduced_weight:
            raise InvalidArgumentError(
                f"set_weight({self.weight}) came after the backward() of this step, whose gradients were "
                f"averaged with weight {self._reduced_weight}: call it before backward()."
            )

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
        self._reduced_weight = self.weight
        self._plan_again_after_join()
        bucketing = self._bucketing
        if not bucketing.planned:
            bucketing.add()
        if self._reduce(bucketing.buckets, bucketing.sparse):
            known = set(bucketing.sparse)
            added = bucketing.add()
            self._reduce(added, [index for index in bucketing.sparse if index not in known])
        self._launching = False

    def _reduce(self, buckets: Sequence[Bucket], sparse_ones: Iterable[int]) -> bool:
        """Whether a parameter without a bucket may have a gradient, on any rank."""
        gathered = {index: self._launch_sparse(index) for index in sparse_ones}
        for bucket in buckets:
            if bucket.handle is None:
                self._launch(bucket)
        try:
            unfrozen = [self._bucketing.finish(bucket) for bucket in buckets]
            for index, handle in gathered.items():
                sparse.finish(self._store, index, self.policy.op, handle)
        except HvdpError:
            self._abandon(gathered.values())
            raise
        return any(unfrozen)

    def _abandon(self, gathered: Iterable[Handle] = ()) -> None:
        """Let what is in flight end, however it ends, and be ready to begin anew."""
        for handle in gathered:
            with contextlib.suppress(HvdpError):
                handle.wait()
        self._bucketing.abandon()
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
        if self._bucketing.outdated:
            self._forget_buckets()

    def _launch(self, bucket: Bucket) -> None:
        self._bucketing.launch(bucket, self._window(), self._own_weight)

    @property
    def _own_weight(self) -> float | None:
        return self.weight if self.policy.weighted else None

    def _launch_sparse(self, index: int) -> Handle:
        options = Options(f"{self.name}.sparse.{index}", self.policy.process_set)
        dimensions = self._bucketing.sparse[index]
        return sparse.launch(self._store, index, dimensions, self._own_weight, self._window(), options)
