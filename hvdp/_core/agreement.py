"""Do all ranks hold the same parameters? Found out before anything is exchanged by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hvdp._core import submit
from hvdp._core.buckets import ParameterSpec, fingerprint, first_difference
from hvdp._core.objects import allgather_object
from hvdp._core.runtime import runtime
from hvdp._core.submit import Options
from hvdp.errors import InvalidArgumentError, MismatchError

__all__ = ["check_same_parameters", "check_same_variables"]

_FAULT = b"\0" * 32


def check_same_parameters(
    what: str,
    specs: Sequence[ParameterSpec],
    fault: str = "",
    process_set: int = 0,
    options: Mapping[str, str] | None = None,
) -> None:
    """Compare the parameters of all ranks by a fingerprint; collective.

    Args:
        what: the caller, for messages.
        fault: why this rank's arguments are wrong; told to every rank.
        options: what else must be equal: names and values.

    Raises:
        MismatchError: on every rank, naming the first parameter that differs, or the options.
        InvalidArgumentError: on every rank, if any has a fault.
    """
    mark = _FAULT if fault else fingerprint(specs, options)
    gather = submit.allgather(np.frombuffer(mark, np.uint8)[None], Options(process_set=process_set))
    marks = submit.alone(gather).wait()
    if (marks == marks[0]).all() and not fault:
        return
    everything = allgather_object((fault, list(specs), dict(options or {})), None, process_set)
    ranks = runtime.require(what).group(process_set).ranks
    faults = [f"rank {rank}: {text}" for rank, (text, _, _) in zip(ranks, everything, strict=True) if text]
    if faults:
        raise InvalidArgumentError(f"{what}: {'; '.join(faults)}")
    difference = first_difference(ranks, [theirs for _, theirs, _ in everything])
    if difference:
        raise MismatchError(f"{what}: the ranks hold different parameters: {difference}.")
    first = everything[0][2]
    differences = [
        f"{name} is {value} on rank {ranks[0]} and {theirs[name]} on rank {rank}"
        for rank, (_, _, theirs) in zip(ranks, everything, strict=True)
        for name, value in first.items()
        if theirs[name] != value
    ]
    raise MismatchError(f"{what}: the ranks pass different options: {differences[0]}.")


def check_same_variables(
    variables: Iterable[tuple[Iterable[int], str]], fault: str = "", process_set: int = 0
) -> None:
    """Compare the shapes and dtypes of variables that ranks match by their order; as above."""
    specs = [
        ParameterSpec(f"variable.{index}", tuple(shape), dtype, 0)
        for index, (shape, dtype) in enumerate(variables)
    ]
    check_same_parameters("broadcast_variables", specs, fault, process_set)
