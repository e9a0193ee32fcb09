"""The helpers that programs import from here, most of them to learn what is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from hvdp import cuda_built, gloo_built, mpi_built, nccl_built, rocm_built

__all__ = [
    "check_extension",
    "cuda_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether hvdp has an adapter for the framework, such as "torch", and the framework is installed."""
    return all(find_spec(name) is not None for name in (f"hvdp.{ext_base_name}", ext_base_name))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Do nothing if `ext_name`, such as "horovod.torch", can be used; the rest is not needed.

    Raises:
        ImportError: it cannot.
    """
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(f"{ext_name} needs {framework}, and an adapter for it in hvdp")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework finds a GPU; False for others than "torch"."""
    if ext_base_name != "torch" or not extension_available("torch"):
        return False
    from torch import cuda

    return cuda.is_available()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Environment variables for the length of a `with`; None takes one away."""
    before = {name: os.environ.get(name) for name in kwargs}
    _set(kwargs)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741
    """`l` in `n` runs whose lengths differ by at most one, longer ones first."""
    size, longer = divmod(len(l), n)
    ends = [size * (i + 1) + min(i + 1, longer) for i in range(n)]
    return [l[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank.bit_count() == 1


def is_iterable(x: Any) -> bool:
    """Whether `iter(x)` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
