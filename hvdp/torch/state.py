"""The same initial state everywhere: parameters and optimizer state from one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hvdp._core.agreement import check_same_parameters
from hvdp._core.buckets import ParameterSpec
from hvdp._core.objects import broadcast_object
from hvdp._core.runtime import runtime
from hvdp.torch._arrays import dtype_name
from hvdp.torch.collectives import collectives

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Overwrite tensors, in place, with those of rank `root_rank`; collective.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`; entries that are not
            tensors are left alone.

    Raises:
        MismatchError: the ranks' names, shapes or dtypes differ; on every rank.
    """
    entries = params.items() if isinstance(params, Mapping) else params
    try:
        tensors = {name: value for name, value in entries if isinstance(value, torch.Tensor)}
        fault = ""
    except (TypeError, ValueError):
        tensors = {}
        fault = f"params must be a state_dict or (name, tensor) pairs. Received: {type(params).__name__}"
    specs = [
        ParameterSpec(name, tuple(value.shape), dtype_name(value.dtype), value.element_size())
        for name, value in tensors.items()
    ]
    check_same_parameters("broadcast_parameters", specs, fault)
    _broadcast_all(list(tensors.values()), root_rank, f"parameters.{runtime.serial('parameters')}")


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
    dtype: torch.dtype
    beside_parameter: bool


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
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    tensors: list[torch.Tensor] = []
    outline = None
    if runtime.require("broadcast_optimizer_state").rank == root_rank:
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        states = [optimizer.state.get(parameter) for parameter in parameters]
        sizes = [len(group["params"]) for group in groups]
        outline = (
            sizes,
            _outline(options, None, tensors),
            [
                _outline(state, parameter, tensors)
                for state, parameter in zip(states, parameters, strict=True)
            ],
        )
    label = f"optimizer_state.{runtime.serial('optimizer_state')}"
    sizes, options, states = broadcast_object(outline, root_rank, f"{label}.outline")
    own = [len(group["params"]) for group in groups]
    if outline is None and own == sizes:
        options = _fill(options, torch.device("cpu"), tensors)
        states = [
            _fill(state, parameter.device, tensors)
            for state, parameter in zip(states, parameters, strict=True)
        ]
    check_same_parameters(
        "broadcast_optimizer_state",
        [ParameterSpec(f"group {i}", (count,), "parameters", 0) for i, count in enumerate(own)],
    )
    _broadcast_all(tensors, root_rank, label)
    if outline is not None:
        return
    for group, new in zip(groups, options, strict=True):
        members = group["params"]
        group.clear()
        group.update(params=members, **new)
    optimizer.state.clear()
    for parameter, state in zip(parameters, states, strict=True):
        if state is not None:
            optimizer.state[parameter] = state


def _outline(value: Any, parameter: torch.Tensor | None, tensors: list[torch.Tensor]) -> Any:
    """`value` with each tensor replaced by a `_Tensor` and appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        beside = parameter is not None and value.device == parameter.device
        return _Tensor(tuple(value.shape), value.dtype, beside)
    if isinstance(value, dict):
        return {key: _outline(item, parameter, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_outline(item, parameter, tensors) for item in value])
    return value


def _fill(value: Any, device: torch.device, tensors: list[torch.Tensor]) -> Any:
    """`_outline`'s inverse: new tensors, appended to `tensors` in the same order."""
    if isinstance(value, _Tensor):
        where = device if value.beside_parameter else torch.device("cpu")
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=where))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _fill(item, device, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_fill(item, device, tensors) for item in value])
    return value
