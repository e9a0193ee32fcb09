"""Tapes, raw optimizers and synchronized normalization in TensorFlow loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from hvdp.testing import run_ranks

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HVDP_FUSION_THRESHOLD": "64", "OMP_NUM_THREADS": "1"}


def _cases() -> None:
    import numpy as np
    import tensorflow as tf

    import hvdp.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ranks = np.arange(size) + 1.0
    a, b = tf.Variable([1.0, 2.0]), tf.Variable([[3.0]] * (size + 1))

    def gradients(**options: Any) -> Any:
        with tf.GradientTape() as tape:
            rows = tf.gather(b, [0, rank, rank])
            loss = (tf.reduce_sum(a) + tf.reduce_sum(rows)) * (rank + 1)
        tape = hvd.DistributedGradientTape(tape, **options)
        return tape.gradient(loss, [a, b])

    def dense(gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient).numpy()

    sums = np.zeros((size + 1, 1))
    for other in range(size):
        sums[0] += other + 1
        sums[other] += 2 * (other + 1)
    for eager in (True, False):
        for options, factor in (
            ({}, 1 / size),
            ({"op": hvd.Sum, "sparse_as_dense": True}, 1.0),
            ({"op": hvd.Sum}, 1.0),
            ({"compression": hvd.Compression.fp16, "num_groups": 1}, 1 / size),
            ({"gradient_predivide_factor": 2.0, "groups": [[a, b]]}, 1 / size),
        ):
            # With AutoGraph, which would warn of what it cannot rewrite.
            call = gradients if eager else tf.function(gradients)
            kept = []
            for _ in range(2):
                first, second = call(**options)
                assert isinstance(second, tf.IndexedSlices) != options.get("sparse_as_dense", False)
                np.testing.assert_allclose(first, [ranks.sum() * factor] * 2)
                np.testing.assert_allclose(dense(second), sums * factor, rtol=1e-3)  # float16 rounds
                kept.append(first)
            np.testing.assert_allclose(kept[0], kept[1])  # results may be kept

    # Sources in any structure, twice in one graph, and none on some ranks.
    unused = tf.Variable(0.0)

    def twice() -> Any:
        found = []
        for factor in (1.0, 10.0):
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = factor * (rank + 1) * tf.reduce_sum(a)
            found.append(tape.gradient(loss, {"a": a, "none": unused}))
        return found

    for call in (twice, tf.function(twice, autograph=False)):
        for factor, found in zip((1.0, 10.0), call(), strict=True):
            np.testing.assert_allclose(found["a"], factor * ranks.mean())
            assert found["none"] is None

    # A layer of this rank's own.
    shared, own = tf.keras.layers.Dense(1), tf.keras.layers.Dense(1)
    inputs = tf.ones([2, 3]) * (rank + 1)
    shared.build(inputs.shape)
    own.build(inputs.shape)

    def partial(**options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(shared(inputs)) + tf.reduce_mean(own(inputs))
        tape = hvd.PartialDistributedGradientTape(tape, **options)
        return tape.gradient(loss, [shared.kernel, own.kernel])

    for call in (partial, tf.function(partial, autograph=False)):
        for options, divisor in (
            ({"local_layers": [own]}, size),
            ({"local_layers": own, "scale_local_gradients": False}, 1),
        ):
            found = call(**options)
            np.testing.assert_allclose(found[0], np.full((3, 1), ranks.mean()))
            np.testing.assert_allclose(found[1], np.full((3, 1), (rank + 1) / divisor))

    # The optimizer by its TensorFlow name, in a loop of one's own.
    w = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2)

    def step(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, w)])

    optimizer.build([w])
    for number, expected in enumerate((0.0, 2.0, 2.0, 4.0)):
        (step if number < 2 else tf.function(step, autograph=False))(tf.constant([rank + 1.0]))
        np.testing.assert_allclose(w, [-expected * ranks.mean()])

    # Normalization by the moments of all ranks' samples, forward and backward.
    everything = np.random.default_rng(3).normal(2.0, 3.0, (size * 4, 5)).astype("float32")
    starts = {
        "equal batches": [4 * r for r in range(size)],
        "a batch of one": [0, *[4 * r - 3 for r in range(1, size)]],
        "and of none": [0, *[4 * (r - 1) for r in range(1, size)]],
    }
    for (batches, begins), call_way in itertools.product(
        starts.items(), (lambda f: f, lambda f: tf.function(f, autograph=False))
    ):
        mine = slice(begins[rank], [*begins, size * 4][rank + 1])
        plain, sync = tf.keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
        x, part = tf.constant(everything), tf.constant(everything[mine])

        def run(layer: Any, x: Any, target: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * target)
            return y, tape.gradient(loss, x)

        plain.build(x.shape)
        sync.build(part.shape)
        target = tf.cast(tf.reshape(tf.range(size * 20), [size * 4, 5]), tf.float32) / 20
        y, dx = run(plain, x, target)
        y_part, dx_part = call_way(run)(sync, part, target[mine])
        np.testing.assert_allclose(y_part, y[mine], atol=1e-4, err_msg=batches)
        np.testing.assert_allclose(dx_part, dx[mine], atol=1e-4, err_msg=batches)
        np.testing.assert_allclose(sync.moving_mean, plain.moving_mean, rtol=1e-4, err_msg=batches)
        np.testing.assert_allclose(sync.moving_variance, plain.moving_variance, rtol=1e-4, err_msg=batches)

    with pytest.raises(ValueError, match="op must be"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Max)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [2, 3])
def test_training(size: int) -> None:
    run_ranks(_cases, size, env=QUIET, timeout=150)
