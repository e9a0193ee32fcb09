"""Handwritten digits with Keras, on any backend and any number of ranks.

    KERAS_BACKEND=tensorflow horovodrun -np 2 python examples/keras_digits.py
    KERAS_BACKEND=torch python examples/keras_digits.py      # the same on one rank

The five places where a script for one process becomes one for many are marked (1) to (5).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvdp.keras as hvd

TEST_IMAGES = 360


def main() -> None:
    args = parse_arguments()
    hvd.init()  # (1) every rank finds its place
    keras.utils.set_random_seed(args.seed)
    (images, labels), test = load_data()

    # (2) gradients are averaged over the ranks, and the rate is scaled for their common batch
    rate = args.lr * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = build_model()
    model.compile(optimizer, loss, metrics=["accuracy"])

    callbacks = [
        # (3) all ranks start from what rank 0 holds
        hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3),
    ]
    if args.checkpoint:  # (5) one rank writes
        callbacks.append(hvd.callbacks.BestModelCheckpoint("loss", filepath=args.checkpoint))
    began = time.perf_counter()
    model.fit(
        # (4) this rank's share: no image on two ranks
        hvd.shard(images, shuffle=True, seed=args.seed, drop_last=True),
        hvd.shard(labels, shuffle=True, seed=args.seed, drop_last=True),
        batch_size=args.batch_size,
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    seconds = time.perf_counter() - began

    accuracy = evaluate(model, *test)
    if hvd.rank() == 0:
        images_per_second = args.epochs * len(images) / seconds
        print(f"test accuracy {accuracy:.4f}  images/s {images_per_second:.0f}  ranks {hvd.size()}")
    hvd.shutdown()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="rate for one rank (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and order (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="a .keras file for the best model")
    return parser.parse_args()


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images (N, 8, 8, 1) between 0 and 1 and their digits, for training and for testing."""
    digits = load_digits()
    images = (digits.images[..., None] / 16.0).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def build_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def evaluate(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy over the whole test set: every rank counts its own share, each image once."""
    mine = slice(hvd.rank(), None, hvd.size())
    right = (model.predict(images[mine], verbose=0).argmax(axis=1) == labels[mine]).sum()
    return int(hvd.allreduce(right, name="right", op=hvd.Sum)) / len(labels)


if __name__ == "__main__":
    main()
