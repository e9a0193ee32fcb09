"""How many cores this job may use, and each rank's share of them."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

__all__ = ["share", "usable_cores"]


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may run on: its affinity, or its control groups' quota where that is less."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota(cgroups)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def share(cores: int, ranks: int) -> int:
    """Threads for each of `ranks` processes on this host."""
    return max(1, cores // ranks)


def _quota(cgroups: Path) -> float | None:
    """The tightest CPU quota on the way up from our control group, in cores."""
    quotas = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, inner = line.split(":", 2)
            root = cgroups / "cpu" if "cpu" in controllers.split(",") else cgroups
            folder = root / inner.lstrip("/")
            for place in (folder, *folder.parents):
                if not place.is_relative_to(root):
                    break
                quotas += [quota for quota in (_v2(place), _v1(place)) if quota is not None]
    return min(quotas, default=None)


def _v2(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        limit, period = (folder / "cpu.max").read_text().split()
        return int(limit) / int(period)
    return None


def _v1(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return limit / int((folder / "cpu.cfs_period_us").read_text()) if limit > 0 else None
    return None
