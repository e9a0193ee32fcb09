"""Collectives on whatever Keras and NumPy make arrays of, and models that were saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdp._core.arrays import Array
from hvdp._core.compression import Compressor
from hvdp._core.ops import Average
from hvdp._numpy import Compression as ArrayCompression
from hvdp._numpy import collectives
from hvdp.collectives import no_compression
from hvdp.keras.link import link_of
from hvdp.keras.optimizer import Compression, DistributedOptimizer

__all__ = ["allgather", "allreduce", "broadcast", "load_model", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor = no_compression,
) -> Array:
    """Reduce over all ranks into a new array; `op` goes before `average`."""
    return collectives.allreduce(
        _given(value),
        average if op is None else None,
        name,
        _for_arrays(compression),
        op,
        prescale_factor,
        postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> Array:
    """All ranks' values joined along the first dimension, which may differ between ranks."""
    return collectives.allgather(_given(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Array:
    """The values of `root_rank` in a new array."""
    return collectives.broadcast(_given(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Array:
    """Reduce over all ranks, and return this rank's rows of the result."""
    return collectives.reducescatter(_given(value), name, op=op)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor = no_compression,
    legacy_opts: bool = False,
) -> Any:
    """A saved model, its optimizer made a DistributedOptimizer again; state and all.

    Args:
        custom_optimizers: classes of optimizers that Keras does not know by itself.
        custom_objects: as `keras.models.load_model` takes them.
        compression: as DistributedOptimizer takes it.
        legacy_opts: accepted as Horovod accepts it; not needed.
    """
    known = {made.__name__: made for made in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and link_of(optimizer) is None:
        DistributedOptimizer(optimizer, compression=compression)
    return model


def _given(value: Any) -> Any:
    """An array of a tensor or variable; anything else as it is, which may be refused on every rank."""
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        return keras.ops.convert_to_numpy(value)
    return value


def _for_arrays(compression: Compressor) -> Compressor:
    if compression is Compression.fp16:
        return ArrayCompression.fp16
    return ArrayCompression.bf16 if compression is Compression.bf16 else compression
