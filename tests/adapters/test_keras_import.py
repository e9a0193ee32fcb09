"""What `import hvdp.keras` loads, and what a saved model needs to be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("keras", reason="Keras is not installed")

FRAMEWORKS = {"tensorflow", "torch", "jax"}

IMPORT = """
import json, os, sys
before = dict(os.environ)
import keras
loaded = set(sys.modules)
import hvdp.keras
from hvdp.keras import callbacks
hvdp.keras.init()
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile(hvdp.keras.DistributedOptimizer(keras.optimizers.SGD()), "mse")
print(json.dumps({
    "new": sorted({name.partition(".")[0] for name in set(sys.modules) - loaded}),
    "backend": keras.backend.backend(),
    "environment": {k: v for k, v in os.environ.items() if k.startswith("KERAS") and before.get(k) != v},
}))
"""

LOAD = """
import sys
sys.modules["hvdp"] = None  # whose import fails from here on
import keras, numpy as np

@keras.saving.register_keras_serializable("mine")
class Halving(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / 2, variable, learning_rate)

for path in sys.argv[1:]:
    model = keras.models.load_model(path)
    model.train_on_batch(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
    print(type(model.optimizer).__module__.partition(".")[0], type(model.optimizer).__name__, end=" ")
    print(int(model.optimizer.iterations))
"""

SAVE = """
import sys
import keras, numpy as np
import hvdp.keras as hvd

@keras.saving.register_keras_serializable("mine")
class Halving(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / 2, variable, learning_rate)

hvd.init()
scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
optimizers = [keras.optimizers.AdamW(0.1), Halving(0.1), scaled]
for path, optimizer in zip(sys.argv[1:], optimizers, strict=True):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    model.train_on_batch(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
    model.save(path)
"""


def _python(program: str, *arguments: Any, backend: str | None = None) -> str:
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    env.pop("KERAS_BACKEND", None)
    if backend:
        env["KERAS_BACKEND"] = backend
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_no_other_backend_is_loaded_or_chosen(backend: str) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    told = json.loads(_python(IMPORT, backend=backend))
    assert told["backend"] == backend
    assert FRAMEWORKS.isdisjoint(told["new"]), "importing keras alone does not load them"
    assert told["environment"] == {}


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_what_was_saved_loads_where_hvdp_is_not_installed(backend: str, tmp_path: Any) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    paths = [tmp_path / f"{name}.keras" for name in ("AdamW", "Halving", "LossScaleOptimizer")]
    _python(SAVE, *paths, backend=backend)
    told = _python(LOAD, *paths, backend=backend).splitlines()
    assert told == ["keras AdamW 2", "__main__ Halving 2", "keras LossScaleOptimizer 2"]
