"""Keras's backends: a launch for each, in which many cases run, as starting a framework takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvdp.testing import run_ranks

SMALL_BUCKETS = {"HVDP_FUSION_THRESHOLD": "64"}


def on_every_backend(test: Callable[..., None]) -> Callable[..., None]:
    """At 2 and at 3 ranks."""
    for mark in (
        pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"]),
        pytest.mark.parametrize("size", [2, 3]),
        pytest.mark.timeout(240),
    ):
        test = mark(test)
    return test


def run(backend: str, size: int, cases: Callable[..., Any], *args: Any, **variables: str) -> None:
    """Skips where the backend is not installed."""
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "KERAS_BACKEND": backend}
    run_ranks(cases, size, *args, env={**quiet, **variables}, timeout=200)
