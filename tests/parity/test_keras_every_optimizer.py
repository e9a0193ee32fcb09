"""Every optimizer that Keras has, and one of a user's own, on two ranks as on one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("keras", reason="Keras is not installed")

from hvdp.testing import run_ranks

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HVDP_FUSION_THRESHOLD": "64", "OMP_NUM_THREADS": "1"}


def _differences() -> dict[str, float]:
    import keras
    import numpy as np

    import hvdp.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    class Signs(keras.optimizers.Optimizer):
        """Its state and its step are made by itself alone."""

        def build(self, variables: Any) -> None:
            if not self.built:
                super().build(variables)
                self.sums = [
                    self.add_variable_from_reference(reference_variable=variable, name="sum")
                    for variable in variables
                ]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            total = self.sums[self._get_variable_index(variable)]
            self.assign_add(total, gradient)
            self.assign_sub(variable, learning_rate * keras.ops.tanh(10 * total))

    found = {
        name: value
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer")
    }
    assert {"SGD", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "Adafactor"} <= found.keys()

    def made(kind: Any) -> Any:
        if kind.__name__ != "MultiOptimizer":
            return kind(learning_rate=0.02)
        kernels = {".*kernel": keras.optimizers.SGD(0.02, momentum=0.9)}
        return kind(keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.02), kernels))

    def train(kind: Any, together: bool) -> list[Any]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(2)])
        optimizer = made(kind)
        optimizer = hvd.DistributedOptimizer(optimizer) if together else optimizer
        model.compile(optimizer, "mse", run_eagerly=keras.backend.backend() != "jax")
        random = np.random.default_rng(5)
        for _ in range(3):
            x = random.normal(size=(size * 3, 5)).astype("float32")
            y = random.normal(size=(size * 3, 2)).astype("float32")
            mine = slice(rank * 3, rank * 3 + 3) if together else slice(None)
            model.train_on_batch(x[mine], y[mine])
        return [
            keras.ops.convert_to_numpy(v) for v in [*model.trainable_variables, *model.optimizer.variables]
        ]

    differences = {}
    for name, kind in {**found, "Signs": Signs}.items():
        pairs = zip(train(kind, False), train(kind, True), strict=True)
        differences[name] = max(float(np.abs(a - b).max(initial=0)) for a, b in pairs)
    return differences


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_every_optimizer(backend: str) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    for found in run_ranks(_differences, 2, env={**QUIET, "KERAS_BACKEND": backend}, timeout=200):
        assert len(found) >= 11
        wrong = {name: difference for name, difference in found.items() if not difference <= 1e-5}
        assert not wrong
