"""What one rank can see to be wrong by itself; "" where nothing is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvdp._core.arrays import check_dtype
from hvdp._core.ops import Adasum, Average, Max, Min, Reduction
from hvdp.errors import InvalidArgumentError

__all__ = ["dtype_fault", "reduction_fault", "root_fault"]


def dtype_fault(dtype: np.dtype[Any]) -> str:
    """A dtype that collectives cannot carry."""
    try:
        check_dtype(dtype)
    except InvalidArgumentError as fault:
        return str(fault)
    return ""


def reduction_fault(dtype: str, reduction: Reduction) -> str:
    """An op or scale factors without a meaning for a dtype."""
    op = reduction.op
    if (
        (op is Average and dtype == "bool")
        or (op in (Min, Max) and dtype.startswith("complex"))
        or (op is Adasum and "float" not in dtype)
    ):
        return f"op {op.name} has no meaning for dtype {dtype}; cast the tensor first"
    before, after = reduction.prescale, reduction.postscale
    if dtype == "bool" and (before != 1.0 or after != 1.0):
        fault = "have no meaning for dtype bool; cast the tensor first"
    elif math.isnan(before) or math.isnan(after):
        fault = "must be numbers"
    else:
        return ""
    return f"scale factors {fault}. Received: prescale_factor {before}, postscale_factor {after}"


def root_fault(root_rank: Any, members: tuple[int, ...]) -> str:
    """A root that is no member."""
    if isinstance(root_rank, int | np.integer) and root_rank in members:
        return ""
    return f"root_rank must be one of the ranks {list(members)}. Received: {root_rank!r}"
