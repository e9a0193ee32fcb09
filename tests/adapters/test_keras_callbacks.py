"""Keras callbacks: their values in closed form, and ranks that stay together."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("keras", reason="Keras is not installed")

from .backends import on_every_backend, run


def _model(rate: float = 0.1, momentum: float = 0.0, value: float = 1.0) -> Any:
    """One weight, whose gradient for the sample (x, y) is `2 * (w * x - y) * x`."""
    import keras

    import hvdp.keras as hvd

    keras.utils.set_random_seed(1)
    start = keras.initializers.Constant(value)
    model = keras.Sequential(
        [keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer=start)]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=momentum))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def _weight(model: Any) -> float:
    import keras

    return float(keras.ops.convert_to_numpy(model.trainable_variables[0]).item())


def _cases() -> None:
    import keras
    import numpy as np

    import hvdp.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    fit = {"batch_size": 2, "verbose": 0, "shuffle": False}
    ones = np.ones((8, 1), "float32")

    # Everything starts from the root, optimizer state included.
    model = _model(0.01, 0.9, value=rank + 1.0)
    model.optimizer.learning_rate = 0.01 * (rank + 1)
    if rank == size - 1:
        model.optimizer.build(model.trainable_variables)
        model.optimizer.momentums[0].assign([[0.5]])
    model.fit(
        ones[:2], ones[:2] * 0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(size - 1)], **fit
    )
    rate = 0.01 * size
    expected = size + 0.9 * 0.5 - rate * 2 * size
    np.testing.assert_allclose(_weight(model), expected, rtol=1e-5)

    # Whoever has optimizer state or none, the root's or a fresh one is everybody's.
    for built in (0, size - 1):
        model = _model(0.01 * (rank + 1), 0.9, value=rank + 1.0)
        if rank == built:
            model.optimizer.build(model.trainable_variables)
            model.optimizer.momentums[0].assign([[0.5 + rank]])
            model.optimizer.iterations.assign(5 + rank)
        hvd.broadcast_global_variables(0, model)
        own = [float(keras.ops.convert_to_numpy(v).item()) for v in model.optimizer.variables]
        wanted = [5.0, 0.01, 0.5] if built == 0 else [0.0, 0.01, 0.0]
        np.testing.assert_allclose(own, wanted, rtol=1e-5)
        assert _weight(model) == 1

    # Metrics: means over ranks, or of all samples.
    model = _model(0.0)
    own = (rank + 1) * 2  # samples
    x, y = np.ones((own, 1), "float32"), np.full((own, 1), 2.0 + rank, "float32")
    counts, errors = 2.0 * np.arange(1, size + 1), 1.0 + np.arange(size)
    for exact, weights in ((False, None), (True, counts)):
        together = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        history = model.fit(
            x,
            y,
            validation_data=(x, y),
            callbacks=[*together, hvd.callbacks.MetricAverageCallback(exact=exact)],
            **fit,
        ).history
        for key in ("loss", "val_loss"):
            np.testing.assert_allclose(history[key][0], np.average(errors**2, weights=weights), rtol=1e-5)
        for key in ("mae", "val_mae"):
            np.testing.assert_allclose(history[key][0], np.average(errors, weights=weights), rtol=1e-5)

    # Warm-up and schedule, batch by batch.
    class Rates(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
            self.seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    peak = 0.01 * size

    def schedule() -> list[Any]:
        return [
            hvd.callbacks.LearningRateWarmupCallback(peak, warmup_epochs=2),
            hvd.callbacks.LearningRateScheduleCallback(peak, 0.5, start_epoch=3, end_epoch=4),
            hvd.callbacks.LearningRateScheduleCallback(
                peak, lambda e: 0.1 * e, start_epoch=4, staircase=False
            ),
        ]

    whole = Rates()
    model = _model(peak)
    model.fit(ones, ones, epochs=9, callbacks=[*schedule(), whole], **fit)
    wanted = [peak / size * (1 + (size - 1) * (i + 1) / 8) for i in range(8)] + [peak] * 4 + [peak / 2] * 4
    wanted += [peak * 0.1 * (4 + i / 4) for i in range(20)]
    np.testing.assert_allclose(whole.seen, wanted, rtol=1e-5)
    for start in (1, 3, 7):
        resumed = Rates()
        model.optimizer.learning_rate = peak
        model.fit(ones, ones, epochs=9, initial_epoch=start, callbacks=[*schedule(), resumed], **fit)
        np.testing.assert_allclose(resumed.seen, wanted[4 * start :], rtol=1e-5)

    # By the batches of the rank that has most.
    own = ones if rank == size - 1 else ones[:4]
    uneven = Rates()
    together = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    warm_up = hvd.callbacks.LearningRateWarmupCallback(peak, warmup_epochs=1)
    _model(peak).fit(own, own, callbacks=[together, warm_up, uneven], **fit)
    wanted = [peak / size * (1 + (size - 1) * (i + 1) / 4) for i in range(len(own) // 2)]
    np.testing.assert_allclose(uneven.seen, wanted, rtol=1e-5)

    # Momentum correction: the buffer, -rate * gradient, is scaled as the rate is.
    for corrected in (True, False):
        model = _model(0.1, momentum=0.5)
        change = hvd.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 1.0 if epoch < 1 else 0.1, momentum_correction=corrected
        )
        model.fit(ones[:2], ones[:2] * 0, epochs=2, callbacks=[change], **fit)
        first = -0.1 * 2
        second = 0.5 * first * (0.1 if corrected else 1) - 0.01 * 2 * (1 + first)
        np.testing.assert_allclose(_weight(model), 1 + first + second, rtol=1e-5)

    # One rank stops, all do, in the same epoch.
    class StopOnOne(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 2 and hvd.rank() == hvd.size() - 1

    model = _model()
    history = model.fit(
        ones, ones, epochs=9, callbacks=[StopOnOne(), hvd.callbacks.StopTogetherCallback()], **fit
    )
    assert history.epoch == [0, 1, 2]

    class StopWithin(keras.callbacks.Callback):
        """On one rank, after one batch of the second epoch: the others have four."""

        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = (self.epoch, batch) == (1, 0) and rank == 0

    model = _model(0.1)
    history = model.fit(
        ones, ones * 0, epochs=9, callbacks=[StopWithin(), hvd.callbacks.StopTogetherCallback()], **fit
    )
    assert history.epoch == [0, 1]
    np.testing.assert_allclose(_weight(model), 0.8**8, rtol=1e-5)

    class Mine(keras.callbacks.Callback):
        """A metric that stops getting better on the last rank alone."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["mine"] = 9.0 if hvd.rank() == hvd.size() - 1 and epoch > 1 else 9.0 - epoch

    early = keras.callbacks.EarlyStopping("mine", mode="min", patience=1)
    history = model.fit(
        ones, ones, epochs=9, callbacks=[Mine(), early, hvd.callbacks.StopTogetherCallback()], **fit
    )
    assert history.epoch == [0, 1, 2]

    # Local variables, of other shapes on each rank, stay with what the optimizer keeps about them.
    for partial in (True, False):
        shared, local = (
            keras.layers.Dense(n, use_bias=False, kernel_initializer="ones") for n in (1, rank + 1)
        )
        for layer in (shared, local):
            layer.build((None, 1))
            layer.kernel.assign(layer.kernel * (rank + 1))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        if partial:
            hvd.PartialDistributedOptimizer(optimizer, local_layers=local)
        else:
            hvd.DistributedOptimizer(optimizer).register_local_var(local.kernel)
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
        optimizer.build([shared.kernel, local.kernel])
        model = keras.Sequential([keras.layers.Input((1,)), shared, local])
        model.compile(optimizer, lambda y, found: keras.ops.sum(found * 0, axis=-1))
        kept = getattr(optimizer, "inner_optimizer", optimizer).momentums
        for variable in kept:
            variable.assign(variable * 0 + rank + 1)
        together = hvd.callbacks.BroadcastGlobalVariablesCallback(
            0, local_variables=None if partial else local.trainable_variables
        )
        batches = ones[: 2 * (1 + (rank > 0))]
        model.fit(batches, batches, callbacks=[together], **fit)
        steps = np.arange(1, len(batches) // 2 + 1)
        moved = np.sum(0.5**steps)  # of a momentum of 1
        np.testing.assert_allclose(model.get_weights()[1], np.full((1, rank + 1), (rank + 1) * (1 + moved)))
        np.testing.assert_allclose(keras.ops.convert_to_numpy(kept[1]), (rank + 1) * 0.5 ** steps[-1])
        np.testing.assert_allclose(model.get_weights()[0], 1 + 0.5 + 0.25)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(kept[0]), 0.25)

    # Different numbers of batches: the others go on, and all end with the same weights.
    model = _model(0.1)
    own = 2 * (rank + 1)
    x, y = np.ones((own, 1), "float32"), np.full((own, 1), float(rank), "float32")
    model.fit(x, y, epochs=2, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], **fit)
    weight = 1.0
    for _ in range(2):
        for step in range(size):
            weight -= 0.1 * 2 * (weight - np.arange(step, size).mean())
    np.testing.assert_allclose(_weight(model), weight, rtol=1e-5)

    # Only rank 0 writes its best model.
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(prefix="keras-best-") if rank == 0 else None))
    best = hvd.callbacks.BestModelCheckpoint("loss", filepath=folder / f"best.{rank}.keras")
    model.fit(ones, ones, callbacks=[best], **fit)
    hvd.barrier()
    assert [file.name for file in folder.iterdir()] == ["best.0.keras"]
    loaded = hvd.load_model(folder / "best.0.keras")
    np.testing.assert_allclose(_weight(loaded), _weight(model), rtol=1e-6)
    loaded.fit(ones, ones * rank, **fit)
    np.testing.assert_allclose(hvd.allgather(np.array([_weight(loaded)])), _weight(loaded))

    class Quality(keras.callbacks.Callback):
        """Best after the second of three epochs, each of which makes the weight 0.8 of what it was."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["quality"] = [2.0, 1.0, 3.0][epoch]

    best = hvd.callbacks.BestModelCheckpoint("quality", mode="min", filepath=folder / "second.keras")
    _model(0.1).fit(ones[:2], ones[:2] * 0, epochs=3, callbacks=[Quality(), best], **fit)
    hvd.barrier()
    np.testing.assert_allclose(_weight(hvd.load_model(folder / "second.keras")), 0.8**2, rtol=1e-6)

    # Data of all kinds.
    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4 * size

        def __getitem__(self, index: int) -> Any:
            return np.full((2, 1), float(index), "float32"), np.zeros((2, 1), "float32")

    shard = hvd.shard(Batches())
    assert len(shard) == 4
    mine = [float(shard[i][0][0, 0]) for i in range(4)]
    everyone = np.sort(hvd.allgather(np.array(mine)))
    np.testing.assert_array_equal(everyone, np.arange(4 * size))
    before = list(mine)
    _model(0.0).fit(shard, epochs=2, verbose=0)
    assert [float(shard[i][0][0, 0]) for i in range(4)] != before or size == 1
    assert len(hvd.shard(np.arange(2 * size + 1), pad=False)) == 2 + (rank == 0)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        data = tf.data.Dataset.range(2 * size + 1)
        assert [int(i) for i in hvd.shard(data, drop_last=True)] == [rank, rank + size]
        tail = [2 * size] if rank == 0 else []
        assert [int(i) for i in hvd.shard(data, pad=False)] == [rank, rank + size, *tail]
        assert len(list(hvd.shard(data))) == 3
        stream = tf.data.Dataset.zip(data, data).filter(lambda a, b: True)
        assert [int(a) for a, _ in hvd.shard(stream, pad=False)] == [rank, rank + size, *tail]
        assert len(list(hvd.shard(stream))) == 3
    if keras.backend.backend() == "torch":
        import torch

        dataset = torch.utils.data.TensorDataset(torch.arange(4 * size))
        loader = hvd.shard(torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True))
        mine = torch.cat([batch for (batch,) in loader]).numpy()
        np.testing.assert_array_equal(np.sort(hvd.allgather(mine)), np.arange(4 * size))


@on_every_backend
def test_callbacks(backend: str, size: int) -> None:
    run(backend, size, _cases)
