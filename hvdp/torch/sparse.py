"""Sparse tensors: their entries are gathered, and equal indices added up."""

from __future__ import annotations

import numpy as np
import torch

from hvdp._core import submit
from hvdp._core.arrays import Array
from hvdp._core.handles import Handle
from hvdp._core.ops import Average, Kind, ReduceOp, Sum
from hvdp._core.submit import Options
from hvdp.errors import InvalidArgumentError
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.torch._arrays import as_array, as_tensor, device_of

__all__ = ["sparse_allreduce_async"]

# In which entries are added up and divided, before they are rounded once; integers and bools in int64.
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce sparse COO tensors, whose number of entries may differ between ranks, even be 0.

    Args:
        op: Average or Sum.

    Returns:
        A handle whose result is a coalesced sparse tensor of the same shape.

    Raises:
        InvalidArgumentError: by `synchronize` on every rank: another op, or a tensor that is not sparse.
        MismatchError: likewise: the ranks' shapes, dtypes or numbers of sparse dimensions differ.
    """
    options = [
        Options(f"{name}{what}" if name is not None else None, process_set.number(), device_of(tensor))
        for what in ("", ".indices", ".values", ".ranks")
    ]
    try:
        resolved = ReduceOp.check(op)
        if resolved not in (Average, Sum) or getattr(tensor, "layout", None) is not torch.sparse_coo:
            raise InvalidArgumentError(
                "sparse_allreduce_async takes a sparse COO tensor and op Average or Sum. "
                f"Received: {getattr(tensor, 'layout', type(tensor).__name__)}, op {resolved.name}"
            )
        if resolved is Average and tensor.dtype is torch.bool:
            raise InvalidArgumentError("op Average has no meaning for dtype bool; cast the tensor first")
    except InvalidArgumentError as fault:
        # Told to all ranks, so that none waits for this one.
        return submit.grouped([submit.faulty(Kind.ALLGATHER, each, str(fault)) for each in options])
    entries = tensor.detach().coalesce()
    # Of no rows: nothing travels, but the ranks compare the shape, which the entries do not tell.
    shape = np.empty((0, *tensor.shape), np.uint8)
    parts = [as_array(part.cpu().contiguous()) for part in (entries.indices().t(), entries.values())]
    *gathers, counted = options
    operations = [submit.allgather(part, each) for part, each in zip((shape, *parts), gathers, strict=True)]
    # Ranks that have joined do not count.
    operations.append(submit.allreduce(np.ones(1, np.int64), Sum, 1.0, 1.0, counted))

    def finish(results: list[Array]) -> torch.Tensor:
        _, *gathered, (ranks,) = results
        indices, values = (as_tensor(array).to(tensor.device) for array in gathered)
        wide = values.to(_WIDER.get(values.dtype, torch.int64))
        total = torch.sparse_coo_tensor(indices.t(), wide, tensor.shape, check_invariants=False).coalesce()
        sums = total.values()
        if resolved is Average:
            exact = sums.is_floating_point() or sums.is_complex()
            sums = torch.div(sums, int(ranks), rounding_mode=None if exact else "floor")
        return torch.sparse_coo_tensor(
            total.indices(), sums.to(tensor.dtype), tensor.shape, check_invariants=False, is_coalesced=True
        )

    return submit.grouped(operations).then(finish)
