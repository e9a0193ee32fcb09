"""The memory that wrapping a model adds, relative to the bytes of its gradients, beside DDP's.

    python benchmarks/memory.py -np 2 --json memory.json

Each contender gets ranks of its own from the launcher, all within one run, and trains a model
of 25 million parameters. Peaks are of the proportional set size (PSS: a page that k processes
share counts 1/k in each) of anonymous and shared memory, sampled by a thread all the time and
at every gradient; the ranks' peaks are added up. Code and files are left out, because their
share depends on what else the machine runs.

Each process trains for itself first, with nothing wrapped and gradients that stay allocated
between steps, as they do in buckets. Then gradients and whatever is free are given back, and the
contender is put in. Both figures hold the gradients themselves, so 1.00 x is their bare size:

- `added`: the peak beyond that of the plain steps without their gradients. Gradients that live in
  buckets instead make it 1.00, a second copy beside the buckets 2.00.
- `over rest`: the peak beyond the model at rest (parameters, data, libraries, no gradient). That
  also holds what any backward needs in passing: activations, the gradient that is just being
  computed, and pieces that the C library keeps free between allocations.

`none` goes on for itself, so its `added` tells how exact the method is. The batch is small, to
keep activations out of it. The first steps of a contender are measured like the others.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BOUND = 1.15  # for hvdp on the model of equal layers
STEPS = 4
CONTENDERS = ("none", "hvdp", "ddp", "ddp, views")
SAMPLE_EVERY = 0.02  # seconds


def equal(quick: bool) -> nn.Sequential:
    """24 equal layers: one gradient is a twenty-fourth of them all."""
    width = 512 if quick else 1024
    return mlp([width] * 25)


def wide(quick: bool) -> nn.Sequential:
    """Four layers, two of them with three quarters of the parameters: the worst case in passing."""
    width = 512 if quick else 3072
    return mlp([width // 3, width, width, width, width // 3])


def mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers)


MODELS = {"equal": equal, "wide": wide}


def main() -> None:
    args = parse_arguments()
    if args.contender:
        run_rank(args)
        return
    results = []
    for model in args.only or MODELS:
        ranks = {contender: start(contender, model, args) for contender in args.contenders}
        result = summary(model, ranks)
        results.append(result)
        show(result)
    if args.json:
        setting = {
            "ranks": args.np,
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "quick": args.quick,
        }
        args.json.write_text(json.dumps({"setting": setting, "results": results}, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-np", type=int, default=2, help="ranks to start (%(default)s)")
    parser.add_argument("--json", type=Path, help="file to write all results to")
    parser.add_argument("--quick", action="store_true", help="small models: does it run at all")
    parser.add_argument("--only", nargs="+", choices=MODELS, help="these models alone")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def start(contender: str, model: str, args: argparse.Namespace) -> list[dict[str, int]]:
    """What each rank of one contender has measured."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "hvdp.launch", "-np", str(args.np), sys.executable, __file__]
        command += ["--contender", contender, "--only", model, "--folder", name, "-np", str(args.np)]
        subprocess.run([*command, *(["--quick"] if args.quick else [])], check=True)
        return [json.loads((Path(name) / f"rank.{rank}").read_text()) for rank in range(args.np)]


def summary(model: str, ranks: dict[str, list[dict[str, int]]]) -> dict[str, Any]:
    first = next(iter(ranks.values()))
    gradients = sum(rank["gradients"] for rank in first)

    def over(what: str, gradients_too: bool) -> dict[str, float]:
        return {
            name: sum(rank["peak"] - rank[what] + gradients_too * rank["gradients"] for rank in found)
            / gradients
            for name, found in ranks.items()
        }

    return {
        "model": model,
        "parameters": first[0]["parameters"],
        "gradient_bytes": gradients,
        "added_over_gradients": over("plain", gradients_too=True),
        "over_rest_over_gradients": over("rest", gradients_too=False),
        "ranks": ranks,
    }


def show(result: dict[str, Any]) -> None:
    size = result["gradient_bytes"] / 2**20
    print(f"{result['model']}, {result['parameters'] / 1e6:.1f} M parameters, {size:.0f} MiB of gradients")
    for name, added in result["added_over_gradients"].items():
        bound = f"  (at most {BOUND})" if (name, result["model"]) == ("hvdp", "equal") else ""
        rest = result["over_rest_over_gradients"][name]
        print(f"  {name:10s}  added {added:5.2f} x  over rest {rest:5.2f} x{bound}", flush=True)


def run_rank(args: argparse.Namespace) -> None:
    """Train in this process, and leave what was measured in the folder."""
    rank = int(os.environ["HOROVOD_RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = MODELS[args.only[0]](args.quick)
    wrap, close = CONTENDER_OF[args.contender](rank, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    features = model[0].in_features
    inputs = torch.randn(8, features)

    def step(net: nn.Module, keep: bool) -> None:
        optimizer.zero_grad(set_to_none=not keep)
        F.mse_loss(net(inputs), inputs).backward()
        optimizer.step()

    def give_back() -> None:
        optimizer.zero_grad()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    peak = Peak()
    for parameter in (layer.weight for layer in model if isinstance(layer, nn.Linear)):
        parameter.register_post_accumulate_grad_hook(peak.sample)
    for _ in range(2):  # libraries make themselves at home
        step(model, keep=True)
    give_back()
    rest = peak.now()
    with peak:
        for _ in range(STEPS):
            step(model, keep=True)
    plain = peak.most
    give_back()
    with peak:
        net = wrap(model, optimizer)
        for _ in range(STEPS):
            step(net, keep=args.contender == "none")
    close()
    found = {
        "rest": rest,
        "plain": plain,
        "peak": peak.most,
        "gradients": sum(parameter.nbytes for parameter in model.parameters()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    (args.folder / f"rank.{rank}").write_text(json.dumps(found))


Wrap = Callable[[nn.Module, torch.optim.Optimizer], nn.Module]


def with_nothing(rank: int, args: argparse.Namespace) -> tuple[Wrap, Callable[[], None]]:
    return lambda model, optimizer: model, lambda: None


def with_hvdp(rank: int, args: argparse.Namespace) -> tuple[Wrap, Callable[[], None]]:
    import hvdp.torch as hvd

    hvd.init()

    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        return model

    return wrap, hvd.shutdown


def with_ddp(views: bool) -> Callable[[int, argparse.Namespace], tuple[Wrap, Callable[[], None]]]:
    """As it is by default, or with gradients that are views of its buckets."""

    def setup(rank: int, args: argparse.Namespace) -> tuple[Wrap, Callable[[], None]]:
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(args.folder / "store"), args.np)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=args.np)
        return (
            lambda model, _: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views),
            dist.destroy_process_group,
        )

    return setup


CONTENDER_OF = {
    "none": with_nothing,
    "hvdp": with_hvdp,
    "ddp": with_ddp(views=False),
    "ddp, views": with_ddp(views=True),
}


class Peak:
    """The most anonymous and shared memory that this process has while in the context, bytes of PSS."""

    def __init__(self) -> None:
        self.most = 0

    def __enter__(self) -> None:
        self.most = self.now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.sample()

    def now(self) -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        kibibytes = dict(line.split()[:2] for line in lines)
        return (int(kibibytes["Pss_Anon:"]) + int(kibibytes["Pss_Shmem:"])) * 1024

    def sample(self, *_: object) -> None:
        self.most = max(self.most, self.now())

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY):
            self.sample()


if __name__ == "__main__":
    main()
