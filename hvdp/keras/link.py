"""What hvdp knows about one Keras optimizer, and its step on the gradients of all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import keras
from keras import ops

from hvdp._core import submit
from hvdp._core.arrays import Array, dtype_named
from hvdp._core.buckets import ParameterSpec
from hvdp._core.compression import Compressor, NoCompressor
from hvdp._core.ops import Adasum
from hvdp._core.runtime import runtime
from hvdp._core.submit import Options
from hvdp.basics import rank
from hvdp.errors import InvalidArgumentError
from hvdp.gradients import ArrayReducer
from hvdp.keras._backend import backend
from hvdp.keras.overlap import Overlap
from hvdp.optimizer import Policy
from hvdp.process_sets import ProcessSet

__all__ = ["Link", "is_replaced", "key_of", "known_keys", "label_of", "link_of", "path_of"]

Apply = Callable[[list[Any], Any], None]


def key_of(variable: Any) -> int:
    """Keras wraps TensorFlow's variables; both mean the same one."""
    if isinstance(variable, keras.Variable) and keras.backend.backend() == "tensorflow":
        variable = variable.value
    return id(variable)


@dataclass(eq=False)
class Link:
    """Between an optimizer and the other ranks.

    Attributes:
        groups: variables whose gradients are reduced together.
        local: keys of variables whose gradients stay this rank's own, divided by the number
            of ranks if `scale_local`.
        mean_of_passes: divide gradients by the number of accumulated passes.
        handed: keys of variables whose gradients have come here, if only in a traced program.
        overlap: of the reduction with backward.
        joins: how many there had been when the optimizer became ours.
    """

    policy: Policy
    process_set: ProcessSet
    compression: Compressor
    sparse_as_dense: bool = False
    groups: Sequence[Sequence[Any]] = ()
    local: set[int] = field(default_factory=set)
    scale_local: bool = True
    mean_of_passes: bool = False
    handed: set[int] = field(default_factory=set)
    inside: bool = False
    weight: float = 1.0
    reducer: ArrayReducer | None = None
    overlap: Overlap = field(init=False)
    joins: int = field(default_factory=lambda: runtime.joins)
    _serial: int = -1

    def __post_init__(self) -> None:
        _links.add(self)
        # A pass that failed could not be taken back from those before it.
        self.overlap = Overlap(self._to_send, possible=self.policy.passes_per_step == 1)
        self.reduced = backend().untraced(self.reduced)  # type: ignore[method-assign]
        self.combined = backend().untraced(self.combined)  # type: ignore[method-assign]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, calls that one optimizer makes of another are not ours to reduce."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def step(self, optimizer: Any, gradients: Sequence[Any], variables: Any, apply: Apply) -> None:
        """Reduce and apply."""
        gradients = list(gradients)
        if not gradients:
            return
        known = None if variables is None else list(variables)
        if not optimizer.built and known is not None:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(known)
            optimizer.built = True
        used = known or list(optimizer._trainable_variables)
        built = set(map(key_of, optimizer._trainable_variables))
        for variable in used:
            if key_of(variable) not in built:
                raise InvalidArgumentError(
                    f"rank {rank()}: the optimizer was built for other variables, without "
                    f"{path_of(variable)}: make a new optimizer for these, and wrap that"
                )
        with self.entered():
            self.handed.update(map(key_of, used))
            if self.policy.op is Adasum:
                starts = [ops.copy(variable) for variable in used]
                apply(self.scaled(gradients, used), known)
                for variable, end in zip(used, self.combined(starts, used, used), strict=True):
                    variable.assign(end)
                return
            results, done = self.reduced(optimizer, gradients, used)
            changing = [*used, *optimizer.variables] if not isinstance(done, bool) else []
            backend().when(done, lambda: apply(results or [], known), changing)

    def reduced(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[list[Any] | None, Any]:
        """The gradients of all ranks, and whether they are: after a window's last pass."""
        results = self.scaled(gradients, variables)
        passes = self.policy.passes_per_step
        if self.process_set.size() == 1 and passes == 1:
            return results, True
        everything = [variable for variable in optimizer._trainable_variables if self._is_shared(variable)]
        shared = len(everything)
        if passes > 1:
            everything += [v for v in optimizer._trainable_variables if key_of(v) in self.local]
        place_of = {key_of(variable): place for place, variable in enumerate(everything)}
        if self.reducer is None:
            self.reducer = self._made(everything, shared, place_of)
            self.overlap.watch(self.reducer, everything)
        taken = [i for i, variable in enumerate(variables) if key_of(variable) in place_of]
        own = {place_of[key_of(variables[index])]: results[index] for index in taken}
        sent: list[Any] = [None] * len(everything)
        contexts: dict[int, Any] = {}
        early = self.overlap.handed_over(own)
        for place, gradient in own.items():
            if gradient is not None:
                known = early.get(place)
                sent[place], contexts[place] = known or self._to_send(gradient, everything[place])
        found, done = backend().reduce(self.reducer, sent)
        if found is None:
            return None, done
        for index in taken:
            place = place_of[key_of(variables[index])]
            results[index] = self._received(found[place], contexts.get(place), variables[index])
        return results, done

    def combined(self, starts: Sequence[Any], ends: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The ends, shared ones as start plus Adasum of the changes (arXiv:2006.02924, section 4)."""
        if self.process_set.size() == 1:
            return list(ends)
        options = Options(f"{self._name()}.delta", self.process_set.number())

        def adasum(changes: list[Array]) -> list[Array]:
            operations = [
                submit.allreduce(change, Adasum, 1.0, 1.0, options.numbered(index))
                for index, change in enumerate(changes)
            ]
            submit.grouped(operations).wait()
            return changes

        results = list(ends)
        shared = [i for i, variable in enumerate(variables) if self._is_shared(variable)]
        totals = backend().call(adasum, [ops.subtract(ends[i], starts[i]) for i in shared])
        for index, total in zip(shared, totals, strict=True):
            results[index] = ops.add(starts[index], total)
        return results

    def scaled(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients, divided by the number of ranks where they are local and `scale_local` is true."""
        results, size = list(gradients), self.process_set.size()
        for index, variable in enumerate(variables):
            if (
                self.scale_local
                and size > 1
                and key_of(variable) in self.local
                and results[index] is not None
            ):
                results[index] = ops.divide(results[index], size)
        return results

    @property
    def windows(self) -> int:
        """How many windows this rank has reduced since `begin_anew`."""
        return 0 if self.reducer is None else self.reducer.windows

    def begin_anew(self) -> None:
        """On all ranks: forget the passes of a window that is not full."""
        if self.reducer is not None:
            self.reducer.begin_anew()

    def _name(self) -> str:
        if self._serial < 0:
            self._serial = runtime.serial(f"keras.adasum/{self.process_set.number()}")
        return f"keras.adasum.{self._serial}"

    def _is_shared(self, variable: Any) -> bool:
        return not is_replaced(variable) and key_of(variable) not in self.local

    def _is_compressed(self, variable: Any) -> bool:
        return key_of(variable) not in self.local and not isinstance(self.compression, NoCompressor)

    def _made(self, variables: Sequence[Any], shared: int, place_of: dict[int, int]) -> ArrayReducer:
        groups = tuple(
            tuple(place for key in map(key_of, group) if (place := place_of.get(key, shared)) < shared)
            for group in self.groups
        )
        specs = [self._spec(variable) for variable in variables]
        made = ArrayReducer(specs[:shared], replace(self.policy, groups=groups), local=specs[shared:])
        made.reducer.weight = self.weight
        return made

    def _spec(self, variable: Any) -> ParameterSpec:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if self._is_compressed(variable):
            sent, _ = self.compression.compress(ops.zeros((), dtype))
            dtype = keras.backend.standardize_dtype(sent.dtype)
        return ParameterSpec(label_of(variable), tuple(variable.shape), dtype, dtype_named(dtype).itemsize)

    def _to_send(self, gradient: Any, variable: Any) -> tuple[Any, Any]:
        local = key_of(variable) in self.local
        if (self.sparse_as_dense or local) and backend().is_sparse(gradient):
            gradient = backend().densified(gradient)
        if gradient.dtype != variable.dtype:
            gradient = ops.cast(gradient, variable.dtype)
        if local:
            return gradient, None
        compressed: tuple[Any, Any] = self.compression.compress(gradient)
        return compressed

    def _received(self, result: Any, context: Any, variable: Any) -> Any:
        if result is None:
            return None
        if self._is_compressed(variable):
            result = ops.cast(self.compression.decompress(result, context), variable.dtype)
        if self.mean_of_passes and self.policy.passes_per_step > 1:
            result = result / self.policy.passes_per_step
        return result


def is_replaced(variable: Any) -> bool:
    """Whether Keras takes its "gradient" for a new value, as with the scales of float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def label_of(variable: Any) -> str:
    """The layer and the variable, the same on all ranks.

    Without Keras's counters, as a rank may have made other layers before, and without the models around, of
    which one that was loaded knows nothing.
    """
    inner = "/".join(path_of(variable).split("/")[-2:])
    return re.sub(r"_\d+(?=[/_]|$)", "", inner)


def path_of(variable: Any) -> str:
    """As Keras names it on this rank."""
    path: str = getattr(variable, "path", variable.name)
    return path


def link_of(optimizer: Any) -> Link | None:
    """Of a DistributedOptimizer, or of one that it wraps."""
    while optimizer is not None:
        link = getattr(optimizer, "__dict__", {}).get("_hvdp")
        if isinstance(link, Link):
            return link
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def known_keys() -> set[int]:
    """Of all variables that some DistributedOptimizer has reduced, or knows to be a rank's own."""
    return {key for link in _links for key in (*link.handed, *link.local)}


_links: WeakSet[Link] = WeakSet()
