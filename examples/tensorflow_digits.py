"""Handwritten digits with TensorFlow and a training loop of one's own, on any number of ranks.

    horovodrun -np 2 python examples/tensorflow_digits.py
    python examples/tensorflow_digits.py                     # the same on one rank

The five places where a script for one process becomes one for many are marked (1) to (5).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdp.tensorflow as hvd
from hvdp.scaling import scale_factor, warmup_factor

WARMUP_EPOCHS = 3.0
TEST_IMAGES = 360


def main() -> None:
    args = parse_arguments()
    hvd.init()  # (1) every rank finds its place
    tf.keras.utils.set_random_seed(args.seed)
    (images, labels), test = load_data()
    model = build_model()
    scale = scale_factor("linear", hvd.size())
    optimizer = tf.keras.optimizers.SGD(args.lr * scale, momentum=0.9)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)  # (2) alike at the start

    # (3) this rank's share: no image on two ranks
    data = hvd.shard(tf.data.Dataset.from_tensor_slices((images, labels)), drop_last=True)
    batches = data.shuffle(len(images), seed=args.seed).batch(args.batch_size)
    step = training_step(model, optimizer)
    began = time.perf_counter()
    for epoch in range(args.epochs):
        losses = []
        for number, (x, y) in enumerate(batches):
            progress = epoch + number / len(batches)
            optimizer.learning_rate = args.lr * scale * warmup_factor(progress, WARMUP_EPOCHS, scale)
            losses.append(step(x, y))
        loss = hvd.allreduce(tf.reduce_mean(losses), name="loss")
        if hvd.rank() == 0 and ((epoch + 1) % 4 == 0 or epoch + 1 == args.epochs):
            print(f"epoch {epoch + 1}/{args.epochs}  loss {float(loss):.4f}", flush=True)
    seconds = time.perf_counter() - began

    accuracy = evaluate(model, *test)
    if hvd.rank() == 0:
        images_per_second = args.epochs * len(images) / seconds
        print(f"test accuracy {accuracy:.4f}  images/s {images_per_second:.0f}  ranks {hvd.size()}")
        if args.checkpoint:  # (5) one rank writes
            model.save(args.checkpoint)
    hvd.shutdown()


def training_step(model, optimizer):
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # (4) gradients are averaged over the ranks
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="rate for one rank (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and order (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="a .keras file to write at the end")
    return parser.parse_args()


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images (N, 8, 8, 1) between 0 and 1 and their digits, for training and for testing."""
    digits = load_digits()
    images = (digits.images[..., None] / 16.0).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def build_model() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def evaluate(model: tf.keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy over the whole test set: every rank counts its own share, each image once."""
    mine = slice(hvd.rank(), None, hvd.size())
    right = (model.predict(images[mine], verbose=0).argmax(axis=1) == labels[mine]).sum()
    return int(hvd.allreduce(tf.constant(right), name="right", op=hvd.Sum)) / len(labels)


if __name__ == "__main__":
    main()
