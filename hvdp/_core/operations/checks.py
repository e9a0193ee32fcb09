"""What one rank can see to be wrong by itself; "" where nothing is."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdp._core.arrays import check_dtype
from hvdp._core.ops import Adasum, Average, Max, Min, ReduceOp
from hvdp.errors import InvalidArgumentError

__all__ = ["dtype_fault", "reduction_fault", "root_fault"]


def dtype_fault(dtype: np.dtype[Any]) -> str:
    """A dtype that collectives cannot carry."""
    try:
        check_dtype(dtype)
    except InvalidArgumentError as fault:
        return str(fault)
    return ""


def reduction_fault(dtype: str, op: ReduceOp) -> str:
    """An op without a meaning for a dtype."""
    meaningless = (
        (op is Average and dtype == "bool")
        or (op in (Min, Max) and dtype.startswith("complex"))
        or (op is Adasum and "float" not in dtype)
    )
    return f"op {op.name} has no meaning for dtype {dtype}; cast the tensor first" if meaningless else ""


def root_fault(root_rank: Any, members: tuple[int, ...]) -> str:
    """A root that is no member."""
    if isinstance(root_rank, int | np.integer) and root_rank in members:
        return ""
    return f"root_rank must be one of the ranks {list(members)}. Received: {root_rank!r}"
