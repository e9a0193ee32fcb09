"""`shard` for tensors and `tf.data.Dataset`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvdp import sharding
from hvdp.process_sets import global_process_set
from hvdp.sharding import ShardOptions, agreed_partition

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["shard"]


def shard(data: Any, **options: Unpack[ShardOptions]) -> Any:
    """This rank's part of the data, as `hvdp.shard`; collective. Besides what that takes:

        a tensor            its rows
        tf.data.Dataset     every size-th element: shard before `shuffle` and `batch`

    A Dataset keeps its order, and has `shuffle` and `take` of its own.
    """
    if isinstance(data, tf.data.Dataset):
        return _dataset(data, **options)
    if isinstance(data, tf.Tensor | tf.Variable):
        options.setdefault("shuffle", False)
        indices = sharding.shard(data.shape[0] if data.shape.rank else 0, **options)
        return tf.gather(data, indices.indices(indices.epoch))
    return sharding.shard(data, **options)


def _dataset(data: Any, **options: Unpack[ShardOptions]) -> Any:
    fault = ""
    if options.get("shuffle") or options.get("epoch"):
        fault = "a Dataset comes in its own order: leave shuffle and epoch out, and use its shuffle()"
    cardinality = int(data.cardinality())
    length = cardinality if cardinality >= 0 else None
    drop_last, pad = options.get("drop_last", False), options.get("pad", True)
    process_set = options.get("process_set", global_process_set)
    partition = agreed_partition(length, False, options.get("seed", 0), 0, drop_last, pad, process_set, fault)
    if length is not None:
        own = data.shard(partition.size, partition.rank).take(partition.count(length))
        if pad and not drop_last and partition.is_padding(length).any():
            own = own.concatenate(data.skip(partition.rank % length).take(1))
        return own.apply(tf.data.experimental.assert_cardinality(partition.count(length)))

    def pick(*group: Any) -> Any:
        elements = _joined(group)
        return (elements.repeat() if pad else elements).skip(partition.rank).take(1)

    return data.window(partition.size, drop_remainder=drop_last).flat_map(pick)


def _joined(group: Any) -> Any:
    """A window of a dataset of tuples or dicts is a tuple or dict of datasets."""
    if len(group) == 1 and isinstance(group[0], tf.data.Dataset):
        return group[0]
    return tf.data.Dataset.zip(group[0] if len(group) == 1 else tuple(map(_zipped, group)))


def _zipped(part: Any) -> Any:
    return part if isinstance(part, tf.data.Dataset) else tf.data.Dataset.zip(part)
