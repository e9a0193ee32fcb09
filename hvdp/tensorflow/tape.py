"""GradientTapes whose gradients are those of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from hvdp._core.compression import Compressor
from hvdp._core.config import Config
from hvdp._core.ops import Average, ReduceOp, Sum
from hvdp._core.policy import policy_fault
from hvdp._core.runtime import runtime
from hvdp.collectives import no_compression
from hvdp.errors import InvalidArgumentError
from hvdp.gradients import ArrayReducer
from hvdp.optimizer import Policy
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.tensorflow.gradients import reduce_gradients, spec_of

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

Groups = int | Sequence[Sequence[Any]] | None


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = no_compression,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape that has recorded what `gradtape` has, and whose `gradient()` is reduced; collective.

    Args:
        gradtape: a `tf.GradientTape`, after its `with`, or before.
        device_dense, device_sparse: accepted as Horovod accepts them; not needed.
        compression: how gradients travel: Compression.none, .fp16 or .bf16.
        sparse_as_dense: IndexedSlices are reduced as dense gradients.
        op: Average or Sum.
        gradient_predivide_factor: an average is divided by this before the sum over ranks,
            and by the rest after it.
        num_groups, groups: gradients that are reduced together: how many groups to form, or
            lists of variables.
        process_set: the ranks that train together; only they call.
        scale_local_gradients: for sources given to `register_local_source`: their gradients
            stay this rank's own, divided by the number of ranks.
    """
    if fault := policy_fault(op, predivide=gradient_predivide_factor, ops=(Average, Sum)):
        raise InvalidArgumentError(fault)
    runtime.require("DistributedGradientTape")
    base = type(gradtape)
    made: Any = type(f"Distributed{base.__name__}", (_DistributedTape, base), {})
    tape: Any = made.__new__(made)
    tape.__dict__.update(gradtape.__dict__)
    policy = Policy(
        ReduceOp(op),
        1,
        Config.from_env().fusion_threshold,
        gradient_predivide_factor,
        group_count=groups if isinstance(groups, int) else num_groups,
        process_set=process_set.number(),
    )
    variable_groups = () if groups is None or isinstance(groups, int) else groups
    tape._hvdp = _Reductions(
        policy, compression, sparse_as_dense, variable_groups, process_set, scale_local_gradients
    )
    return tape


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = no_compression,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """DistributedGradientTape that leaves the variables of `local_layers`, a layer or several, alone."""
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    layers = local_layers if isinstance(local_layers, Collection) else [local_layers]
    for layer in layers:
        for variable in [] if layer is None else layer.trainable_variables:
            tape.register_local_source(variable)
    return tape


class _Reductions:
    """How a tape's gradients are reduced: one reducer for each list of sources."""

    def __init__(
        self,
        policy: Policy,
        compression: Compressor,
        sparse_as_dense: bool,
        groups: Sequence[Sequence[Any]],
        process_set: ProcessSet,
        scale_local: bool,
    ) -> None:
        self.local: set[int] = set()
        self._policy = policy
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._groups = [[_key(variable) for variable in group] for group in groups]
        self._process_set = process_set
        self._scale_local = scale_local

    def reduce(self, gradients: list[Any], sources: list[Any]) -> list[Any]:
        results = list(gradients)
        shared = [i for i, source in enumerate(sources) if _key(source) not in self.local]
        for index in set(range(len(sources))) - set(shared):
            if self._scale_local and gradients[index] is not None:
                results[index] = gradients[index] / self._process_set.size()
        sent = [self._to_send(gradients[index]) for index in shared]
        reducer = self._reducer([sources[index] for index in shared])
        reduced, _ = reduce_gradients(reducer, [tensor for tensor, _ in sent], copy=True)
        for index, result, (_, context) in zip(shared, reduced or [], sent, strict=True):
            results[index] = None if result is None else self._compression.decompress(result, context)
        return results

    def _to_send(self, gradient: Any) -> tuple[Any, Any]:
        if gradient is None:
            return None, None
        if isinstance(gradient, tf.IndexedSlices) and self._sparse_as_dense:
            gradient = tf.convert_to_tensor(gradient)
        compressed: tuple[Any, Any] = self._compression.compress(gradient)
        return compressed

    def _reducer(self, sources: list[Any]) -> ArrayReducer:
        """The one for these sources; tapes come and go with each step, reducers stay."""
        keys = tuple(_key(source) for source in sources)
        index_of = {key: index for index, key in enumerate(keys)}
        groups = tuple(tuple(index_of[k] for k in group if k in index_of) for group in self._groups)
        policy = Policy(**{**self._policy.__dict__, "groups": groups})
        store = _reducers()
        key = (keys, policy, id(self._compression), self._sparse_as_dense)
        if key not in store:
            specs = []
            for number, source in enumerate(sources):
                sent, _ = self._compression.compress(tf.zeros([], source.dtype))
                specs.append(spec_of(f"source.{number}", source.shape, sent.dtype.name))
            # The sources are kept, so that no other one gets the identity of one that is gone.
            store[key] = (ArrayReducer(specs, policy), sources)
        return store[key][0]


class _DistributedTape(tf.GradientTape):  # type: ignore[misc]
    """What DistributedGradientTape adds to the tape's own class."""

    _hvdp: _Reductions

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable stays this rank's own."""
        self._hvdp.local.add(_key(source))

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As the tape's own, reduced over the ranks."""
        gradients = super().gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(sources)
        found = self._hvdp.reduce(tf.nest.flatten(gradients), flat)
        return tf.nest.pack_sequence_as(sources, found)


def _key(source: Any) -> int:
    """Keras wraps TensorFlow's variables; both mean the same one."""
    value = getattr(source, "value", source)
    return id(source if callable(value) else value)


def _reducers() -> dict[Any, tuple[ArrayReducer, list[Any]]]:
    """Of this job; `init` after `shutdown` begins with none."""
    engine = runtime.require("DistributedGradientTape")
    if _cache.get("engine") is not engine:
        _cache.clear()
        _cache.update(engine=engine, reducers={})
    reducers: dict[Any, tuple[ArrayReducer, list[Any]]] = _cache["reducers"]
    return reducers


_cache: dict[str, Any] = {}
