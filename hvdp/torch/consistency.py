"""Parameters and optimizer state that are no longer, or never were, equal on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hvdp._core.config import Config
from hvdp._core.handles import Handle
from hvdp._core.runtime import runtime
from hvdp.consistency import Entry, digest, find_drift, require_same
from hvdp.epochs import check_epochs, epochs_check
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.torch.steps import outermost

__all__ = ["DriftWatch", "check_consistency"]

_log = logging.getLogger(__name__)

_HEAD = 1 << 14
"""Elements of each tensor that the first step looks at: enough to tell initial states apart."""


def check_consistency(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Raise if parameters differ between ranks, be it in one bit, or epochs of shards; collective.

    Every value is hashed where it is, and 8 bytes for each are exchanged. Buffers are left
    out: running statistics differ by nature (see `average_buffers`).

    Args:
        optimizer: its state and options are compared as well. With op=hvd.Adasum the state
            differs by nature.

    Raises:
        MismatchError: on every rank, naming the first that differs and the ranks.
    """
    entries = _parameters(model.named_parameters())
    if optimizer is not None:
        entries += _optimizer(optimizer, _names(model))
    watch = getattr(optimizer, "_drift", None)
    require_same("check_consistency", entries, process_set.number(), watch.step if watch else 0)
    check_epochs("check_consistency", process_set.number())


class DriftWatch:
    """Looks at a DistributedOptimizer's parameters at its first step, and every so many steps.

    Also at whether the ranks are in the same epoch of their shards.

    Args:
        optimizer: a DistributedOptimizer; keeps the watch.

    Attributes:
        step: how many steps this rank has made with it.
    """

    def __init__(self, optimizer: Any, process_set: int, name: str) -> None:
        self.step = 0
        self._process_set = process_set
        self._name = f"consistency.{name}"
        self._every = Config.from_env().check_every
        self._joins = runtime.joins
        # Steps since the last join: the ranks made different numbers of them before.
        self._since = 0
        self._pending: tuple[int, Handle | None] = 0, None
        if runtime.require("DistributedOptimizer").group(process_set).size > 1:
            optimizer.register_step_pre_hook(outermost(self._before))
            optimizer.register_step_post_hook(outermost(self._after))

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.step or self._joins != runtime.joins:
            return
        entries = _parameters(_named(optimizer), _HEAD)
        parameters = len(entries)
        entries += _optimizer(optimizer, {p: name for name, p in _named(optimizer)}, _HEAD)
        drift = find_drift(f"{self._name}.start", entries, self._process_set)
        engine = runtime.require("DistributedOptimizer")
        if drift is None or engine.rank != engine.group(self._process_set).ranks[0]:
            return
        call = "broadcast_optimizer_state(optimizer, root_rank=0)"
        if drift.index < parameters and not drift.missing:
            call = "broadcast_parameters(model.state_dict(), root_rank=0)"
        _log.warning(
            "at the first step %s: call hvd.%s before training, or the ranks train apart", drift, call
        )

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._joins != runtime.joins:
            self._joins, self._since = runtime.joins, 0
        self._warn_of_epochs()
        self.step += 1
        self._since += 1
        every = bool(self._every) and self._since % self._every == 0
        if every:
            require_same(f"{self._name}.every", _parameters(_named(optimizer)), self._process_set, self.step)
            check_epochs(self._name, self._process_set)
        elif self._since & (self._since - 1) == 0:
            # Unasked after steps 1, 2, 4, 8, ...: soon enough, and in the end for nothing.
            self._pending = self.step, epochs_check(self._name, self._process_set)

    def _warn_of_epochs(self) -> None:
        """Of the step before: to wait in that step could be for a rank that waits for another optimizer's.

        No error: a loop over shards of different lengths may well go round at different steps.
        """
        (step, handle), self._pending = self._pending, (0, None)
        try:
            if handle is not None:
                handle.wait()
        except MismatchError as difference:
            engine = runtime.require("DistributedOptimizer")
            if engine.rank == engine.group(self._process_set).ranks[0]:
                _log.warning("after step %d %s", step, difference)


def _names(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _named(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a DistributedOptimizer as it names them."""
    store = optimizer._store
    return zip((spec.name for spec in store.specs()), store.parameters, strict=True)


def _parameters(named: Iterable[tuple[str, torch.Tensor]], most: int | None = None) -> list[Entry]:
    return [Entry(f"parameter {name!r}", _digest(tensor, most)) for name, tensor in named]


def _optimizer(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], most: int | None = None
) -> list[Entry]:
    entries = []
    for number, group in enumerate(optimizer.param_groups):
        entries += [
            Entry(f"option {key!r} of parameter group {number}", _digest(value, most))
            for key, value in group.items()
            if key != "params"
        ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        name = names.get(parameter, f"parameter.{number}")
        entries += [
            Entry(f"optimizer state {key!r} of {name!r}", _digest(value, most))
            for key, value in optimizer.state.get(parameter, {}).items()
        ]
    return entries


def _digest(value: Any, most: int | None) -> int:
    """Of a tensor's first elements in logical order, or of plain values and what they contain."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.sparse_coo:
            entries = value.detach().coalesce()
            return _digest([*value.shape, entries.indices(), entries.values()], most)
        if value.layout is not torch.strided:
            raise InvalidArgumentError(f"only dense tensors can be compared. Received: layout {value.layout}")
        flat = value.detach().reshape(-1)[:most].cpu().resolve_conj().resolve_neg().contiguous()
        return digest(flat.view(torch.uint8).numpy())
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    if isinstance(value, list | tuple):
        return digest(b"".join(_digest(item, most).to_bytes(8, "little") for item in value))
    plain = value is None or isinstance(value, bool | int | float | complex | str)
    # The text of other objects may tell where in memory they are.
    return digest(repr(value).encode() if plain else type(value).__name__.encode())
