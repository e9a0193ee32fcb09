"""What hvdp adds to a Keras training step (TensorFlow backend, 5 million parameters).

    python benchmarks/keras_step.py -np 1
    python benchmarks/keras_step.py -np 2 --json keras_step.json

Each contender trains its own copy of the model on the same data, in one graph a step. Blocks of
steps of all contenders alternate; `added` is the median difference to plain Keras. Beside hvdp at
2 ranks and more:

- `by hand`: MPI_Allreduce of each gradient, called from the graph.
- `mirrored`: tf.distribute.MultiWorkerMirroredStrategy. Under it Keras 3.15 can neither `fit`
  ("PerReplica": unsupported type) nor `train_on_batch` ("Invalid reduction dimension 0"), so it
  trains in a loop of its own, and beside the same loop with plain Keras and with hvdp.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from _harness import parse_arguments, share_of_cores


def build(width: int, layers: int) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    dense = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    return keras.Sequential([keras.layers.Input((width,)), *dense, keras.layers.Dense(10)])


def by_hand(optimizer: Any, comm: Any) -> Any:
    """The loop that one would write without a library."""
    import numpy as np
    import tensorflow as tf

    class ByHand(type(optimizer)):  # type: ignore[misc]
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            def average(*arrays: Any) -> list[Any]:
                from mpi4py import MPI

                results = [np.empty_like(array) for array in arrays]
                for array, result in zip(arrays, results, strict=True):
                    comm.Allreduce(np.ascontiguousarray(array), result, op=MPI.SUM)
                    result /= comm.Get_size()
                return results

            averaged = tf.numpy_function(average, grads, [g.dtype for g in grads])
            for found, gradient in zip(averaged, grads, strict=True):
                found.set_shape(gradient.shape)
            super().apply(averaged, trainable_variables)

    optimizer.__class__ = ByHand
    return optimizer


def mirrored_strategy(comm: Any) -> Any:
    """Before TensorFlow has run anything, as the strategy wants it."""
    import tensorflow as tf

    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        workers = comm.allgather(f"127.0.0.1:{free.getsockname()[1]}")
    task = {"type": "worker", "index": comm.Get_rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()


def own_loop(model: Any, loss_of: Any, run: Any = lambda step, args: step(*args)) -> Any:
    """A training step as one writes it without `fit`."""
    import tensorflow as tf

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    return tf.function(lambda x, y: run(step, args=(x, y)), autograph=False)


def main() -> None:
    args: argparse.Namespace = parse_arguments(__doc__ or "")
    import keras
    import numpy as np
    import tensorflow as tf
    from mpi4py import MPI

    import hvdp.keras as hvd

    comm = MPI.COMM_WORLD
    tf.config.threading.set_intra_op_parallelism_threads(share_of_cores(comm.Get_size()))
    strategy = mirrored_strategy(comm) if comm.Get_size() > 1 else None
    hvd.init()
    width, layers, steps, blocks = (32, 2, 1, 3) if args.quick else (1100, 4, 5, 15)
    x = np.random.default_rng(hvd.rank()).normal(size=(128, width)).astype("float32")
    y = np.zeros(128, "int32")
    data = tf.constant(x), tf.constant(y)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def made(wrap: Any) -> Any:
        model = build(width, layers)
        model.compile(wrap(keras.optimizers.SGD(1e-3, momentum=0.9)), loss)
        model.optimizer.build(model.trainable_variables)
        return model

    model = made(lambda optimizer: optimizer)
    parameters = model.count_params()
    contenders = {"keras": model.train_on_batch, "hvdp": made(hvd.DistributedOptimizer).train_on_batch}
    if strategy is not None:
        contenders["by hand"] = made(lambda optimizer: by_hand(optimizer, comm)).train_on_batch
        contenders["keras loop"] = own_loop(made(lambda optimizer: optimizer), loss)
        contenders["hvdp loop"] = own_loop(made(hvd.DistributedOptimizer), loss)
        with strategy.scope():
            contenders["mirrored"] = own_loop(made(lambda optimizer: optimizer), loss, strategy.run)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        for _ in range(3):
            step(*data)
    names = list(contenders)
    for block in range(blocks):
        for name in names[block % len(names) :] + names[: block % len(names)]:
            comm.Barrier()
            began = time.perf_counter()
            for _ in range(steps):
                contenders[name](*data)
            times[name].append(max(comm.allgather(time.perf_counter() - began)) / steps)
    if hvd.rank() == 0:
        report(args.json, times, parameters, hvd.size())
    hvd.shutdown()


def report(file: Path | None, times: dict[str, list[float]], parameters: int, ranks: int) -> None:
    print(f"{parameters / 1e6:.1f} M parameters, {ranks} ranks, ms a step")
    result: dict[str, Any] = {"parameters": parameters, "ranks": ranks, "step_s": {}, "added_s": {}}
    for name, taken in times.items():
        plain = times["keras loop" if name.endswith("loop") or name == "mirrored" else "keras"]
        added = median(own - alone for own, alone in zip(taken, plain, strict=True))
        result["step_s"][name], result["added_s"][name] = median(taken), added
        share = added / median(plain)
        print(f"  {name:10s}{median(taken) * 1e3:9.2f}   added {added * 1e3:+8.2f}  {share:+.1%}")
    sys.stdout.flush()
    if file:
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
