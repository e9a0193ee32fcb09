"""Keras on N ranks with a batch of B each trains as one process with a batch of N * B does."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("keras", reason="Keras is not installed")

from hvdp.testing import run_ranks

BATCH = 12  # of all ranks together
BACKENDS = ["tensorflow", "torch", "jax"]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HVDP_FUSION_THRESHOLD": "300", "OMP_NUM_THREADS": "1"}


def _optimizers() -> dict[str, Any]:
    from keras import optimizers
    from keras.optimizers.schedules import ExponentialDecay

    scaled = optimizers.LossScaleOptimizer
    return {
        "sgd momentum": lambda wrap: wrap(optimizers.SGD(0.05, momentum=0.9, nesterov=True, clipvalue=0.3)),
        "adam schedule": lambda wrap: wrap(optimizers.Adam(ExponentialDecay(3e-3, 1, 0.9), clipnorm=0.2)),
        "adamw clipped": lambda wrap: wrap(
            optimizers.AdamW(
                2e-3, weight_decay=1e-2, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2
            )
        ),
        "accumulating": lambda wrap: wrap(optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)),
        "loss scale": lambda wrap: wrap(scaled(optimizers.Adam(2e-3), dynamic_growth_steps=2)),
        "inside loss scale": lambda wrap: scaled(wrap(optimizers.Adam(2e-3)), dynamic_growth_steps=2),
    }


def _train(name: str, distributed: bool, eager: bool, passes: int = 1) -> Any:
    import keras
    import numpy as np

    import hvdp.keras as hvd

    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(7, use_bias=False),
            layers.LayerNormalization(),
            layers.Dense(8, activation="tanh"),
            layers.Dense(3),
        ]
    )

    def wrap(optimizer: Any) -> Any:
        if not distributed:
            return optimizer
        return hvd.DistributedOptimizer(
            optimizer, backward_passes_per_step=passes, average_aggregated_gradients=True
        )

    model.compile(_optimizers()[name](wrap), "mse", run_eagerly=eager)
    each = BATCH // (hvd.size() if distributed else 1)
    start = hvd.rank() * each if distributed else 0
    random = np.random.default_rng(5)
    for _ in range(5):
        x, y = random.normal(size=(BATCH, 6)), random.normal(size=(BATCH, 3))
        own = range(start, start + each)
        for part in np.split(np.array(own), passes if distributed else 1):
            model.train_on_batch(x[part].astype("float32"), y[part].astype("float32"))
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return [np.asarray(keras.ops.convert_to_numpy(variable), np.float64) for variable in variables]


def _differences() -> dict[str, float]:
    import numpy as np

    import hvdp.keras as hvd

    hvd.init()
    found = {}
    for eager in (False, True):
        for name in _optimizers():
            alone, together = _train(name, False, eager), _train(name, True, eager)
            found[f"{name} eager={eager}"] = max(
                float(np.abs(a - b).max(initial=0)) for a, b in zip(alone, together, strict=True)
            )
    alone, together = _train("adam schedule", False, False), _train("adam schedule", True, False, passes=2)
    found["2 passes"] = max(float(np.abs(a - b).max(initial=0)) for a, b in zip(alone, together, strict=True))
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_ranks_train_as_one_process_does(backend: str, size: int) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    env = {**QUIET, "KERAS_BACKEND": backend}
    for rank, found in enumerate(run_ranks(_differences, size, env=env, timeout=200)):
        wrong = {way: value for way, value in found.items() if not value <= 1e-5}
        assert not wrong, f"on rank {rank}: {wrong}"
