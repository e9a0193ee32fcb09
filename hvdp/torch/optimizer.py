"""DistributedOptimizer for any `torch.optim` optimizer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from hvdp._core.compression import Compressor
from hvdp._core.config import Config
from hvdp._core.ops import Adasum, Average, ReduceOp
from hvdp._core.policy import policy_fault
from hvdp._core.runtime import runtime
from hvdp.collectives import no_compression
from hvdp.errors import InvalidArgumentError
from hvdp.optimizer import GradientReducer, Policy
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.scaling import LrScaling
from hvdp.torch.adasum import DeltaAdasum
from hvdp.torch.arguments import Groups, NamedParameters, grouped, named
from hvdp.torch.closures import with_all_ranks
from hvdp.torch.consistency import DriftWatch
from hvdp.torch.gradients import TorchGradients
from hvdp.torch.passes import PassWatch, hook_on, remove
from hvdp.torch.rates import rate_scaler, scale_with_schedulers
from hvdp.torch.steps import outermost

__all__ = ["DistributedOptimizer"]

_log = logging.getLogger(__name__)

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: AnyOptimizer,
    named_parameters: NamedParameters | None = None,
    compression: Compressor = no_compression,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    lr_scaling: LrScaling | None = None,
    weighted: bool = False,
) -> AnyOptimizer:
    """Make an optimizer step on the gradients of all ranks; collective.

    The optimizer itself is changed and returned: it stays an instance of its class, and
    schedulers that hold it stay valid. Gradients are averaged when the last `backward()`
    of a step's `backward_passes_per_step` returns, so clipping, `GradScaler` and logging
    see averaged gradients without any further call. A window with fewer passes than that is
    reduced by `step()`, or by `synchronize()`, which then has to come before clipping.

    Args:
        named_parameters: `model.named_parameters()`, for messages; must name every parameter.
        compression: how gradients travel: Compression.none, .fp16 or .bf16.
        backward_passes_per_step: `backward()` calls that accumulate before each `step()`.
        op: Average, Sum, or Adasum, which combines what each rank's own step would change.
        gradient_predivide_factor: an average is divided by this before the sum over ranks,
            and by the rest after it.
        num_groups, groups: gradients that are reduced together: how many groups to form, or
            lists of parameters. By default they share buckets as they become ready.
        sparse_as_dense: sparse gradients are reduced as dense ones.
        process_set: the ranks that train together; only they call.
        lr_scaling: multiply the learning rate once, for the batch that all ranks and
            passes form together: "linear", "sqrt" or not at all. Checkpoints remember it.
        weighted: ranks count by the number they give to `optimizer.set_weight(n)` before
            `backward()`, such as the batch's samples: the average is then that of all samples.

    Raises:
        MismatchError: the ranks hold different parameters; names the first of them.
        InvalidArgumentError: an argument is wrong on any rank; on every rank.
    """
    engine = runtime.require("DistributedOptimizer")
    if isinstance(optimizer, _Distributed):
        fault = "the optimizer is a DistributedOptimizer already"
    else:
        fault = policy_fault(op, backward_passes_per_step, gradient_predivide_factor, weighted)
    parameters, names, name_fault = named(optimizer, named_parameters)
    sharing, count, group_fault = grouped(num_groups if groups is None else groups, parameters)
    fault = fault or name_fault or group_fault
    policy = Policy(
        Average if fault else ReduceOp(op),
        backward_passes_per_step,
        Config.from_env().fusion_threshold,
        gradient_predivide_factor,
        sharing,
        count,
        process_set.number(),
        weighted,
    )
    sparse_alone = isinstance(optimizer, torch.optim.SparseAdam)
    store = TorchGradients(parameters, names, compression, sparse_as_dense, sparse_alone)
    reducer = GradientReducer(store, store.specs(), policy, fault)
    base = type(optimizer)
    optimizer.__class__ = type(f"Distributed{base.__name__}", (_Distributed, base), {})
    assert isinstance(optimizer, _Distributed)
    optimizer._attach(reducer, store)
    if lr_scaling is not None:
        announces = engine.rank == engine.group(policy.process_set).ranks[0]
        scale = rate_scaler(lr_scaling, process_set.size() * backward_passes_per_step, announces)
        scale_with_schedulers(optimizer, scale)
        optimizer._scale = scale
        optimizer.register_load_state_dict_post_hook(scale)
    return optimizer


class _Distributed(torch.optim.Optimizer):
    """What DistributedOptimizer adds to the optimizer's own class."""

    _reducer: GradientReducer
    _store: TorchGradients
    _delta: DeltaAdasum | None
    _drift: DriftWatch
    _lost = ""
    _told = False
    _scale: Callable[[torch.optim.Optimizer], None] | None = None

    def _attach(self, reducer: GradientReducer, store: TorchGradients) -> None:
        self._reducer = reducer
        self._delta = None
        if reducer.policy.op is Adasum:
            self._delta = DeltaAdasum(reducer)
        self._watch(store)
        self.register_step_pre_hook(outermost(_before_step))
        self.register_step_post_hook(outermost(_after_step))
        self._drift = DriftWatch(self, reducer.policy.process_set, reducer.name)
        runtime.joining.add(self)

    def _watch(self, store: TorchGradients) -> None:
        self._store = store
        _take_over(self)
        hooks = []
        if self._delta is None:
            watch = PassWatch(self._reducer, store)
            hooks = [hook_on(p, watch.hook(i)) for i, p in enumerate(store.parameters)]
            if not self._reducer.policy.repeatable:
                hooks += [hook_on(p, _zeroes(store, i), before=True) for i, p in enumerate(store.parameters)]
        # The parameters outlive the optimizer: without it nothing must be reduced any more.
        self._detach = weakref.finalize(self, remove, hooks)
        self._detach.atexit = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by a GradScaler, which then steps, or skips the step and says no more.

        With Adasum it leaves it to the step whether to skip, so that the ranks can agree on it.
        """
        self._reducer.announce_step()
        self._store.remember(False)  # it has divided the gradients, which is as good before they are averaged
        return self._delta is not None or vars(self).get("_step_supports_amp_scaling", False)

    def _require_parameters(self) -> None:
        if self._lost:
            raise InvalidArgumentError(
                f"parameter {self._lost!r} belongs to a DistributedOptimizer that was made later, so this "
                "one no longer reduces gradients. Of two that share parameters only the newer can be used: "
                "give all parameters to one optimizer, in several parameter groups, or the shared ones to "
                "one of the two."
            )

    def synchronize(self) -> None:
        """Reduce what no backward pass has reduced yet; Horovod scripts call it before clipping."""
        self._require_parameters()
        if self._delta is None:
            self._reducer.before_step()
            self._store.remember(False)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Around a `step()` after `synchronize()`, as Horovod scripts write it; costs nothing."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next window on; the same on all ranks."""
        if passes < 1:
            raise InvalidArgumentError(f"backward_passes_per_step must be at least 1. Received: {passes}")
        self._reducer.passes_per_step = passes

    def set_weight(self, weight: float) -> None:
        """How much this rank's next gradients count: the samples behind them, 0 for none.

        Stays until set again; needs `weighted=True`. Where all ranks give 0, there are no gradients.
        One weight counts for all backward passes of a step: give the step's samples, and let each
        loss be the sum over its own samples divided by that number.
        """
        weight = self._reducer.policy.checked_weight(weight)
        if self._reducer.within_window and weight != self._reducer.weight:
            raise InvalidArgumentError(
                "set_weight() between the backward passes of one step would weight the earlier ones, too: "
                "give the samples of the whole step before its first pass, and divide each loss by them. "
                f"Received: {weight} after {self._reducer.weight}"
            )
        self._reducer.weight = weight

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own; what has been accumulated in this window is dropped."""
        super().zero_grad(set_to_none)
        self._reducer.cleared()

    def joined(self) -> None:
        """Begin a window anew, as all ranks do: others have used the memory of a joined rank's gradients."""
        if self._delta is not None:
            return  # gradients are each rank's own, in memory of their own
        if self._reducer.within_window:
            _log.warning(
                "rank %d joined with gradients of a window that was not full, which are dropped: "
                "step() before join() uses them",
                runtime.require("join").rank,
            )
        # Also zeros that were kept for the next backward to add to: they are others' gradients now.
        self.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own, on all ranks; the new parameters are reduced like the others."""
        super().add_param_group(param_group)
        if hasattr(self, "_reducer"):
            self._detach()
            parameters, names, fault = named(self, None)
            names[: len(self._store.names)] = self._store.names
            store = self._store.of(parameters, names)
            self._reducer.replace(store, store.specs(), fault)
            self._watch(store)
            if self._scale is not None:
                self._scale(self)

    def __reduce__(self) -> Any:
        """Copies and pickles are plain optimizers of the original class."""
        base = type(self).__mro__[2]
        return base.__new__, (base,), self.__getstate__()


_live: weakref.WeakSet[_Distributed] = weakref.WeakSet()


def _take_over(optimizer: _Distributed) -> None:
    """The optimizer's parameters are its own from now on: two would reduce one gradient twice."""
    optimizer._lost = ""
    mine = set(map(id, optimizer._store.parameters))
    for other in set(_live) - {optimizer}:
        store = other._store
        shared = [name for p, name in zip(store.parameters, store.names, strict=True) if id(p) in mine]
        if shared:
            other._lost = shared[0]
            other._detach()
            _live.discard(other)
    _live.add(optimizer)


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    optimizer._require_parameters()
    if optimizer._delta is not None:
        optimizer._delta.before_step(optimizer, optimizer._store.parameters)
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if optimizer._reducer.within_window and optimizer._store.changed() and not optimizer._told:
        optimizer._told = True
        _log.warning(
            "rank %d changed gradients (by clipping?) that were not averaged over the ranks yet, after fewer "
            "than the %d backward() calls of a step: call optimizer.synchronize() before that",
            runtime.require("step").rank,
            optimizer._reducer.passes_per_step,
        )
    if closure is None:
        optimizer._reducer.before_step()
        return None
    reducing = with_all_ranks(closure, optimizer._reducer)
    if len(args) > 1:
        return (args[0], reducing, *args[2:]), kwargs
    return args, {**kwargs, "closure": reducing}


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if optimizer._delta is not None:
        optimizer._delta.after_step(optimizer._store.parameters)
    optimizer._reducer.after_step()


def _zeroes(store: TorchGradients, index: int) -> Callable[[torch.Tensor], None]:
    return lambda _: store.forget_zeroed(index)
