"""DistributedOptimizer by TensorFlow's import name; the optimizers are Keras's."""

from __future__ import annotations

from typing import Any

from hvdp._core.compression import Compressor
from hvdp._core.ops import Average
from hvdp.collectives import no_compression
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.tensorflow.tape import Groups

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = no_compression,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`hvdp.keras.DistributedOptimizer`, with the parameters in the order of `horovod.tensorflow`.

    Args:
        use_locking: accepted as Horovod accepts it; not needed.
    """
    # Here, since the Keras adapter in turn uses this one for its TensorFlow backend.
    from hvdp.keras import DistributedOptimizer as wrap

    return wrap(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        num_groups,
        groups,
        backward_passes_per_step,
        average_aggregated_gradients,
        process_set,
        scale_local_gradients,
    )
