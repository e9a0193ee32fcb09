"""Keras models whose variables are not equal on all ranks, at the start or later."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("keras", reason="Keras is not installed")

from .backends import on_every_backend, run


def _cases() -> None:
    import logging.handlers
    import os

    import keras
    import numpy as np

    import hvdp.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    heard = logging.handlers.BufferingHandler(100)
    logging.getLogger("hvdp").addHandler(heard)
    keras.utils.set_random_seed(17 + rank)
    x, y = np.full((4, 2), rank + 1.0, "float32"), np.ones((4, 1), "float32")
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback

    def made(*first: Any, kernel: str = "glorot_uniform", **options: Any) -> Any:
        model = keras.Sequential([*first, keras.layers.Dense(1, kernel_initializer=kernel, name="last")])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **options), "mse")
        return model

    def told(model: Any, *callbacks: Any, data: Any = x, epochs: int = 1) -> list[str]:
        heard.flush()
        model.fit(data, y[:1].repeat(len(data), 0), 1, epochs, callbacks=callbacks, verbose=0)
        return [r.getMessage() for r in heard.buffer if r.levelno == logging.WARNING]

    # Who forgets the broadcast is told, once, by one rank; at the latest when there is something to compare.
    for first in ([keras.layers.Input((2,))], []):
        warnings = told(made(*first), epochs=2)
        assert len(warnings) == (rank == 0), warnings
        assert rank or "last/kernel' differs between ranks [0] and [1]" in warnings[0]
        assert rank or "BroadcastGlobalVariablesCallback(0)" in warnings[0]
        assert told(made(*first), broadcast(0), epochs=2) == []
        assert told(made(*first, kernel="ones")) == []
    if rank == 0:  # whose layers Keras numbers differently from here on
        made(keras.layers.Input((2,)), keras.layers.Dense(2)).build()
    model = made(keras.layers.Input((2,)), keras.layers.Dense(2))
    hvd.broadcast_global_variables(0, model)
    assert told(model) == []
    hvd.check_consistency(model)
    if rank == 0:  # a restored optimizer
        model.optimizer.iterations.assign(7)
    hvd.DistributedOptimizer(keras.optimizers.SGD())  # takes none of the other's names
    model.compile(model.optimizer, "mse")
    warnings = told(model)
    assert len(warnings) == (rank == 0), warnings
    assert rank or "iteration' differs between ranks [0] and [1" in warnings[0]

    # Asked: a bit is enough, in weights and in the optimizer's state; a rank's own variables do not count.
    model = made(keras.layers.Input((2,)), keras.layers.BatchNormalization())
    bias = model.layers[-1].bias
    assert told(model, broadcast(0)) == []
    hvd.check_consistency(model)
    for variable in (bias, model.optimizer.variables[-1]):
        value = keras.ops.convert_to_numpy(variable)
        if rank == size - 1:
            variable.assign(np.nextafter(value, np.float32(9)))
        with pytest.raises(hvd.MismatchError, match=rf"last.bias.*' differs between ranks .*\[{size - 1}\]"):
            hvd.check_consistency(model)
        variable.assign(value)
        hvd.check_consistency(model)
    bias.overwrite_with_gradient = True  # as a scale of float8, which Keras does not average
    bias.assign([float(rank)])
    hvd.check_consistency(model)
    bias.overwrite_with_gradient = False
    model.optimizer.register_local_var(bias)
    bias.assign([float(rank)])
    hvd.check_consistency(model)
    middle = hvd.add_process_set([size - 1])
    if rank == size - 1:
        hvd.check_consistency(model, middle)

    # Every so many steps, also where ranks have different numbers of them, or none are counted.
    os.environ["HVDP_CHECK_EVERY"] = "2"
    model = made(keras.layers.Input((2,)), kernel="ones")
    for _ in range(3):
        model.train_on_batch(x, y)
    if rank == 0:
        model.layers[-1].kernel.assign([[3.0], [3.0]])
    model.train_on_batch(x, y)
    with pytest.raises(hvd.MismatchError, match=r"apart after step 4: variable .*last/kernel' differs"):
        model.train_on_batch(x, y)
    executed = 1 if keras.backend.backend() == "torch" else 2
    uneven, even = x[:1].repeat(1 + 2 * rank, 0), x[:1].repeat(4, 0)
    for every in "123":
        os.environ["HVDP_CHECK_EVERY"] = every
        model = made(keras.layers.Input((2,)))
        for data in (uneven, even, uneven):
            assert told(model, broadcast(0), data=data, epochs=2) == []
        model.compile(model.optimizer, "mse", steps_per_execution=executed)
        for data in (even, uneven):
            assert told(model, broadcast(0), data=data) == []
    for _ in range(2):
        for _ in range(rank + 1):
            model.train_on_batch(x, y)
        hvd.join()
        hvd.broadcast_global_variables(0, model)
    os.environ["HVDP_CHECK_EVERY"] = "2"
    assert told(made(keras.layers.Input((2,)), kernel="ones", backward_passes_per_step=2), epochs=2) == []
    assert told(made(keras.layers.Input((2,)), kernel="ones", op=hvd.Adasum)) == []


@on_every_backend
def test_drift(backend: str, size: int) -> None:
    run(backend, size, _cases)
