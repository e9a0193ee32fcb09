"""Elements per second of 16-bit floats beside float32, in one run: NumPy alone, or torch tensors.

horovodrun -np 2 python benchmarks/narrow.py
horovodrun -np 2 python benchmarks/narrow.py --torch
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

ITEMS = (1 << 20, 1 << 22)
REPETITIONS = 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", action="store_true", help="torch tensors, by torch's casts")
    parser.add_argument("--quick", action="store_true", help="small and few: does it run at all")
    args = parser.parse_args()
    hvd, make = of_torch() if args.torch else of_numpy()
    hvd.init()
    for items in (1 << 16,) if args.quick else ITEMS:
        values = np.random.default_rng(0).standard_normal(items, np.float32)
        times = measure(hvd, make(values), make(values), 3 if args.quick else REPETITIONS)
        if hvd.rank() == 0:
            print(row(items, times), flush=True)
    hvd.shutdown()


def of_numpy() -> Any:
    import hvdp as hvd

    dtypes = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    return hvd, lambda values: {name: values.astype(dtype) for name, dtype in dtypes.items()}


def of_torch() -> Any:
    import torch

    import hvdp.torch as hvd

    names = ("float32", "float16", "bfloat16")
    return hvd, lambda values: {name: torch.tensor(values, dtype=getattr(torch, name)) for name in names}


def measure(
    hvd: Any, given: dict[str, Any], data: dict[str, Any], repetitions: int
) -> dict[str, list[float]]:
    """Seconds of the second of two sums in place, by dtype; the dtypes take turns."""
    times: dict[str, list[float]] = {name: [] for name in data}
    for repetition in range(repetitions):
        first = repetition % len(data)
        names = [*data][first:] + [*data][:first]
        for name in names:
            data[name][...] = given[name]
            for _ in range(2):
                hvd.barrier()
                began = time.perf_counter()
                hvd.allreduce_(data[name], op=hvd.Sum, name=f"{name}.{len(data[name])}")
                taken = time.perf_counter() - began
            wanted, found = hvd.size() ** 2 * float(given[name][0]), float(data[name][0])
            if abs(found - wanted) > abs(wanted) / 64:
                raise SystemExit(f"{name} was summed wrongly: {found} instead of {wanted}")
            times[name].append(taken)
    return times


def row(items: int, times: dict[str, list[float]]) -> str:
    cells = [f"{items:8d} items"]
    for name, seconds in times.items():
        ratio = median(a / b for a, b in zip(times["float32"], seconds, strict=True))
        cells.append(f"{name} {median(seconds) * 1e3:.2f} ms [{ratio:.2f} of float32's elements/s]")
    return "  ".join(cells)


if __name__ == "__main__":
    main()
