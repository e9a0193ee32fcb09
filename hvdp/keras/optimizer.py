"""DistributedOptimizer for any Keras optimizer, on any backend."""

from __future__ import annotations

import copyreg
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import keras
from keras import ops

from hvdp._core.compression import CastCompressor, Compressor
from hvdp._core.config import Config
from hvdp._core.ops import Adasum, Average, ReduceOp
from hvdp._core.policy import policy_fault
from hvdp._core.runtime import runtime
from hvdp.collectives import no_compression
from hvdp.errors import InvalidArgumentError
from hvdp.keras import hooks
from hvdp.keras._backend import backend
from hvdp.keras.link import Link, key_of, link_of
from hvdp.optimizer import Policy
from hvdp.process_sets import ProcessSet, global_process_set

__all__ = ["Compression", "DistributedOptimizer", "PartialDistributedOptimizer"]

AnyOptimizer = TypeVar("AnyOptimizer")
Groups = int | Sequence[Sequence[Any]] | None


def _floating(tensor: Any) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype)))


class Compression:
    """What `compression=` takes: float32 and float64 may travel as 16-bit floats."""

    none = no_compression
    fp16 = CastCompressor("float16", _floating, lambda tensor, dtype: ops.cast(tensor, _named(dtype)))
    bf16 = CastCompressor("bfloat16", _floating, lambda tensor, dtype: ops.cast(tensor, _named(dtype)))


def _named(dtype: Any) -> str:
    name: str = keras.backend.standardize_dtype(dtype)
    return name


def DistributedOptimizer(
    optimizer: AnyOptimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = no_compression,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Groups = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    weighted: bool = False,
) -> AnyOptimizer:
    """Make an optimizer step on the gradients of all ranks.

    The optimizer itself is changed and returned: it stays an instance of its class, and is
    saved as one. Gradients are averaged when they come to `apply`, so that clipping, loss
    scaling, weight decay and moving averages see averaged gradients.

    Args:
        name, device_dense, device_sparse: accepted as Horovod accepts them; not needed.
        compression: how gradients travel: Compression.none, .fp16 or .bf16.
        sparse_as_dense: IndexedSlices and the like are reduced as dense gradients.
        gradient_predivide_factor: an average is divided by this before the sum over ranks,
            and by the rest after it.
        op: Average, Sum, or Adasum, which combines what each rank's own step would change.
        num_groups, groups: gradients that are reduced together: how many groups to form, or
            lists of variables. By default they share buckets.
        backward_passes_per_step: calls of `apply` whose gradients add up to one step; the
            others leave everything as it is, `iterations` too.
        average_aggregated_gradients: average over those calls, instead of adding up.
        process_set: the ranks that train together; only they call.
        scale_local_gradients: see `PartialDistributedOptimizer`.
        weighted: ranks count by the number they give to `optimizer.set_weight(n)` before a
            step, such as the batch's samples: the average is then that of all samples.

    Raises:
        InvalidArgumentError: an argument is wrong.
    """
    runtime.require("DistributedOptimizer")
    optimizer = keras.optimizers.get(optimizer)
    backend()
    fault = _fault(optimizer, op, backward_passes_per_step, gradient_predivide_factor, weighted, groups)
    if fault:
        raise InvalidArgumentError(fault)
    policy = Policy(
        ReduceOp(op),
        backward_passes_per_step,
        Config.from_env().fusion_threshold,
        gradient_predivide_factor,
        group_count=groups if isinstance(groups, int) else num_groups if groups is None else 0,
        process_set=process_set.number(),
        weighted=weighted,
    )
    hooks.install()
    link = Link(policy, process_set, compression, sparse_as_dense)
    link.groups = () if groups is None or isinstance(groups, int) else groups
    link.scale_local = scale_local_gradients
    link.mean_of_passes = average_aggregated_gradients
    base = type(optimizer)
    optimizer.__class__ = type(f"Distributed{base.__name__}", (_Distributed, base), {})
    hooks.attach(optimizer, link)
    return optimizer


def PartialDistributedOptimizer(
    optimizer: AnyOptimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = no_compression,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> AnyOptimizer:
    """DistributedOptimizer that leaves the layers local to this rank alone.

    Args:
        local_layers: a built layer or several, whose gradients stay this rank's own.
        scale_local_gradients: divide those by the number of ranks, which makes the loss that
            all ranks minimise the mean of theirs.
    """
    wrapped = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        0,
        groups,
        backward_passes_per_step,
        average_aggregated_gradients,
        process_set,
        scale_local_gradients,
    )
    layers = local_layers if isinstance(local_layers, Collection) else [local_layers]
    for layer in layers:
        for variable in [] if layer is None else layer.trainable_variables:
            wrapped.register_local_var(variable)  # type: ignore[attr-defined]
    return wrapped


def _fault(optimizer: Any, op: int, passes: int, predivide: float, weighted: bool, groups: Groups) -> str:
    """What is wrong with the arguments, or ""."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return f"optimizer must be a Keras optimizer. Received: {type(optimizer).__name__}"
    if link_of(optimizer) is not None:
        return "the optimizer is a DistributedOptimizer already, or wraps one"
    if fault := policy_fault(op, passes, predivide, weighted):
        return fault
    if op == Adasum and passes > 1:
        return "op=hvd.Adasum combines every step; use the optimizer's gradient_accumulation_steps"
    if isinstance(groups, int) and groups < 0:
        return f"groups must not be negative. Received: {groups}"
    return ""


class _Distributed:
    """What DistributedOptimizer adds to the optimizer's own class."""

    _hvdp: Link

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The original class, by which Keras saves the optimizer: who loads it needs no hvdp."""
        return type(self).__mro__[2]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """As the optimizer's own, with the gradients of all ranks."""
        apply = super().apply  # type: ignore[misc]
        if self._hvdp.inside:
            apply(grads, trainable_variables)
        else:
            self._hvdp.step(self, grads, trainable_variables, apply)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """As the optimizer's own, with the gradients of all ranks."""
        stateless_apply = super().stateless_apply  # type: ignore[misc]
        if self._hvdp.inside:
            return stateless_apply(optimizer_variables, grads, trainable_variables)
        return hooks.stateless_step(
            self._hvdp, self, optimizer_variables, grads, trainable_variables, stateless_apply
        )

    def set_weight(self, weight: float) -> None:
        """How much this rank's next gradients count: the samples behind them, 0 for none.

        Stays until set again; needs `weighted=True`. Where all ranks give 0, gradients are zero.
        """
        link = self._hvdp
        link.weight = link.policy.checked_weight(weight)
        if link.reducer is not None:
            link.reducer.reducer.weight = link.weight

    def register_local_var(self, variable: Any) -> None:
        """The gradient of this variable stays this rank's own; before the first step."""
        self._hvdp.local.add(key_of(variable))

    def __reduce__(self) -> Any:
        """Copies and pickles are plain optimizers of the original class."""
        state = {key: value for key, value in self.__dict__.items() if key != "_hvdp"}
        return copyreg.__newobj__, (self.__class__,), state  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()
