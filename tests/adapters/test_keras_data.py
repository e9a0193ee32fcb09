"""What `fit` is given: shards of every kind of data, different numbers of batches, models not yet built."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("keras", reason="Keras is not installed")

from .backends import on_every_backend, run


def _cases() -> None:
    import importlib.util

    import keras
    import numpy as np

    import hvdp.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    length = 6 * size + 1

    def model_of(rate: float = 0.1, several: int = 1, **options: Any) -> Any:
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((1,)), dense])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options)
        # The gradient of a sample x is -x, whatever the weight.
        model.compile(optimizer, lambda y, p: -keras.ops.sum(p, axis=-1), steps_per_execution=several)
        return model

    def weight(model: Any) -> float:
        return float(model.get_weights()[0][0, 0])

    together = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    x = np.arange(length, dtype="float32").reshape(-1, 1)
    y = np.zeros((length, 1), "float32")
    # With batches of one, and one element more than the ranks can share equally.
    steps = [np.arange(step, min(step + size, length)).mean() for step in range(0, length, size)]

    def check(made: Any, *more: Any, **fit: Any) -> None:
        model = model_of()
        model.fit(made, *more, verbose=0, callbacks=together, **fit)
        np.testing.assert_allclose(weight(model), 0.1 * np.sum(steps), rtol=1e-5)
        assert int(model.optimizer.iterations) == len(steps)

    check(hvd.shard(x, pad=False), hvd.shard(y, pad=False), batch_size=1, shuffle=False)

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return length

        def __getitem__(self, index: int) -> Any:
            return x[index : index + 1], y[index : index + 1]

    check(hvd.shard(Batches(), pad=False, shuffle=False), shuffle=False)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        check(hvd.shard(tf.data.Dataset.from_tensor_slices((x, y)), pad=False).batch(1))
    if importlib.util.find_spec("torch"):
        import torch

        tensors = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        check(hvd.shard(torch.utils.data.DataLoader(tensors, batch_size=1), pad=False))

    # Several steps in one compiled program, which Keras does not make of PyTorch.
    for several in (2, 4) if keras.backend.backend() != "torch" else ():
        model = model_of(several=several)
        model.fit(
            x[rank : 6 * size : size], y[:6], batch_size=1, verbose=0, shuffle=False, callbacks=together
        )
        np.testing.assert_allclose(weight(model), 0.1 * np.sum(steps[:6]), rtol=1e-5)

    # A window that one epoch leaves unfinished goes on in the next.
    model = model_of(backward_passes_per_step=2)
    batches = np.full((3, 1), rank + 1.0, "float32")
    model.fit(batches, batches, batch_size=1, epochs=1, verbose=0, callbacks=together)
    mean = (np.arange(size) + 1).mean()
    np.testing.assert_allclose(weight(model), 0.1 * 2 * mean, rtol=1e-5)
    assert int(model.optimizer.iterations) == 1
    model.fit(batches[:1], batches[:1], batch_size=1, epochs=1, verbose=0, callbacks=together)
    np.testing.assert_allclose(weight(model), 0.1 * 4 * mean, rtol=1e-5)

    # Windows and different numbers of batches: rank 0 ends its data in the middle of a window.
    model = model_of(backward_passes_per_step=2)
    batches = np.ones((3 if rank == 0 else 4, 1), "float32")
    model.fit(batches, batches, batch_size=1, epochs=3, verbose=0, callbacks=together)
    everyone = hvd.allgather(np.array([weight(model)]))
    np.testing.assert_array_equal(everyone, everyone[0])
    # Every gradient is 1: whoever takes part in a window has the sum 2.
    np.testing.assert_allclose(everyone[0], 0.1 * 2 * int(model.optimizer.iterations), rtol=1e-5)

    # TensorFlow builds a model in its first batch: everybody's is the root's then, or from the start.
    ones = np.ones((4, 1), "float32")
    last = [hvd.callbacks.BroadcastGlobalVariablesCallback(size - 1)]

    class Late(keras.Model):
        def __init__(self, dense: Any) -> None:
            super().__init__()
            self.dense = dense

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    for made, built in ((Late, ()), (lambda dense: keras.Sequential([dense]), (0,)), (Late, (size - 1,))):
        start = keras.initializers.Constant(rank + 1.0)
        model = made(keras.layers.Dense(1, use_bias=False, kernel_initializer=start))
        optimizer = keras.optimizers.SGD(0.0 if built else 0.1, momentum=0.9)
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        if rank in built:
            model(ones)
        model.fit(ones, ones, batch_size=2, verbose=0, callbacks=last)
        everyone = hvd.allgather(np.array([weight(model)]))
        np.testing.assert_array_equal(everyone, everyone[0])
        assert not built or everyone[0] == size


@on_every_backend
def test_shards(backend: str, size: int) -> None:
    run(backend, size, _cases)
