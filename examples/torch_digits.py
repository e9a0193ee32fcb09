"""Handwritten digits with PyTorch, on any number of ranks.

    horovodrun -np 2 python examples/torch_digits.py
    python examples/torch_digits.py                     # the same on one rank
    horovodrun -np 2 python examples/torch_digits.py --checkpoint digits.pt --resume

The five places where a script for one process becomes one for many are marked (1) to (5).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from rich.progress import Progress
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import hvdp.torch as hvd
from hvdp.scaling import scale_factor, warmup_factor

WARMUP_EPOCHS = 3.0
TEST_IMAGES = 360


def main() -> None:
    args = parse_arguments()
    hvd.init()  # (1) every rank finds its place
    torch.manual_seed(args.seed)
    train, test = load_data()

    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # (2) gradients are averaged over the ranks, and the rate is scaled for their common batch
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), lr_scaling="linear"
    )
    peak_rate = optimizer.param_groups[0]["lr"]

    start = 0
    if args.resume and hvd.rank() == 0:
        start = load_checkpoint(args.checkpoint, model, optimizer)
    # (3) all ranks start from what rank 0 holds, be it new or restored
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    start = hvd.broadcast_object(start, root_rank=0)

    report = Report(start, args.epochs)
    began = time.perf_counter()
    for epoch in range(start, args.epochs):
        loss, rate = train_epoch(model, optimizer, train, epoch, peak_rate, args)
        report.epoch_done(epoch, loss, rate)
        if args.checkpoint and hvd.rank() == 0:  # (5) one rank writes
            save_checkpoint(args.checkpoint, model, optimizer, epoch + 1)
    seconds = time.perf_counter() - began
    report.close()

    accuracy = evaluate(model, *test)
    if hvd.rank() == 0:
        images_per_second = max(args.epochs - start, 0) * len(train[0]) / seconds
        print(f"test accuracy {accuracy:.4f}  images/s {images_per_second:.0f}  ranks {hvd.size()}")
    hvd.shutdown()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument(
        "--epochs", type=positive, default=12, help="in all, restored ones included (%(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=32, help="images per rank and step (%(default)s)"
    )
    parser.add_argument("--lr", type=float, default=0.02, help="rate for one rank (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and order (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="file to write after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint where it exists")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE, the file to go on from")
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return number


def load_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images (N, 1, 8, 8) between 0 and 1 and their digits, for training and for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    epoch: int,
    peak_rate: float,
    args: argparse.Namespace,
) -> tuple[float, float]:
    """One pass over this rank's share; the mean loss of all ranks and the last rate."""
    images, labels = data
    batches = shard(len(images), args.batch_size, args.seed, epoch)
    scale = scale_factor("linear", hvd.size())
    total = torch.zeros(())
    rate = peak_rate
    model.train()
    for step, batch in enumerate(batches):
        rate = peak_rate * warmup_factor(epoch + step / len(batches), WARMUP_EPOCHS, scale)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        total += loss.detach() / len(batches)
    return float(hvd.allreduce(total, name="loss")), rate


def shard(count: int, batch_size: int, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """(4) This rank's batches of one epoch: a new order each time, and no image on two ranks.

    Ranks must take equally many steps, so up to `size - 1` images sit an epoch out.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(count, generator=generator)[: count // hvd.size() * hvd.size()]
    return order[hvd.rank() :: hvd.size()].split(batch_size)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Accuracy over the whole test set: every rank counts its own share, each image once."""
    model.eval()
    mine = slice(hvd.rank(), None, hvd.size())
    right = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
    return int(hvd.allreduce(right, name="right", op=hvd.Sum)) / len(labels)


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Write beside the old file, then take its place: a reader never sees half of one."""
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}, unfinished
    )
    os.replace(unfinished, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore on this rank; how many epochs are done already."""
    if not path.exists():
        print(f"no checkpoint at {path} yet: starting from the beginning")
        return 0
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["epochs"])


class Report:
    """What rank 0 shows: a bar in a terminal, else a line every few epochs."""

    def __init__(self, start: int, epochs: int) -> None:
        self.epochs = epochs
        self.bar = Progress() if hvd.rank() == 0 and sys.stdout.isatty() else None
        if self.bar:
            self.task = self.bar.add_task("training", total=epochs, completed=start)
            self.bar.start()

    def epoch_done(self, epoch: int, loss: float, rate: float) -> None:
        done = epoch + 1
        text = f"epoch {done}/{self.epochs}  loss {loss:.4f}  rate {rate:.4f}"
        if self.bar:
            self.bar.update(self.task, completed=done, description=text)
        elif hvd.rank() == 0 and (done % 4 == 0 or done == self.epochs):
            print(text, flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


if __name__ == "__main__":
    main()
