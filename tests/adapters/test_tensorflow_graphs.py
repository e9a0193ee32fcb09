"""Gradients inside TensorFlow graphs: reduced while backward goes on, and never by XLA."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from hvdp.testing import run_ranks

# Every layer has a bucket of its own.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HVDP_FUSION_THRESHOLD": "64", "OMP_NUM_THREADS": "1"}


def _overlap() -> None:
    import threading

    import keras
    import numpy as np
    import tensorflow as tf

    import hvdp.keras
    import hvdp.tensorflow
    from hvdp.optimizer import GradientReducer

    hvdp.keras.init()
    started = threading.Event()
    launch = GradientReducer._launch

    def launched(self: Any, bucket: Any) -> None:
        launch(self, bucket)
        started.set()

    GradientReducer._launch = launched  # type: ignore[method-assign]
    waited: list[bool] = []

    def wait(_: Any) -> Any:
        waited.append(started.wait(20))
        return np.float32(1)

    def waiting(dy: Any) -> Any:
        # Stateless: TensorFlow keeps the order of what is not.
        one = tf.numpy_function(wait, [dy], tf.float32, stateful=False)
        return dy * tf.ensure_shape(one, [])

    @tf.custom_gradient
    def slow(x: Any) -> Any:
        """Its backward does not end before a bucket of the layers after it is on its way."""
        return tf.identity(x), waiting

    class Slow(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return slow(x)

    first = keras.layers.Dense(4)
    model = keras.Sequential(
        [keras.layers.Input((3,)), first, Slow(), keras.layers.Dense(5), keras.layers.Dense(1)]
    )
    x, y = tf.ones([2, 3]), tf.ones([2, 1])

    def taped() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) - y)
        tape = hvdp.tensorflow.DistributedGradientTape(tape)
        return tape.gradient(loss, model.trainable_variables)

    model.compile(hvdp.keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    for step in (lambda: model.train_on_batch(x, y), tf.function(taped, autograph=False)):
        for _ in range(3):
            started.clear()
            step()
            assert waited == [True]
            waited.clear()


def test_buckets_start_while_backward_goes_on() -> None:
    run_ranks(_overlap, 2, env=QUIET, timeout=100)


def _xla() -> None:
    import logging

    import keras
    import numpy as np
    import tensorflow as tf

    import hvdp.keras
    import hvdp.tensorflow

    hvdp.keras.init()
    told: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logging.getLogger("hvdp").addHandler(Told())
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    for jit_compile in ("auto", True, False):
        told.clear()
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile(
            hvdp.keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=jit_compile
        )
        before = model.get_weights()[0]
        model.fit(x, y, epochs=2, verbose=0)
        model.evaluate(x, y, verbose=0)
        assert not np.array_equal(before, model.get_weights()[0])
        lines = [line for line in told if "jit_compile" in line]
        # Keras itself takes "auto" for off where there is nothing but a CPU.
        auto = bool(tf.config.list_physical_devices("GPU"))
        said = {"auto": auto, True: True, False: False}[jit_compile] and hvdp.keras.rank() == 0
        assert len(lines) == said, told

    weight = tf.Variable([1.0])

    @tf.function(jit_compile=True, autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = weight * weight
        (gradient,) = hvdp.tensorflow.DistributedGradientTape(tape).gradient(loss, [weight])
        weight.assign_sub(gradient)

    with pytest.raises(tf.errors.InvalidArgumentError, match="needs_jit_compile_False"):
        step()

    @tf.function(jit_compile=True, autograph=False)
    def reduce(x: Any) -> Any:
        return hvdp.tensorflow.allreduce(x)

    with pytest.raises(tf.errors.InvalidArgumentError, match="needs_jit_compile_False"):
        reduce(tf.ones([3]))
    np.testing.assert_allclose(hvdp.tensorflow.allreduce(tf.ones([3])), 1)


def test_xla_is_turned_off_or_told_to_be() -> None:
    run_ranks(_xla, 2, env=QUIET, timeout=100)
