"""A name for a job whose launcher gives it none."""

from __future__ import annotations

import os

import psutil

__all__ = ["nearest_outside"]


def nearest_outside(variable: str) -> str:
    """Pid and creation time of the nearest ancestor that lacks the variable.

    All ranks of one host descend from the launcher's process, perhaps through shells and wrappers
    which inherited the rank variable. The first process above those that has none is common to
    all ranks, and together with its creation time it belongs to no other job.
    """
    process = psutil.Process(os.getpid())
    for ancestor in process.parents():
        try:
            inside = variable in ancestor.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            inside = False
        if not inside:
            return f"{ancestor.pid}-{ancestor.create_time():.2f}"
    return "1-0"
