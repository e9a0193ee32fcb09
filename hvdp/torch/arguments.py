"""What a DistributedOptimizer was asked for, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["Groups", "NamedParameters", "grouped", "named"]

NamedParameters = Iterable[tuple[str, torch.Tensor]]
Groups = int | Sequence[Sequence[torch.Tensor]]


def named(
    optimizer: object, named_parameters: NamedParameters | None
) -> tuple[list[torch.Tensor], list[str], str]:
    """The optimizer's parameters, their names, and what is wrong with these or ""."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return [], [], f"optimizer must be a torch.optim.Optimizer. Received: {type(optimizer).__name__}"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return parameters, [f"parameter.{i}" for i in range(len(parameters))], ""
    names: dict[torch.Tensor, str] = {}
    fault = ""
    taken = set()
    try:
        pairs = [(name, parameter) for name, parameter in named_parameters]
    except Exception as error:  # noqa: BLE001 - an iterable of any kind; told to every rank
        what = f"{type(named_parameters).__name__} ({type(error).__name__}: {error})"
        fault = f"named_parameters must be pairs, as model.named_parameters() gives them. Received: {what}"
        return parameters, ["unnamed"] * len(parameters), fault
    for name, parameter in pairs:
        if name in taken:
            fault = f"named_parameters gives the name {name!r} twice"
        taken.add(name)
        names.setdefault(parameter, name)
    unnamed = [tuple(parameter.shape) for parameter in parameters if parameter not in names]
    if unnamed:
        fault = f"named_parameters lacks {len(unnamed)} parameters of the optimizer, of shapes {unnamed[:3]}"
    return parameters, [names.get(parameter, "unnamed") for parameter in parameters], fault


def grouped(groups: Groups, parameters: list[torch.Tensor]) -> tuple[tuple[tuple[int, ...], ...], int, str]:
    """Groups as indices, or their count, and what is wrong with them or ""."""
    if isinstance(groups, int):
        return (), max(groups, 0), f"groups must not be negative. Received: {groups}" if groups < 0 else ""
    index_of = {parameter: index for index, parameter in enumerate(parameters)}
    flat = [parameter for group in groups for parameter in group]
    if len(set(flat)) != len(flat) or any(parameter not in index_of for parameter in flat):
        return (), 0, "groups must be lists of the optimizer's parameters, each in one of them at most"
    return tuple(tuple(index_of[parameter] for parameter in group) for group in groups), 0, ""
