"""Keras's DistributedOptimizer: options, saving, and what must not pass unnoticed."""

from __future__ import annotations

import logging.handlers
from typing import Any

import pytest

pytest.importorskip("keras", reason="Keras is not installed")

from .backends import SMALL_BUCKETS, on_every_backend, run


def _cases(folder: str) -> None:
    import keras
    import numpy as np

    import hvdp.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ranks = np.arange(size) + 1.0
    layers = keras.layers

    def weights(model: Any) -> list[Any]:
        return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]

    def model_of(*inner: Any, optimizer: Any, **compiled: Any) -> Any:
        model = keras.Sequential([layers.Input((2,)), *inner])
        model.compile(optimizer, lambda y, prediction: keras.ops.sum(prediction, axis=-1), **compiled)
        return model

    # With a linear loss the gradient is the mean input, whatever the weights.
    x, y = np.full((4, 2), rank + 1.0, "float32"), np.zeros((4, 1), "float32")

    def moved(**options: Any) -> Any:
        dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = model_of(dense, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options))
        model.train_on_batch(x, y)
        return -weights(model)[0][0, 0]

    np.testing.assert_allclose(moved(), ranks.mean())
    np.testing.assert_allclose(moved(op=hvd.Sum), ranks.sum())
    np.testing.assert_allclose(moved(compression=hvd.Compression.bf16, num_groups=1), ranks.mean())
    np.testing.assert_allclose(moved(gradient_predivide_factor=2.0, groups=2), ranks.mean())
    np.testing.assert_allclose(moved(op=hvd.Adasum), ranks.mean() if size == 2 else moved(op=hvd.Adasum))
    alone = hvd.add_process_set([size - 1])
    if rank == size - 1:
        np.testing.assert_allclose(moved(process_set=alone), rank + 1)

    # Samples count equally, not ranks; some gradients on one rank only.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), weighted=True)
    optimizer.set_weight(rank + 1)
    model = model_of(layers.Dense(1, use_bias=False, kernel_initializer="zeros"), optimizer=optimizer)
    model.train_on_batch(x, y)
    np.testing.assert_allclose(-weights(model)[0][0, 0], np.average(ranks, weights=ranks), rtol=1e-6)
    variables = [keras.Variable(np.zeros(3, "float32"), name=name) for name in "ab"]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([keras.ops.ones(3), keras.ops.ones(3) if rank == 0 else None], variables)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[0]), -1)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[1]), -1 / size)

    # Local and frozen layers.
    def moved_apart(*inputs: Any, **options: Any) -> tuple[Any, Any]:
        """What the shared and the local layer have moved by, after a batch of each of the inputs."""
        shared, local = (layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in range(2))
        frozen = layers.Dense(2, use_bias=False, kernel_initializer="identity", trainable=False)
        local.build((None, 2))
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=local, **options)
        given = layers.Input((2,))
        model = keras.Model(given, layers.add([shared(frozen(given)), local(frozen(given))]))
        model.compile(optimizer, lambda y, prediction: keras.ops.sum(prediction, axis=-1))
        for batch in inputs:
            model.train_on_batch(batch, y)
        return tuple(-layer.get_weights()[0][0, 0] for layer in (shared, local))

    np.testing.assert_allclose(moved_apart(x), (ranks.mean(), (rank + 1) / size))
    np.testing.assert_allclose(moved_apart(x, scale_local_gradients=False), (ranks.mean(), rank + 1))
    passes = {"backward_passes_per_step": 2, "compression": hvd.Compression.bf16}
    np.testing.assert_allclose(moved_apart(x, **passes), 0)
    whole = np.array([ranks.mean(), (rank + 1) / size])
    np.testing.assert_allclose(moved_apart(x, 3.01 * x, **passes)[1], 4.01 * whole[1], rtol=1e-6)
    np.testing.assert_allclose(moved_apart(x, x * 3, x * 5, x * 7, **passes), 16 * whole, rtol=1e-6)
    np.testing.assert_allclose(
        moved_apart(x, x * 3, **passes, average_aggregated_gradients=True), 2 * whole, rtol=1e-6
    )
    for scaled in (True, False):
        local = moved_apart(x, op=hvd.Adasum, scale_local_gradients=scaled)[1]
        np.testing.assert_allclose(local, whole[1] * (1 if scaled else size))

    table = layers.Embedding(3, 1, embeddings_initializer="zeros")
    table.build()
    for passes in ({}, {"backward_passes_per_step": 2}):
        table.set_weights([np.zeros((3, 1))])
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=table, **passes)
        model = keras.Sequential([layers.Input((1,), dtype="int32"), table])
        model.compile(optimizer, lambda y, found: keras.ops.sum(found))
        for row in (rank % 2, 2):
            model.train_on_batch(np.full((1, 1), row), y[:1])
        np.testing.assert_allclose(
            -table.get_weights()[0][:, 0] * size, np.bincount([rank % 2, 2], minlength=3), rtol=1e-6
        )

    # Embeddings: rows that no rank has looked up stay.
    for sparse_as_dense in (False, True):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sparse_as_dense=sparse_as_dense)
        model = keras.Sequential(
            [layers.Input((2,), dtype="int32"), layers.Embedding(size + 2, 1, embeddings_initializer="zeros")]
        )
        model.compile(optimizer, lambda y, found: keras.ops.sum(keras.ops.reshape(found, (1, -1)), axis=-1))
        model.train_on_batch(np.array([[rank, 0]]), y[:1])
        wanted = np.array([*[1.0] * size, 0, 0])
        wanted[0] += size
        np.testing.assert_allclose(-weights(model)[0][:, 0], wanted / size, rtol=1e-6)

    # Mixed precision: an overflow on one rank makes all skip the step.
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    model = model_of(layers.Dense(1, use_bias=False, kernel_initializer="zeros"), optimizer=optimizer)
    keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(1024.0)
    model.train_on_batch(x * (1e6 if rank == 0 else 1), y)
    np.testing.assert_allclose(weights(model)[0], 0)
    assert float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)) == 512
    model.train_on_batch(x, y)
    np.testing.assert_allclose(-weights(model)[0][0, 0], ranks.mean(), rtol=1e-3)

    for policy in ("mixed_bfloat16", "bfloat16", "float16"):
        keras.config.set_dtype_policy(policy)
        np.testing.assert_allclose(moved().astype("float32"), ranks.mean())
        np.testing.assert_allclose(moved(op=hvd.Sum).astype("float32"), ranks.sum())
    keras.config.set_dtype_policy("float32")

    # Saved as what it was, custom classes too; loaded without hvdp, and with it.
    @keras.saving.register_keras_serializable("mine")
    class Halving(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient / 2, variable, learning_rate)

    for made in (keras.optimizers.Adam, Halving):
        inner = made(0.5)
        optimizer = hvd.DistributedOptimizer(inner)
        assert optimizer is inner
        assert isinstance(optimizer, made)
        model = model_of(layers.Dense(1, use_bias=False, kernel_initializer="zeros"), optimizer=optimizer)
        model.compile(optimizer, "mse")
        model.train_on_batch(x, y)
        model.train_on_batch(x, y + 1)
        path = f"{folder}/{rank}.{made.__name__}.keras"
        model.save(path)
        plain = keras.models.load_model(path)
        assert "Distributed" not in type(plain.optimizer).__name__
        assert int(plain.optimizer.iterations) == 2
        loaded = hvd.load_model(path, custom_optimizers=[made])
        assert type(loaded.optimizer).__name__ == f"Distributed{made.__name__}"
        loaded.train_on_batch(x, y + rank)
        model.train_on_batch(x, y + rank)
        np.testing.assert_allclose(weights(loaded)[0], weights(model)[0], rtol=1e-6)
        again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        assert type(again).__name__ == made.__name__

    # A model that was trained before takes the optimizer's new steps.
    model = model_of(
        layers.Dense(1, use_bias=False, kernel_initializer="zeros"), optimizer=keras.optimizers.SGD(1.0)
    )
    model.train_on_batch(x, y)
    hvd.DistributedOptimizer(model.optimizer)
    model.train_on_batch(x, y)
    np.testing.assert_allclose(-weights(model)[0][0, 0], rank + 1 + ranks.mean())

    # What never reduces is found out.
    zero = keras.ops.zeros(())

    def by_hand(self: Any, *args: Any) -> Any:
        """As a step that changes weights itself."""
        if keras.backend.backend() == "jax":
            (trainable, *others), _ = args
            return {"loss": zero}, ([value - 0.1 for value in trainable], *others)
        if not self.built:
            self(args[0][0])
        for variable in self.trainable_variables:
            variable.assign(variable - 0.1)
        return {"loss": zero}

    def past_apply(self: Any, *args: Any) -> Any:
        """As a step that calls the optimizer's inner methods."""
        self.optimizer.__dict__["_hvdp"].inside = True
        try:
            return keras.Sequential.train_step(self, *args)
        finally:
            self.optimizer.__dict__["_hvdp"].inside = False

    for step in (by_hand, past_apply):
        bypassing = type("Bypassing", (keras.Sequential,), {"train_step": step})
        for first in ([layers.Input((2,))], []):  # without one TensorFlow builds the model in the first step
            model = bypassing([*first, layers.Dense(1)])
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mse")
            with pytest.raises(hvd.HvdpError, match="without a word to the other ranks"):
                model.fit(x, y, batch_size=2, verbose=0)

    # So is a part of the variables that moves by itself.
    class Two(keras.Sequential):
        other: Any = None

        def train_step(self, *args: Any) -> Any:
            ours, others = self.trainable_variables
            self.optimizer.apply([ours * 0 + rank + 1], [ours])
            self.other.apply([others * 0 + rank + 1], [others])
            return {"loss": zero}

    heard = logging.handlers.BufferingHandler(100)
    logging.getLogger("hvdp").addHandler(heard)
    for wrapped in (False, True) if keras.backend.backend() != "jax" else ():
        model = Two([layers.Input((2,)), layers.Dense(1, kernel_initializer="zeros")])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mse")
        model.other = keras.optimizers.SGD(1.0)
        if wrapped:
            hvd.DistributedOptimizer(model.other)
        heard.flush()
        model.fit(x, y, batch_size=2, verbose=0)
        np.testing.assert_allclose(weights(model)[0], -2 * ranks.mean())
        np.testing.assert_allclose(weights(model)[1], -2 * (ranks.mean() if wrapped else rank + 1))
        told = [r.getMessage() for r in heard.buffer if r.levelno == logging.WARNING]
        assert len(told) == (not wrapped), told
        assert wrapped or (f"rank {rank}" in told[0] and "/bias past" in told[0])

    # XLA is turned off where "auto" would have it, and rank 0 says so once.
    class Accelerated(keras.Sequential):
        def _resolve_auto_jit_compile(self) -> bool:
            return True

    logging.getLogger("hvdp").setLevel(logging.INFO)
    if keras.backend.backend() == "tensorflow":
        model = Accelerated([layers.Input((2,)), layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mse")
        assert model.jit_compile
        heard.flush()
        for _ in range(2):
            model.fit(x, y, verbose=0)
        assert not model.jit_compile
        assert sum("XLA" in record.getMessage() for record in heard.buffer) == (rank == 0)
    logging.getLogger("hvdp").setLevel(logging.NOTSET)
    logging.getLogger("hvdp").removeHandler(heard)

    if hasattr(keras.optimizers, "MultiOptimizer"):
        parts = {".*kernel": hvd.DistributedOptimizer(keras.optimizers.SGD())}
        parts = keras.optimizers.OptimizerMap(keras.optimizers.Adam(), parts)
        model = model_of(layers.Dense(1), optimizer=keras.optimizers.MultiOptimizer(parts))
        with pytest.raises(ValueError, match="as a whole"):
            model.fit(x, y, verbose=0)

    # Errors say what to do.
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="must be at least 1"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    optimizer.build([keras.Variable(np.zeros(3, "float32"))])
    new = keras.Variable(np.zeros(3, "float32"), name="new")
    with pytest.raises(ValueError, match=rf"rank {rank}: .* without .*new: make a new optimizer"):
        optimizer.apply([new.value * 0], [new])
    variable = keras.Variable(np.zeros(3 + rank, "float32"), name="odd")
    with pytest.raises(hvd.MismatchError, match="odd"):
        hvd.DistributedOptimizer(keras.optimizers.SGD()).apply([variable.value * 0], [variable])
    for call in (hvd.allreduce, hvd.allgather, lambda value: hvd.broadcast(value, 0), hvd.reducescatter):
        with pytest.raises(ValueError, match=r"rank 0.*inhomogeneous"):
            call([[1.0], [2.0, 3.0]] if rank == 0 else np.ones(size))
    np.testing.assert_allclose(hvd.allreduce(1.0), 1)
    np.testing.assert_allclose(hvd.allreduce(keras.Variable([rank + 1.0]), average=False), [ranks.sum()])
    np.testing.assert_allclose(hvd.allreduce(np.array([rank + 1.0]), op=hvd.Max), [size])
    np.testing.assert_allclose(hvd.broadcast(keras.ops.ones(2) * rank, size - 1), [size - 1] * 2)
    rows = keras.ops.ones((2 * size, 1)) * (rank + 1)
    np.testing.assert_allclose(hvd.reducescatter(rows), np.full((2, 1), ranks.mean()))
    np.testing.assert_allclose(hvd.allgather(keras.ops.ones((rank + 1, 2))), np.ones((int(ranks.sum()), 2)))


@on_every_backend
def test_optimizer(backend: str, size: int, tmp_path: Any) -> None:
    run(backend, size, _cases, str(tmp_path), **SMALL_BUCKETS)
