"""A rank is lost in mid-training, with Keras and TensorFlow: in `fit`, in a graph, in a compiled program."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("keras", reason="Keras is not installed")

from hvdp.testing import run_script

HEAD = """
import os, signal, sys, time
import numpy as np

def act(*_):
    act.steps += 1
    if hvd.rank() == 1 and act.steps == 20:
        open({mark!r}, "w").write(repr(time.time()))
        {act}
    return np.float32(0)

act.steps = 0
"""

FIT = """
import keras
import hvdp.keras as hvd

class Acting(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        act()

def train():
    model = keras.Sequential([keras.layers.Input((30,)), keras.layers.Dense(300), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    x = np.ones((4000, 30), "float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=100, verbose=0, callbacks=[Acting()])
"""

GRAPH = """
import tensorflow as tf
import hvdp.tensorflow as hvd

def train():
    weight = tf.Variable(tf.ones([300, 300]))

    @tf.function
    def steps():
        for _ in tf.range(100_000):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * weight)
            (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
            weight.assign_sub(1e-6 * gradient + tf.numpy_function(act, [], tf.float32))

    steps()
"""

JITTED = """
import jax, keras
from jax.experimental import io_callback
import hvdp.keras as hvd

def train():
    weights = [keras.Variable(np.ones((300, 300), "float32"))]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-6))
    optimizer.build(weights)

    @jax.jit
    def steps(values, state):
        def step(_, carried):
            values, state = carried
            gradients = [2 * value for value in values]
            values, state = optimizer.stateless_apply(state, gradients, values)
            nothing = io_callback(act, jax.ShapeDtypeStruct((), np.float32), ordered=True)
            return [value + nothing for value in values], state

        return jax.lax.fori_loop(0, 100_000, step, (values, state))

    jax.block_until_ready(steps([w.value for w in weights], [v.value for v in optimizer.variables]))
"""

TAIL = """
hvd.init()
try:
    train()
except BaseException as error:
    print(f"saw {type(error).__mro__} {error}", flush=True)
    raise
"""

PROGRAMS = [
    pytest.param("tensorflow", FIT, id="tensorflow fit"),
    pytest.param("torch", FIT, id="torch fit"),
    pytest.param("jax", FIT, id="jax fit"),
    pytest.param("tensorflow", GRAPH, id="tensorflow graph"),
    pytest.param("jax", JITTED, id="jax jitted"),
]
ACTS = [
    pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by signal 9 (SIGKILL)", id="killed"),
    pytest.param("raise ValueError('no more cats')", 1, "exited with status 1", id="raises"),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("act", "status", "report"), ACTS)
@pytest.mark.parametrize(("backend", "program"), PROGRAMS)
def test_a_lost_rank_ends_the_training(
    backend: str, program: str, act: str, status: int, report: str, tmp_path: Path
) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    script, mark = tmp_path / "train.py", tmp_path / "acted at"
    script.write_text(HEAD.format(mark=str(mark), act=act) + program + TAIL)
    done = run_script(
        [sys.executable, "-m", "hvdp.launch", "-np", "2", sys.executable, script],
        env={"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=120,
    )
    print(done.stdout, done.stderr)
    assert not done.timed_out
    assert mark.exists()
    assert time.time() - float(mark.read_text()) < 10
    assert done.status == status
    assert done.stderr.splitlines()[-1] == f"hvdprun: rank 1 of 2 failed: {report}"
    # What the other rank sees: hvdp's error, or the framework's with its text inside.
    (seen,) = re.findall(r"\[0\]<stdout>:(saw .*(?:\n\[0\]<stdout>:.*)*)", done.stdout)
    assert "HorovodInternalError" in seen
    assert re.search(r"rank 1 (died|failed|left|raised)", seen), seen
    # Its own words are the last, and the other's a line.
    assert "[0]<stderr>:stopped by the failure of rank 1" in done.stderr
    assert "[0]<stderr>:Traceback" not in done.stderr
    if status == 1:
        assert "no more cats" in done.stderr[done.stderr.rindex("[1]<stderr>:Traceback") :]
