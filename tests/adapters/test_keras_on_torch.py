"""Keras's DistributedOptimizer on the torch backend: during backward, and beside torch.compile."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("keras", reason="Keras is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")

from hvdp.testing import run_ranks

QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "HVDP_FUSION_THRESHOLD": "64",
    "OMP_NUM_THREADS": "1",
    "KERAS_BACKEND": "torch",
}


def _compiled_by_torch() -> None:
    import functools

    import keras
    import numpy as np
    import torch

    import hvdp.keras as hvd

    hvd.init()
    # The graphs that it would make C++ of, for which it needs a compiler.
    torch.compile = functools.partial(torch.compile, backend="eager")
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.layers.Input((2,)), dense])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    model.compile(optimizer, lambda y, prediction: keras.ops.sum(prediction, axis=-1), jit_compile=True)
    x = np.full((4, 2), hvd.rank() + 1.0, "float32")
    for step in (1, 2):
        model.train_on_batch(x, x[:, :1])
        np.testing.assert_allclose(model.get_weights()[0], -step * (1 + hvd.size()) / 2)


@pytest.mark.timeout(240)
def test_torch_compile_leaves_the_reduction_out_of_its_graphs() -> None:
    run_ranks(_compiled_by_torch, 2, env=QUIET, timeout=200)


def _reduced_during_backward() -> None:
    import keras
    import numpy as np
    import torch

    import hvdp.keras as hvd

    hvd.init()
    mean = (hvd.size() + 1) / 2
    inputs = np.full((4, 2), hvd.rank() + 1.0, "float32")

    class Own(keras.Sequential):
        def train_step(self, *args: Any) -> Any:
            return super().train_step(*args)

    class Halving(keras.optimizers.LossScaleOptimizer):
        """An outer optimizer that changes gradients on their way."""

        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply([gradient / 2 for gradient in grads], trainable_variables)

    class Trained:
        """A model of two layers, and what it and its buckets should be."""

        def __init__(self, made: type = keras.Sequential, outer: Any = None, **options: Any) -> None:
            self.first = keras.layers.Dense(2, use_bias=False, kernel_initializer="identity")
            self.last = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            self.model = made([keras.layers.Input((2,)), self.first, self.last])
            self.optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
            self.outer = outer(self.optimizer, initial_scale=1.0) if outer else self.optimizer
            self.compile(self.outer)
            self.passes = options.get("backward_passes_per_step", 1)
            self.fails = self.differentiates_twice = False
            self.seen: list[bool] = []
            self.first.kernel.value.register_hook(self.look)
            self.step()
            self.reducer = self.optimizer.__dict__["_hvdp"].reducer.reducer

        def compile(self, optimizer: Any) -> None:
            self.model.compile(optimizer, self.loss)

        def loss(self, y: Any, prediction: Any) -> Any:
            if self.differentiates_twice:
                keras.ops.sum(self.last.kernel.value).backward()
            return keras.ops.sum(prediction, axis=-1)

        def look(self, gradient: Any) -> None:
            """At the buckets, when the gradient of the first layer, the last to be ready, is about to be."""
            if self.fails:
                raise RuntimeError("in backward")
            if hasattr(self, "reducer"):
                self.seen.append(any(b.handle is not None for b in self.reducer._bucketing.buckets))

        def fail(self) -> None:
            self.fails = True
            with pytest.raises(RuntimeError, match="in backward"):
                self.model.train_on_batch(inputs, inputs[:, :1])
            self.fails = False

        def step(self) -> None:
            """Both layers move by the ranks' mean of the inputs."""
            self.begin()
            for _ in range(self.passes):
                self.model.train_on_batch(inputs, inputs[:, :1])
            times = self.passes / (2 if isinstance(self.outer, Halving) else 1)
            self.check(mean * times, mean * times + self.differentiates_twice)

        def begin(self) -> None:
            self.first.kernel.assign(np.eye(2))
            self.last.kernel.assign(np.ones((2, 1)))

        def check(self, first: float, last: float) -> None:
            np.testing.assert_allclose(np.eye(2) - self.first.get_weights()[0], first)
            np.testing.assert_allclose(1 - self.last.get_weights()[0], last)

    for options in ({}, {"compression": hvd.Compression.bf16}, {"weighted": True}, {"num_groups": 2}):
        trained = Trained(**options)
        trained.step()
        trained.fail()
        trained.step()
        assert trained.seen == [True, True], options
        assert len(trained.reducer._bucketing.buckets) == 2

    # A failed step is forgotten, whoever makes the next one.
    trained = Trained()
    trained.fail()
    trained.model.zero_grad()
    weights = trained.model.trainable_weights
    trained.begin()
    keras.ops.mean(keras.ops.sum(trained.model(inputs * 3), axis=-1)).backward()
    with torch.no_grad():
        trained.optimizer.apply([variable.value.grad for variable in weights], weights)
    trained.check(3 * mean, 3 * mean)

    # Nor is a pass that failed mixed up with those before it.
    trained = Trained(backward_passes_per_step=2)
    trained.begin()
    trained.model.train_on_batch(inputs, inputs[:, :1])
    trained.fail()
    trained.model.train_on_batch(inputs, inputs[:, :1])
    trained.check(2 * mean, 2 * mean)
    assert trained.seen == [False, False]

    # Where a gradient may yet change, nothing is reduced before `apply`.
    trained = Trained(Own)
    trained.step()
    assert trained.seen == [False]
    trained = Trained(outer=Halving)
    trained.step()
    assert trained.seen == [False]
    trained = Trained()
    trained.model.train_step = lambda data: keras.Sequential.train_step(trained.model, data)
    trained.step()
    assert trained.seen == [False]
    trained = Trained()

    def changed(parameter: Any) -> None:
        parameter.grad.mul_(1)

    trained.first.kernel.value.register_post_accumulate_grad_hook(changed)
    trained.step()  # found to be changed, and reduced anew
    trained.step()
    assert trained.seen == [True, False]
    trained = Trained()
    trained.differentiates_twice = True
    trained.step()
    trained.step()

    # Hooks of optimizers that are gone are gone, too.
    trained.optimizer = trained.outer = None
    trained.compile("sgd")
    gc.collect()
    assert len(trained.last.kernel.value._post_accumulate_grad_hooks) == 0


def test_torch_reduces_while_backward_goes_on() -> None:
    run_ranks(_reduced_during_backward, 2, env={**QUIET, "HVDP_FUSION_THRESHOLD": "1"}, timeout=100)
