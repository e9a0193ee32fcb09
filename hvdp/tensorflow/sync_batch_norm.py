"""Batch normalization over the common batch of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdp._core.ops import Sum
from hvdp.basics import size
from hvdp.errors import InvalidArgumentError
from hvdp.tensorflow.collectives import allreduce, grouped_allreduce

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable("hvdp")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """A BatchNormalization whose moments in training are those of all ranks' batches, of any sizes.

    Args:
        fused: must be False; accepted as Horovod accepts it.
        **kwargs: as BatchNormalization's.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused:
            raise InvalidArgumentError("SyncBatchNormalization cannot be fused. Received: fused=True")
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if size() == 1:
            return super()._moments(inputs, mask)
        inputs = tf.convert_to_tensor(inputs)
        wide = tf.cast(inputs, tf.float32) if inputs.dtype in (tf.float16, tf.bfloat16) else inputs
        weights = tf.ones_like(wide)
        if mask is not None:
            weights *= tf.cast(tf.expand_dims(mask, -1), wide.dtype)
        axis = self.axis % len(inputs.shape)
        others = [dimension for dimension in range(len(inputs.shape)) if dimension != axis]
        count, total = grouped_allreduce(
            [tf.reduce_sum(weights, others), tf.reduce_sum(wide * weights, others)], op=Sum
        )
        count = tf.maximum(count, 1)
        mean = total / count
        # A second round for the deviations: a difference of mean squares would cancel out.
        along = [-1 if dimension == axis else 1 for dimension in range(len(inputs.shape))]
        deviations = tf.square(wide - tf.reshape(mean, along)) * weights
        variance = allreduce(tf.reduce_sum(deviations, others), op=Sum) / count
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
