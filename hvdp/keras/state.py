"""The same variables everywhere: a model's, and its optimizer's, from one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import keras

from hvdp._core.agreement import check_same_variables
from hvdp._core.objects import allgather_object
from hvdp._core.runtime import runtime
from hvdp._numpy import collectives
from hvdp.keras.link import key_of, link_of

__all__ = ["broadcast_global_variables", "broadcast_variables", "shared_variables", "sync"]


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Assign rank `root_rank`'s values to Keras variables, matched by their order; collective.

    Raises:
        MismatchError: the ranks' shapes or dtypes differ; on every rank.
    """
    chosen = list(variables)
    dtypes = [keras.backend.standardize_dtype(variable.dtype) for variable in chosen]
    check_same_variables(zip((variable.shape for variable in chosen), dtypes, strict=True))
    label = f"keras.variables.{runtime.serial('keras.variables')}"
    numeric = [i for i, dtype in enumerate(dtypes) if dtype != "string"]
    arrays = {i: keras.ops.convert_to_numpy(chosen[i]) for i in numeric}
    handles = {i: collectives.broadcast_async(arrays[i], root_rank, f"{label}.{i}") for i in numeric}
    for index, handle in handles.items():
        chosen[index].assign(handle.wait())


def shared_variables(
    model: Any, local: Collection[Any] = (), optimizer: bool = True, statistics: bool = True
) -> list[Any]:
    """A model's variables, those that are not trained if wanted, and its optimizer's if wanted, each once.

    Without those in `local` and those that the optimizer knows to be this rank's own, and
    without what the optimizer keeps about them.
    """
    own = getattr(model, "optimizer", None)
    link = link_of(own)
    apart = {key_of(variable) for variable in local} | (link.local if link else set())
    everything = list(model.variables if statistics else model.trainable_variables)
    if own is not None and optimizer:
        everything += own.variables
        apart |= {key_of(slot) for slot in _slots(own, apart)}
    return list({key_of(v): v for v in everything if key_of(v) not in apart}.values())


def _slots(optimizer: Any, keys: Collection[int]) -> Iterator[Any]:
    """What an optimizer, and one within it, keeps about the variables with these keys."""
    while optimizer is not None:
        variables = getattr(optimizer, "_trainable_variables", [])
        places = [i for i, variable in enumerate(variables) if key_of(variable) in keys]
        for name, kept in vars(optimizer).items():
            # Keras's optimizers have a list of each kind of slot, in the order of the variables.
            if name != "_variables" and isinstance(kept, list) and len(kept) == len(variables):
                yield from (kept[place] for place in places)
        optimizer = getattr(optimizer, "inner_optimizer", None)


def broadcast_global_variables(root_rank: int, model: Any = None, local: Sequence[Any] = ()) -> None:
    """Give every rank the model's and its optimizer's variables of rank `root_rank`; collective.

    An optimizer that has no state yet gets it where any rank has some, so that all have the same.

    Args:
        model: compiled, and built alike on all ranks.
        local: variables that stay this rank's own, besides a PartialDistributedOptimizer's.
    """
    optimizer = getattr(model, "optimizer", None)
    some_have_state = any(allgather_object(optimizer is not None and optimizer.built))
    if optimizer is not None and not optimizer.built and some_have_state:
        optimizer.build(model.trainable_variables)
    broadcast_variables(shared_variables(model, local), root_rank)


def sync(model: Any) -> None:
    """On JAX a model's variables are behind during an epoch, and what is assigned then would be lost."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
