"""Sparse tensors: their entries are gathered, and equal indices added up."""

from __future__ import annotations

import torch

from hvdp._core import submit
from hvdp._core.handles import Handle
from hvdp._core.ops import Average, Kind, ReduceOp, Sum
from hvdp._core.submit import Options
from hvdp.errors import InvalidArgumentError
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.torch._arrays import as_array, as_tensor

__all__ = ["sparse_allreduce_async"]


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
    """
    options = [
        Options(f"{name}.{what}" if name else None, process_set.number(), _device(tensor))
        for what in ("indices", "values")
    ]
    try:
        resolved = ReduceOp.check(op)
        if resolved not in (Average, Sum) or getattr(tensor, "layout", None) is not torch.sparse_coo:
            raise InvalidArgumentError(
                "sparse_allreduce_async takes a sparse COO tensor and op Average or Sum. "
                f"Received: {getattr(tensor, 'layout', type(tensor).__name__)}, op {resolved.name}"
            )
    except InvalidArgumentError as fault:
        # Told to all ranks, so that none waits for this one.
        return submit.grouped([submit.faulty(Kind.ALLGATHER, each, str(fault)) for each in options])
    entries = tensor.detach().coalesce()
    divisor = process_set.size() if resolved is Average else 1
    parts = [entries.indices().t(), entries.values()]
    operations = [
        submit.allgather(as_array(part.cpu().contiguous()), each)
        for part, each in zip(parts, options, strict=True)
    ]

    def finish(gathered: list[object]) -> torch.Tensor:
        indices, values = (as_tensor(array).to(tensor.device) for array in gathered)  # type: ignore[arg-type]
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
        return total / divisor if divisor > 1 else total

    return submit.grouped(operations).then(finish)


def _device(tensor: torch.Tensor) -> str:
    return tensor.device.type if isinstance(tensor, torch.Tensor) else "cpu"
