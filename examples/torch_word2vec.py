"""Word vectors from Python's standard library with sparse gradients, on any number of ranks.

    horovodrun -np 2 python examples/torch_word2vec.py
    horovodrun -np 2 python examples/torch_word2vec.py --show read int true
    horovodrun -np 2 python examples/torch_word2vec.py --checkpoint words.pt --resume

Skip-gram with negative sampling (Mikolov et al. 2013, arXiv:1310.4546). A batch touches few
of the words, so only the rows that any rank has touched travel between the ranks. The places
where a script for one process becomes one for many are marked (1) to (5).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hvdp.torch as hvd
from hvdp.scaling import scale_factor, warmup_factor

WINDOW = 4  # words on either side
NEGATIVES = 5  # random words for each true neighbour
COMMON = 1e-3  # words more frequent than this are skipped the more often, the more frequent they are
WARMUP_EPOCHS = 1.0
NEIGHBOURS = 5


def main() -> None:
    args = parse_arguments()
    hvd.init()  # (1) every rank finds its place
    torch.manual_seed(args.seed)
    text, words, counts = load_words(args.text_bytes, args.words)

    model = SkipGram(len(words), args.width)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=args.lr)
    # (2) sparse gradients are averaged over the ranks row by row
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), lr_scaling="sqrt"
    )
    peak_rate = optimizer.param_groups[0]["lr"]

    start, loss = 0, 0.0
    if args.resume and hvd.rank() == 0:
        start, loss = load_checkpoint(args.checkpoint, model, optimizer)
    # (3) all ranks start from what rank 0 holds, be it new or restored
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    start, loss = hvd.broadcast_object((start, loss), root_rank=0)

    trained = 0
    began = time.perf_counter()
    for epoch in range(start, args.epochs):
        loss, count = train_epoch(model, optimizer, text, counts, epoch, peak_rate, args)
        trained += count
        report(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}")
        if args.checkpoint and hvd.rank() == 0:  # (5) one rank writes
            save_checkpoint(args.checkpoint, model, optimizer, epoch + 1, loss)
    seconds = time.perf_counter() - began

    for word in args.show:
        if word in words:
            report(f"{word}: {', '.join(neighbours(model, words, words.index(word)))}")
    report(f"loss {loss:.4f}  pairs/s {trained / seconds:.0f}  ranks {hvd.size()}")
    hvd.shutdown()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train word vectors on Python's standard library.")
    parser.add_argument("--epochs", type=positive, default=6, help="in all, restored ones included")
    parser.add_argument("--batch-size", type=positive, default=512, help="words per rank and step")
    parser.add_argument("--width", type=positive, default=64, help="of a word's vector")
    parser.add_argument("--words", type=positive, default=4000, help="to learn: the most frequent ones")
    parser.add_argument("--lr", type=float, default=5e-3, help="rate for one rank")
    parser.add_argument("--text-bytes", type=positive, default=2_000_000, help="of source to read at most")
    parser.add_argument("--seed", type=int, default=1, help="of vectors and order")
    parser.add_argument(
        "--show", nargs="*", default=["read", "int", "true", "socket", "width"], help="words to look up"
    )
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


def load_words(limit: int, most: int) -> tuple[Tensor, list[str], Tensor]:
    """The text as word numbers, the words by number, and how often each occurs; equal on all ranks."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    text, left = [], limit
    for file in files:
        source = file.read_bytes()[:left].decode(errors="replace").lower()
        text += re.findall(r"[a-z_]*[a-z][a-z_]+", source)
        left -= len(source)
        if left <= 0:
            break
    counted = Counter(text).most_common(most)
    number = {word: index for index, (word, _) in enumerate(counted)}
    tokens = torch.tensor([number[word] for word in text if word in number])
    return tokens, list(number), torch.tensor([count for _, count in counted], dtype=torch.float64)


class SkipGram(nn.Module):
    """How well words go together: products of their vectors as centers and as neighbours."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.center = nn.Embedding(words, width, sparse=True)
        self.context = nn.Embedding(words, width, sparse=True)
        nn.init.uniform_(self.center.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.context.weight)

    def forward(self, centers: Tensor, contexts: Tensor) -> Tensor:
        """Scores (N, K) of contexts (N, K) around centers (N,)."""
        return (self.context(contexts) @ self.center(centers).unsqueeze(2)).squeeze(2)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    counts: Tensor,
    epoch: int,
    peak_rate: float,
    args: argparse.Namespace,
) -> tuple[float, int]:
    """The mean loss of a true pair and its negatives over all ranks' pairs, and their number."""
    places = my_places(text, counts, epoch, args)
    batches = places.split(args.batch_size)
    scale = scale_factor("sqrt", hvd.size())
    # What a rank draws follows from seed, epoch and rank alone: no state to save for --resume.
    random_numbers = torch.Generator().manual_seed((args.seed * 1_000_003 + epoch) * 4099 + hvd.rank())
    total = torch.zeros((), dtype=torch.float64)
    for step, (centers, contexts) in enumerate(pairs(text, counts, batches, random_numbers)):
        rate = peak_rate * warmup_factor(epoch + step / len(batches), WARMUP_EPOCHS, scale)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        scores = model(centers, contexts)
        losses = -F.logsigmoid(scores[:, 0]) - F.logsigmoid(-scores[:, 1:]).sum(dim=1)
        losses.mean().backward()
        optimizer.step()
        total += losses.detach().sum()
    everywhere = len(places) * hvd.size()
    return float(hvd.allreduce(total, name="loss", op=hvd.Sum)) / everywhere, everywhere


def my_places(text: Tensor, counts: Tensor, epoch: int, args: argparse.Namespace) -> Tensor:
    """(4) Where this rank's centers of one epoch stand: no place on two ranks, a new order each time.

    Ranks must take equally many steps, so up to `size - 1` places sit an epoch out.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
    kept = (COMMON * counts.sum() / counts).sqrt()[text]
    places = (torch.rand(len(text), generator=generator) < kept).nonzero().squeeze(1)
    order = torch.randperm(len(places), generator=generator)[: len(places) // hvd.size() * hvd.size()]
    return places[order[hvd.rank() :: hvd.size()]]


def pairs(
    text: Tensor, counts: Tensor, batches: tuple[Tensor, ...], generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Centers (N,), and for each one a word near it and random words that are most likely not (N, K)."""
    frequency = counts**0.75
    for places in batches:
        distance = torch.randint(1, WINDOW + 1, places.shape, generator=generator)
        side = torch.randint(0, 2, places.shape, generator=generator) * 2 - 1
        near = text[(places + distance * side) % len(text)]
        noise = frequency.multinomial(len(places) * NEGATIVES, replacement=True, generator=generator)
        yield text[places], torch.cat([near.unsqueeze(1), noise.view(-1, NEGATIVES)], dim=1)


@torch.no_grad()
def neighbours(model: SkipGram, words: list[str], index: int) -> list[str]:
    """The words whose vectors point most nearly the same way."""
    vectors = F.normalize(model.center.weight, dim=1)
    nearest = (vectors @ vectors[index]).topk(min(NEIGHBOURS + 1, len(words))).indices.tolist()
    return [words[other] for other in nearest if other != index][:NEIGHBOURS]


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int, loss: float
) -> None:
    """Write beside the old file, then take its place: a reader never sees half of one."""
    unfinished = path.with_name(path.name + ".unfinished")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs, "loss": loss}
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Restore on this rank; how many epochs are done already, and the loss of the last one."""
    if not path.exists():
        report(f"no checkpoint at {path} yet: starting from the beginning")
        return 0, 0.0
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["epochs"]), float(checkpoint["loss"])


def report(line: str) -> None:
    if hvd.rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
