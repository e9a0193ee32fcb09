"""A small GPT that learns to write Python, byte by byte, on any number of ranks.

    horovodrun -np 2 python examples/torch_language_model.py
    horovodrun -np 2 python examples/torch_language_model.py --accumulate 4 --bf16
    horovodrun -np 2 python examples/torch_language_model.py --checkpoint gpt.pt --resume

The text is the source of Python's own standard library. Each step sees
`--batch-size` windows x `--accumulate` backward passes x ranks; the places where a script
for one process becomes one for many are marked (1) to (6).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hvdp.torch as hvd
from hvdp.scaling import scale_factor, warmup_factor

VOCABULARY = 256  # bytes
MOST_VALIDATION = 1 << 15  # bytes
NO_TARGET = -100
CLIP_NORM = 1.0


def main() -> None:
    args = parse_arguments()
    hvd.init()  # (1) every rank finds its place
    torch.manual_seed(args.seed)
    train, validation = load_text(args.text_bytes)
    if len(train) // hvd.size() <= args.context:
        raise SystemExit(f"--text-bytes {args.text_bytes} leaves a rank without a window of {args.context}")

    model = GPT(args.width, args.layers, args.heads, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    # (2) gradients are averaged over the ranks when the last of a step's backward passes returns;
    # the rate is scaled for the batch that ranks and passes form together
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.accumulate,
        lr_scaling="sqrt",
    )
    peak_rate = optimizer.param_groups[0]["lr"]

    start = 0
    if args.resume and hvd.rank() == 0:
        start = load_checkpoint(args.checkpoint, model, optimizer)
    # (3) all ranks start from what rank 0 holds, be it new or restored
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    start = hvd.broadcast_object(start, root_rank=0)

    perplexity = evaluate(model, validation, args)
    report(f"step {start}/{args.steps}  perplexity {perplexity:.2f}")
    seconds = 0.0
    for first in range(start, args.steps, args.report_every):
        until = min(first + args.report_every, args.steps)
        began = time.perf_counter()
        loss, rate = train_steps(model, optimizer, train, range(first, until), peak_rate, args)
        seconds += time.perf_counter() - began
        perplexity = evaluate(model, validation, args)
        report(f"step {until}/{args.steps}  loss {loss:.3f}  perplexity {perplexity:.2f}  rate {rate:.5f}")
        if args.checkpoint and hvd.rank() == 0:  # (6) one rank writes
            save_checkpoint(args.checkpoint, model, optimizer, until)

    tokens = max(args.steps - start, 0) * args.batch_size * args.accumulate * args.context * hvd.size()
    speed = tokens / seconds if seconds else 0.0
    report(f"perplexity {perplexity:.2f}  tokens/s {speed:.0f}  ranks {hvd.size()}")
    hvd.shutdown()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's standard library.")
    parser.add_argument("--steps", type=positive, default=300, help="in all, restored ones included")
    parser.add_argument("--batch-size", type=positive, default=8, help="windows per rank and backward pass")
    parser.add_argument("--accumulate", type=positive, default=2, help="backward passes per step")
    parser.add_argument("--context", type=positive, default=128, help="bytes of a window")
    parser.add_argument("--width", type=positive, default=128, help="of the model")
    parser.add_argument("--layers", type=positive, default=4, help="of the model")
    parser.add_argument("--heads", type=positive, default=4, help="of each layer; must divide the width")
    parser.add_argument("--lr", type=float, default=1e-3, help="rate for one rank and one pass")
    parser.add_argument("--warmup", type=positive, default=50, help="steps until the rate is the scaled one")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--text-bytes", type=positive, default=2_000_000, help="of source to read at most")
    parser.add_argument("--report-every", type=positive, default=50, help="steps between validations")
    parser.add_argument("--seed", type=int, default=1, help="of weights and order")
    parser.add_argument("--checkpoint", type=Path, help="file to write after every validation")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint where it exists")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE, the file to go on from")
    if args.width % args.heads:
        parser.error(f"--heads must divide --width. Received: {args.heads} and {args.width}")
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return number


def load_text(limit: int) -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes to validate on, the same on every rank and in every run."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    text = bytearray()
    for file in files:
        text += file.read_bytes()[: limit - len(text)]
    data = torch.frombuffer(text, dtype=torch.uint8)
    held_out = min(len(data) // 10, MOST_VALIDATION)
    return data[:-held_out], data[-held_out:]


class Block(nn.Module):
    """Attention to what came before, then a small MLP; both added to what passes by."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.attention_norm(x))
        parts = parts.view(batch, length, 3 * self.heads, width // self.heads)
        query, key, value = parts.transpose(1, 2).chunk(3, dim=1)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes in, scores of each next byte out."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = (2 * layers) ** -0.5 if name.endswith(("mix.weight", "mlp.2.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, windows: Tensor, bf16: bool, reduction: str) -> Tensor:
    """Of each byte in the windows (N, context + 1) but the first, given those before it."""
    inputs, targets = windows[:, :-1].clamp(min=0), windows[:, 1:]
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        scores = model(inputs)
    return F.cross_entropy(
        scores.float().flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction=reduction
    )


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    steps: range,
    peak_rate: float,
    args: argparse.Namespace,
) -> tuple[float, float]:
    """The mean loss of all ranks in these steps, and the last rate."""
    scale = scale_factor("sqrt", hvd.size() * args.accumulate)
    total = torch.zeros(())
    rate = peak_rate
    model.train()
    for step in steps:
        rate = peak_rate * warmup_factor(step, args.warmup, scale)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        for windows in my_windows(text, step, args).chunk(args.accumulate):
            loss = loss_of(model, windows, args.bf16, "mean") / args.accumulate
            loss.backward()
            total += loss.detach() / len(steps)
        # (4) nothing to wait for: these are the gradients of all ranks already
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
    return float(hvd.allreduce(total, name="loss")), rate


def my_windows(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """(5) This rank's windows of one step, out of its own part of the text.

    They follow from the seed, the rank and the step alone: no state to save for --resume.
    """
    part = text.tensor_split(hvd.size())[hvd.rank()]
    generator = torch.Generator().manual_seed((args.seed * 1_000_003 + step) * 4099 + hvd.rank())
    starts = torch.randint(
        len(part) - args.context, (args.batch_size * args.accumulate, 1), generator=generator
    )
    return part[starts + torch.arange(args.context + 1)].long()


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, args: argparse.Namespace) -> float:
    """Perplexity per byte: each byte of the text is predicted once, by one of the ranks."""
    model.eval()
    count = len(text) - 1
    starts = torch.arange(0, count, args.context)[hvd.rank() :: hvd.size(), None]
    places = starts + torch.arange(args.context + 1)
    windows = text[places.clamp(max=count)].long().masked_fill(places > count, NO_TARGET)
    total = torch.zeros((), dtype=torch.float64)
    for batch in windows.split(args.batch_size):
        total += loss_of(model, batch, args.bf16, "sum").double()
    return math.exp(float(hvd.allreduce(total, name="validation", op=hvd.Sum)) / count)


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Write beside the old file, then take its place: a reader never sees half of one."""
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore on this rank; how many steps are done already."""
    if not path.exists():
        report(f"no checkpoint at {path} yet: starting from the beginning")
        return 0
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["steps"])


def report(line: str) -> None:
    if hvd.rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
