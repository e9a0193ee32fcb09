"""Time of one allreduce of float32, hvdp beside its peers, in one run.

python benchmarks/allreduce.py -np 2 --json allreduce.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

from _harness import World, has_horovod, paired_ratio, parse_arguments

KIB, MIB = 1 << 10, 1 << 20
REPETITIONS = {1 * KIB: 100, 64 * KIB: 100, 1 * MIB: 50, 4 * MIB: 40, 16 * MIB: 20, 64 * MIB: 15}
QUICK = {1 * KIB: 5, 1 * MIB: 5}
BURST = 4
"""Calls in a row of one contender: as many as a small model has buckets."""
WARM_UP = 3


def main() -> None:
    args = parse_arguments(__doc__)
    world = World()
    contenders = {
        name: call for name, call in all_contenders(world).items() if not args.only or name in args.only
    }
    results = []
    if world.rank == 0:
        print(f"median ms of {world.size} ranks, {world.threads} threads each; in brackets peer / hvdp")
        print("bytes".rjust(10), *(name.rjust(20) for name in contenders))
    for size, repetitions in (QUICK if args.quick else REPETITIONS).items():
        times = measure(world, contenders, size, repetitions)
        ours = times.get("hvdp")
        result = {
            "bytes": size,
            "repetitions": repetitions,
            "burst": BURST,
            "median_s": {name: median(taken) for name, taken in times.items()},
            "peer_over_hvdp": {name: paired_ratio(taken, ours) for name, taken in times.items() if ours},
        }
        results.append(result)
        if world.rank == 0:
            print(row(result), flush=True)
    world.report(args, results)
    world.close()


def all_contenders(world: World) -> dict[str, Callable]:
    """Each sums one tensor over the ranks, in place."""
    import torch.distributed as dist
    from mpi4py import MPI

    import hvdp.torch as hvd

    contenders = {
        "hvdp": lambda tensor: hvd.allreduce_(tensor, name=f"bench.{tensor.numel()}", op=hvd.Sum),
        "gloo": dist.all_reduce,
        "mpi": lambda tensor: world.mpi.Allreduce(MPI.IN_PLACE, tensor.numpy()),
    }
    if has_horovod():
        import horovod.torch as horovod

        contenders["horovod"] = lambda tensor: horovod.allreduce_(
            tensor, name=f"bench.{tensor.numel()}", op=horovod.Sum
        )
    return contenders


def measure(
    world: World, contenders: dict[str, Callable], size: int, repetitions: int
) -> dict[str, list[float]]:
    """Seconds per contender and repetition; every result is checked during the warm-up."""
    import torch

    tensor = torch.empty(size // 4)
    refill = partial(tensor.fill_, world.rank + 1.0)
    expected = world.size * (world.size + 1) / 2
    for name, call in contenders.items():
        for _ in range(WARM_UP):
            refill()
            call(tensor)
            if not bool((tensor == expected).all()):
                raise SystemExit(f"{name} summed {size} bytes wrongly: {tensor[0]} instead of {expected}")
    return world.paired(
        {name: partial(call, tensor) for name, call in contenders.items()}, repetitions, refill, BURST
    )


def row(result: dict) -> str:
    cells = [f"{result['bytes']:10d}"]
    for name, seconds in result["median_s"].items():
        ratio = result["peer_over_hvdp"].get(name)
        note = "" if name == "hvdp" or ratio is None else f"  [{ratio:5.2f}]"
        cells.append(f"{seconds * 1e3:.3f}{note}".rjust(20))
    return " ".join(cells)


if __name__ == "__main__":
    main()
