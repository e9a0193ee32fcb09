"""`shard` for everything that `model.fit` takes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import keras

from hvdp import sharding
from hvdp.errors import InvalidArgumentError
from hvdp.sharding import Shard, ShardOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["shard"]


def shard(data: Any, **options: Unpack[ShardOptions]) -> Any:
    """This rank's part of the data, as `hvdp.shard`; collective. Besides what that takes:

        a backend's tensor      its rows
        PyDataset               batches, in a new order each epoch
        tf.data.Dataset         every size-th element: shard before `shuffle` and `batch`
        a torch DataLoader      one over this rank's elements, in a new order each epoch if it shuffled

    Its length differs by at most one between ranks where `pad` and `drop_last` are false;
    `fit` takes that too, with BroadcastGlobalVariablesCallback.
    """
    if isinstance(data, keras.utils.PyDataset):
        options.setdefault("shuffle", True)
        return _ShardedPyDataset(data, sharding.shard(len(data), **options))
    # What comes from a framework has loaded it.
    tensorflow, torch = sys.modules.get("tensorflow"), sys.modules.get("torch")
    if tensorflow is not None and isinstance(data, tensorflow.data.Dataset | tensorflow.Tensor):
        from hvdp.tensorflow.sharding import shard as tensorflow_shard

        return tensorflow_shard(data, **options)
    if torch is not None and isinstance(data, torch.utils.data.DataLoader):
        return _loader(torch, data, **options)
    if torch is not None and isinstance(data, torch.Tensor | torch.utils.data.Dataset):
        from hvdp.torch.sharding import shard as torch_shard

        return torch_shard(data, **options)
    return sharding.shard(data, **options)


def _loader(torch: Any, data: Any, **options: Unpack[ShardOptions]) -> Any:
    fault = ""
    if data.batch_size is None or isinstance(data.dataset, torch.utils.data.IterableDataset):
        fault = "a DataLoader needs a map-style dataset and a batch_size to be sharded"
    options.setdefault("shuffle", isinstance(data.sampler, torch.utils.data.RandomSampler))
    if fault:
        raise InvalidArgumentError(f"{fault}; give hvdp.torch.shard(dataset) to your own DataLoader")
    return torch.utils.data.DataLoader(
        data.dataset,
        data.batch_size,
        sampler=sharding.shard(len(data.dataset), **options),
        num_workers=data.num_workers,
        collate_fn=data.collate_fn,
        pin_memory=data.pin_memory,
        drop_last=data.drop_last,
        timeout=data.timeout,
        worker_init_fn=data.worker_init_fn,
        multiprocessing_context=data.multiprocessing_context,
        prefetch_factor=data.prefetch_factor,
        persistent_workers=data.persistent_workers,
    )


class _ShardedPyDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """Some batches of another PyDataset, whose workers it has."""

    def __init__(self, data: Any, shard: Shard) -> None:
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        self._data = data
        self._shard = shard
        self._indices = shard.indices(shard.epoch)

    def __len__(self) -> int:
        return len(self._shard)

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self._indices[index])]

    def on_epoch_begin(self) -> None:
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()
        self._shard.set_epoch(self._shard.epoch + 1)
        self._indices = self._shard.indices(self._shard.epoch)
