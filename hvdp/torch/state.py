"""The same initial state everywhere: parameters and optimizer state from one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from hvdp._core import wording
from hvdp._core.agreement import check_same_parameters
from hvdp._core.buckets import ParameterSpec
from hvdp._core.objects import broadcast_object
from hvdp._core.runtime import runtime
from hvdp.torch._arrays import dtype_name
from hvdp.torch.collectives import collectives

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
    root_rank: int = 0,
) -> None:
    """Give every rank the values of rank `root_rank`; collective.

    Tensors are overwritten in place. Other entries of a mapping (counters, None, a module's
    `_extra_state`) are replaced in the mapping: `model.load_state_dict(state)` then hands
    them to the model, if it has any.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or tensors without names such
            as `list(model.parameters())`; pairs without a tensor are left alone.

    Raises:
        MismatchError: the ranks' names, shapes or dtypes differ; on every rank.
    """
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    fault = ""
    try:
        for name, value in params.items() if isinstance(params, Mapping) else _pairs(params):
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(params, MutableMapping):
                others.append(name)
    except Exception:  # noqa: BLE001 - an iterable of any kind
        fault = (
            f"params must be a state_dict, (name, tensor) pairs or tensors. Received: {type(params).__name__}"
        )
    specs = [
        ParameterSpec(name, tuple(value.shape), dtype_name(value.dtype), value.element_size())
        for name, value in tensors.items()
    ]
    specs += [ParameterSpec(name, (), "no tensor", 0) for name in others]
    check_same_parameters("broadcast_parameters", specs, fault)
    label = f"parameters.{runtime.serial('parameters')}"
    _broadcast_all(list(tensors.values()), root_rank, label)
    if others:
        assert isinstance(params, MutableMapping)
        values = broadcast_object([params[name] for name in others], root_rank, f"{label}.others")
        params.update(zip(others, values, strict=True))


def _pairs(params: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, item in enumerate(params):
        # First: a tensor of two rows would pass for a pair of them.
        yield (f"parameter.{number}", item) if isinstance(item, torch.Tensor) else item


def _broadcast_all(tensors: list[torch.Tensor], root_rank: int, label: str) -> None:
    handles = [
        collectives.broadcast_async_(tensor, root_rank, f"{label}.{i}") for i, tensor in enumerate(tensors)
    ]
    for handle in handles:
        handle.wait()


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor in the broadcast structure."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    beside_parameter: bool


@dataclass(frozen=True)
class _SparseTensor:
    """Stands for a sparse one, such as the momentum of an embedding's sparse gradients."""

    shape: tuple[int, ...]
    indices: _Tensor
    values: _Tensor


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the optimizer state and options of rank `root_rank`; collective.

    Neither steps nor touches the parameters, and changes nothing on the root. State that
    other ranks lack is made there, and state that the root lacks is dropped.

    Args:
        model: not needed; accepted as Horovod accepts it.

    Raises:
        MismatchError: the ranks' parameter groups differ; on every rank.
        InvalidArgumentError: state cannot be taken apart or put together; on every rank.
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    own = [len(group["params"]) for group in groups]
    tensors: list[torch.Tensor] = []
    is_root = runtime.require("broadcast_optimizer_state").rank == root_rank
    outline, fault = None, ""
    if is_root:
        try:
            options = [_outline(_options(group), _first(group), tensors) for group in groups]
            states = [_outline(optimizer.state.get(p), p, tensors) for p in parameters]
            # Some optimizers keep what belongs to no parameter under names.
            common = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
            outline = (own, options, states, _outline(common, None, tensors))
        except Exception as error:  # noqa: BLE001 - state may be of any class
            fault = wording.exception(error)
    label = f"optimizer_state.{runtime.serial('optimizer_state')}"
    outline = broadcast_object(outline, root_rank, f"{label}.outline")
    if outline is not None and not is_root and own == outline[0]:
        try:
            _, options, states, common = outline
            options = [_fill(o, _first(group), tensors) for o, group in zip(options, groups, strict=True)]
            states = [_fill(state, p, tensors) for state, p in zip(states, parameters, strict=True)]
            common = _fill(common, None, tensors)
        except Exception as error:  # noqa: BLE001 - likewise, or there is no memory
            fault = wording.exception(error)
    check_same_parameters(
        "broadcast_optimizer_state",
        [ParameterSpec(f"group {i}", (count,), "parameters", 0) for i, count in enumerate(own)],
        fault,
    )
    _broadcast_all(tensors, root_rank, label)
    if is_root:
        return
    for group, new in zip(groups, options, strict=True):
        members = group["params"]
        group.clear()
        group.update(params=members, **new)
    optimizer.state.clear()
    optimizer.state.update(common)
    for parameter, state in zip(parameters, states, strict=True):
        if state is not None:
            optimizer.state[parameter] = state


def _outline(value: Any, parameter: torch.Tensor | None, tensors: list[torch.Tensor]) -> Any:
    """`value` with each tensor replaced by a `_Tensor` and appended to `tensors`."""
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        entries = value.coalesce()
        parts = (_outline(part, parameter, tensors) for part in (entries.indices(), entries.values()))
        return _SparseTensor(tuple(value.shape), *parts)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        beside = parameter is not None and value.device == parameter.device
        # On the meta device: the memory order, without the memory.
        strides = torch.empty_like(value, device="meta").stride()
        return _Tensor(tuple(value.shape), strides, value.dtype, beside)
    if isinstance(value, dict):
        return {key: _outline(item, parameter, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [_outline(item, parameter, tensors) for item in value])
    return value


def _fill(value: Any, parameter: torch.Tensor | None, tensors: list[torch.Tensor]) -> Any:
    """`_outline`'s inverse: new tensors, appended to `tensors` in the same order."""
    if isinstance(value, _Tensor):
        where = parameter.device if value.beside_parameter and parameter is not None else "cpu"
        tensors.append(torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=where))
        return tensors[-1]
    if isinstance(value, _SparseTensor):
        indices, values = (_fill(part, parameter, tensors) for part in (value.indices, value.values))
        # The sparse tensor is made of this memory, into which the root's entries will come.
        return torch.sparse_coo_tensor(indices.zero_(), values, value.shape, is_coalesced=True)
    if isinstance(value, dict):
        return {key: _fill(item, parameter, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [_fill(item, parameter, tensors) for item in value])
    return value


def _like(value: Any, items: list[Any]) -> Any:
    """The items in a list, tuple or named tuple as `value`."""
    return getattr(type(value), "_make", type(value))(items)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _first(group: dict[str, Any]) -> torch.Tensor | None:
    """A parameter of the group, beside which its options may be."""
    return group["params"][0] if group["params"] else None
