"""What communication adds to a training step: hvdp beside its peers, in one run.

    python benchmarks/train_step.py -np 2 --json train_step.json

Each contender trains its own copy of the model on the same data. Blocks of steps of all
contenders alternate; `added` is the median difference to the block without communication.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from _harness import World, has_horovod, parse_arguments
from torch import Tensor, nn
from torch.nn import functional as F

import hvdp.torch as hvd

WARM_UP_STEPS = 3


class Case(NamedTuple):
    """A model and how much of it to run."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    steps_per_block: int
    blocks: int


def transformer(quick: bool) -> Case:
    """An encoder of about 5 million parameters over sequences of 64 tokens."""
    vocabulary, width, layers = (100, 32, 1) if quick else (1000, 256, 6)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Linear(width, 10)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))

    return Case(Classifier(), torch.randint(vocabulary, (8, 64)), torch.randint(10, (8,)), 4, 10)


def mlp(quick: bool) -> Case:
    """Four wide layers, about 25 million parameters: much to send for little arithmetic."""
    width = 64 if quick else 3072
    model = nn.Sequential(
        nn.Linear(1024, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 1024),
    )
    return Case(model, torch.randn(128, 1024), torch.randint(1024, (128,)), 4, 10)


def convnet(quick: bool) -> Case:
    """A small convolutional network: little to send, so fixed costs show."""
    channels = 8 if quick else 64
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 10),
    )
    return Case(model, torch.randn(48, 3, 32, 32), torch.randint(10, (48,)), 4, 10)


MODELS = {"transformer": transformer, "mlp": mlp, "convnet": convnet}


def no_communication(model: nn.Module, case: Case, name: str) -> Callable[[], None]:
    return stepper(model, sgd(model), case)


def with_hvdp(model: nn.Module, case: Case, name: str) -> Callable[[], None]:
    named = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
    return stepper(model, hvd.DistributedOptimizer(sgd(model), named_parameters=named), case)


def with_ddp(model: nn.Module, case: Case, name: str) -> Callable[[], None]:
    # Like hvdp, with gradients that are views of the buckets: DDP's faster setting.
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return stepper(wrapped, sgd(wrapped), case)


def with_horovod(model: nn.Module, case: Case, name: str) -> Callable[[], None]:
    import horovod.torch as horovod

    named = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
    return stepper(model, horovod.DistributedOptimizer(sgd(model), named_parameters=named), case)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> Callable[[], None]:
    """One block of training steps."""

    def block() -> None:
        for _ in range(case.steps_per_block):
            optimizer.zero_grad()
            F.cross_entropy(model(case.inputs), case.labels).backward()
            optimizer.step()

    return block


def main() -> None:
    args = parse_arguments(__doc__)
    world = World()
    builders = {"none": no_communication, "hvdp": with_hvdp, "ddp": with_ddp}
    if has_horovod():
        builders["horovod"] = with_horovod
    results = []
    for name, build_case in MODELS.items():
        if args.only and name not in args.only:
            continue
        torch.manual_seed(world.rank)
        case = build_case(args.quick)
        if args.quick:
            case = case._replace(steps_per_block=1, blocks=3)
        hvd.broadcast_parameters(case.model.state_dict(), root_rank=0)
        contenders = {}
        for contender, build in builders.items():
            contenders[contender] = build(copy.deepcopy(case.model), case, name)
            for _ in range(WARM_UP_STEPS):
                contenders[contender]()
        result = summary(name, case, world.paired(contenders, case.blocks))
        results.append(result)
        if world.rank == 0:
            show(result)
    world.report(args, results)
    world.close()


def summary(name: str, case: Case, blocks: dict[str, list[float]]) -> dict:
    """Per step: seconds, and seconds added to the step without communication, paired by block."""
    steps = {key: [taken / case.steps_per_block for taken in times] for key, times in blocks.items()}
    added = {
        key: median(with_it - without for with_it, without in zip(times, steps["none"], strict=True))
        for key, times in steps.items()
        if key != "none"
    }
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in case.model.parameters()),
        "blocks": case.blocks,
        "steps_per_block": case.steps_per_block,
        "step_s": {key: median(times) for key, times in steps.items()},
        "added_s": added,
        "hvdp_added_over_ddp_added": added["hvdp"] / added["ddp"] if added["ddp"] > 0 else None,
    }


def show(result: dict) -> None:
    print(f"{result['model']}, {result['parameters'] / 1e6:.1f} M parameters, ms a step")
    for key, seconds in result["step_s"].items():
        added = result["added_s"].get(key)
        note = "" if added is None else f"   added {added * 1e3:+8.2f}"
        print(f"  {key:10s}{seconds * 1e3:9.2f}{note}")
    ratio = result["hvdp_added_over_ddp_added"]
    print(f"  hvdp added / DDP added: {'none measured' if ratio is None else f'{ratio:.2f}'}", flush=True)


if __name__ == "__main__":
    main()
