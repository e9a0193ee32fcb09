"""What communication adds to a training step: hvdp beside its peers, in one run.

    python benchmarks/train_step.py -np 2 --json train_step.json

Each contender trains its own copy of the model on the same data. The steps of all contenders
alternate; `added` is the median difference to the step without communication. A step varies by
more than what is added to it, so there are many, and the ratio comes with the range in which it
lies in 95 % of the draws of as many of these steps (the percentile bootstrap: Efron 1979).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from _harness import World, has_horovod, parse_arguments
from torch import Tensor, nn
from torch.nn import functional as F

import hvdp.torch as hvd

WARM_UP_STEPS = 3
DRAWS = 2000


class Case(NamedTuple):
    """A model and how much of it to run."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    steps: int


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

    return Case(Classifier(), torch.randint(vocabulary, (8, 64)), torch.randint(10, (8,)), 100)


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
    return Case(model, torch.randn(128, 1024), torch.randint(1024, (128,)), 100)


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
    return Case(model, torch.randn(48, 3, 32, 32), torch.randint(10, (48,)), 100)


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
    """One training step."""

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(case.inputs), case.labels).backward()
        optimizer.step()

    return step


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
            case = case._replace(steps=3)
        hvd.broadcast_parameters(case.model.state_dict(), root_rank=0)
        contenders = {}
        for contender, build in builders.items():
            contenders[contender] = build(copy.deepcopy(case.model), case, name)
            for _ in range(WARM_UP_STEPS):
                contenders[contender]()
        result = summary(name, case, world.paired(contenders, case.steps))
        results.append(result)
        if world.rank == 0:
            show(result)
    world.report(args, results)
    world.close()


def summary(name: str, case: Case, taken: dict[str, list[float]]) -> dict:
    """Seconds of a step, and seconds added to the step without communication that is its pair."""
    steps = {key: np.array(times) for key, times in taken.items()}
    differences = {key: times - steps["none"] for key, times in steps.items() if key != "none"}
    added = {key: float(np.median(taken)) for key, taken in differences.items()}
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in case.model.parameters()),
        "steps": case.steps,
        "step_s": {key: float(np.median(times)) for key, times in steps.items()},
        "added_s": added,
        "hvdp_added_over_ddp_added": added["hvdp"] / added["ddp"] if added["ddp"] > 0 else None,
        "range_95": ratio_range(differences["hvdp"], differences["ddp"]),
    }


def ratio_range(ours: np.ndarray, peer: np.ndarray) -> list[float] | None:
    """Where 95 % of the ratios of medians lie, or None where the peer's is not surely above 0."""
    drawn = np.random.default_rng(0).integers(len(ours), size=(DRAWS, len(ours)))
    medians = [np.median(taken[drawn], axis=1) for taken in (ours, peer)]
    if np.percentile(medians[1], 2.5) <= 0:
        return None
    return [float(bound) for bound in np.percentile(medians[0] / medians[1], [2.5, 97.5])]


def show(result: dict) -> None:
    print(f"{result['model']}, {result['parameters'] / 1e6:.1f} M parameters, ms a step")
    for key, seconds in result["step_s"].items():
        added = result["added_s"].get(key)
        note = "" if added is None else f"   added {added * 1e3:+8.2f}"
        print(f"  {key:10s}{seconds * 1e3:9.2f}{note}")
    ratio, bounds = result["hvdp_added_over_ddp_added"], result["range_95"]
    text = "none measured" if ratio is None else f"{ratio:.2f}"
    text += f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else " (too noisy to tell)"
    print(f"  hvdp added / DDP added: {text}", flush=True)


if __name__ == "__main__":
    main()
