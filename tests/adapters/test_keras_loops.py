"""Loops of one's own around a Keras DistributedOptimizer, in the closed form of their values."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("keras", reason="Keras is not installed")

from .backends import SMALL_BUCKETS, on_every_backend, run

RATE, MOMENTUM, STEPS = 0.5, 0.5, 3


def _cases(folder: str) -> None:
    import os

    import keras
    import numpy as np

    import hvdp.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    mean = (size + 1) / 2
    inputs = np.full((4, 2), rank + 1.0, "float32")

    def made(optimizer: Any, **options: Any) -> tuple[Any, Any]:
        """A model whose output's mean has the mean input as gradient, and its optimizer."""
        zeros = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((2,)), zeros])
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def loss(model: Any, x: Any) -> Any:
        return keras.ops.mean(model(x))

    def by_tensorflow(model: Any, optimizer: Any, compiled: bool) -> None:
        import tensorflow as tf

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                value = loss(model, x)
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        call = tf.function(step, autograph=False) if compiled else step
        for _ in range(STEPS):
            call(tf.constant(inputs))

    def by_torch(model: Any, optimizer: Any, compiled: bool) -> None:
        import torch

        for _ in range(STEPS):
            model.zero_grad()
            loss(model, inputs).backward()
            variables = model.trainable_variables
            with torch.no_grad():
                optimizer.apply([variable.value.grad for variable in variables], variables)

    def by_jax(model: Any, optimizer: Any, compiled: bool) -> None:
        import jax

        def value(trainable: Any, others: Any, x: Any) -> Any:
            result, _ = model.stateless_call(trainable, others, x)
            return keras.ops.mean(result)

        def step(trainable: Any, others: Any, state: Any, x: Any) -> Any:
            gradients = jax.grad(value)(trainable, others, x)
            return optimizer.stateless_apply(state, gradients, trainable)

        call = jax.jit(step) if compiled else step
        trainable = [variable.value for variable in model.trainable_variables]
        others = [variable.value for variable in model.non_trainable_variables]
        state = [variable.value for variable in optimizer.variables]
        for _ in range(STEPS):
            trainable, state = call(trainable, others, state, inputs)
        for variable, new in zip(model.trainable_variables, trainable, strict=True):
            variable.assign(new)
        for variable, new in zip(optimizer.variables, state, strict=True):
            variable.assign(new)

    loops = {"tensorflow": by_tensorflow, "torch": by_torch, "jax": by_jax}
    loop = loops[keras.backend.backend()]
    # With momentum m the steps are -r g, -r g (1 + m), -r g (1 + m + m^2).
    after = -RATE * sum(sum(MOMENTUM**i for i in range(step + 1)) for step in range(STEPS))
    scale = keras.optimizers.LossScaleOptimizer
    for compiled in (False, True):
        for gradient, wrap, options in (
            (mean, None, {}),
            (mean * size, None, {"op": hvd.Sum}),
            (mean, None, {"compression": hvd.Compression.fp16, "gradient_predivide_factor": size}),
            (mean, lambda optimizer: scale(optimizer, initial_scale=1.0), {}),
        ):
            optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
            model, optimizer = made(wrap(optimizer) if wrap else optimizer, **options)
            loop(model, optimizer, compiled)
            np.testing.assert_allclose(model.get_weights()[0], after * gradient, rtol=1e-6)
            assert int(optimizer.iterations) == STEPS

        # A step every second pass.
        model, optimizer = made(keras.optimizers.SGD(RATE), backward_passes_per_step=2)
        loop(model, optimizer, compiled)
        np.testing.assert_allclose(model.get_weights()[0], -RATE * mean * 2, rtol=1e-6)
        assert int(optimizer.iterations) == STEPS // 2

    # Variables named together share a bucket, whatever the order; the others have their own.
    dense = [keras.layers.Dense(20, use_bias=False) for _ in range(3)]
    model = keras.Sequential([keras.layers.Input((20,)), *dense])
    kernels = model.trainable_variables
    for groups, wanted in (
        ([[kernels[0], kernels[2]]], [(0, 2), (1,)]),
        ([kernels], [(0, 1, 2)]),
        (3, [(0,), (1,), (2,)]),
        (None, [(0,), (1,), (2,)]),
    ):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=groups)
        before = [keras.ops.convert_to_numpy(kernel) for kernel in kernels]
        optimizer.apply([keras.ops.ones((20, 20)) * (rank + 1) * i for i in range(3)], kernels)
        for i, (kernel, old) in enumerate(zip(kernels, before, strict=True)):
            np.testing.assert_allclose(keras.ops.convert_to_numpy(kernel), old - mean * i, atol=1e-5)
        buckets = optimizer.__dict__["_hvdp"].reducer.prepare((), ())
        assert sorted(tuple(sorted(bucket)) for bucket in buckets if bucket) == wanted, (groups, buckets)

    # A scaled loss is saved and comes back with its scale, reduced again.
    for outer in (True, False):
        inner = keras.optimizers.SGD(RATE)
        if outer:
            optimizer = scale(hvd.DistributedOptimizer(inner), initial_scale=64.0)
        else:
            optimizer = hvd.DistributedOptimizer(scale(inner, initial_scale=64.0))
        zeros = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((2,)), zeros])
        model.compile(optimizer, "mse")
        model.train_on_batch(inputs, inputs[:, :1])
        path = f"{folder}/{rank}.{outer}.keras"
        model.save(path)
        loaded = hvd.load_model(path)
        assert isinstance(loaded.optimizer, scale)
        assert float(keras.ops.convert_to_numpy(loaded.optimizer.dynamic_scale)) == 64
        for trained in (model, loaded):
            trained.train_on_batch(inputs, inputs[:, :1] * 3)
        np.testing.assert_allclose(loaded.get_weights()[0], model.get_weights()[0], rtol=1e-6)
        everyones = hvd.allgather(loaded.get_weights()[0].reshape(1, 2))
        np.testing.assert_array_equal(everyones, np.repeat(everyones[:1], size, axis=0))
        assert everyones[0, 0] != 0

    # One rank loads what was saved, where the others build anew, and all go on from there.
    def new() -> Any:
        layers = [keras.layers.Dense(3), keras.layers.Dense(1)]
        built = keras.Sequential([keras.layers.Input((2,)), *layers])
        built.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
        return built

    os.environ["HVDP_CHECK_EVERY"] = "1"
    keras.utils.set_random_seed(rank)
    targets = inputs[:, :1] * 3
    hvd.broadcast_global_variables(0, saved := new())
    saved.fit(inputs, targets, 2, verbose=0)
    if rank == 0:
        saved.save(f"{folder}/resumed.keras")
    hvd.barrier()
    resumed = hvd.load_model(f"{folder}/resumed.keras") if rank == 0 else new()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    resumed.fit(inputs, targets, 2, 2, callbacks=[broadcast], verbose=0)
    saved.fit(inputs, targets, 2, 2, verbose=0)
    hvd.check_consistency(resumed)
    for mine, other in zip(resumed.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


@on_every_backend
def test_loops(backend: str, size: int, tmp_path: Any) -> None:
    run(backend, size, _cases, str(tmp_path), **SMALL_BUCKETS)
