"""Settings, and the only place that reads the environment.

Every setting may be given as `HVDP_<NAME>` or, for those Horovod has, `HOROVOD_<NAME>`;
the `HVDP_` form wins. Sizes are in bytes and times in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from hvdp.errors import InvalidArgumentError

__all__ = ["Config", "environment"]

Number = TypeVar("Number", int, float)

_MIB = 1 << 20


def environment() -> Mapping[str, str]:
    """The process environment; every other module is handed this mapping."""
    return os.environ


@dataclass(frozen=True)
class Config:
    """One process's settings.

    Attributes:
        cpu_operations: transport between CPU buffers: "auto", "shm" or "mpi".
        fusion_threshold: cap of one gradient bucket, bytes.
        cache_capacity: how many operations are remembered by a short id.
        start_timeout: how long `init()` waits for the other ranks, seconds.
        stall_warning, stall_shutdown: after how long a tensor that some ranks do not submit is
            warned of, and ends the job, seconds; 0 is never.
        check_every: after how many steps an optimizer compares its parameters between ranks; 0 is never.
        timeline: where rank 0 writes a timeline from the start; "" is nowhere.
        timeline_mark_cycles: also mark rank 0's rounds in it.
        log_level: name of a `logging` level.
    """

    cpu_operations: str = "auto"
    fusion_threshold: int = 8 * _MIB
    cache_capacity: int = 4096
    start_timeout: float = 60.0
    stall_warning: float = 60.0
    stall_shutdown: float = 0.0
    check_every: int = 0
    timeline: str = ""
    timeline_mark_cycles: bool = False
    log_level: str = "INFO"

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """Read the settings.

        Raises:
            InvalidArgumentError: a variable holds a value that cannot be meant.
        """
        read = _Reader(environment() if env is None else env)
        return cls(
            cpu_operations=read.choice("CPU_OPERATIONS", cls.cpu_operations, ("auto", "shm", "mpi")),
            fusion_threshold=read.number("FUSION_THRESHOLD", cls.fusion_threshold, int, least=1),
            cache_capacity=read.number("CACHE_CAPACITY", cls.cache_capacity, int, least=0),
            start_timeout=read.number("START_TIMEOUT", cls.start_timeout, float, least=0),
            stall_warning=0.0
            if read.flag("STALL_CHECK_DISABLE")
            else read.number("STALL_CHECK_TIME_SECONDS", cls.stall_warning, float, least=0),
            stall_shutdown=read.number("STALL_SHUTDOWN_TIME_SECONDS", cls.stall_shutdown, float, least=0),
            check_every=read.number("CHECK_EVERY", cls.check_every, int, least=0),
            timeline=read.text("TIMELINE"),
            timeline_mark_cycles=read.flag("TIMELINE_MARK_CYCLES"),
            log_level=read.choice(
                "LOG_LEVEL",
                cls.log_level,
                ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"),
            ),
        )


class _Reader:
    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def _find(self, name: str) -> tuple[str, str] | None:
        for key in (f"HVDP_{name}", f"HOROVOD_{name}"):
            value = self._env.get(key, "").strip()
            if value:
                return key, value
        return None

    def text(self, name: str) -> str:
        found = self._find(name)
        return found[1] if found else ""

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        found = self._find(name)
        if found is None:
            return default
        key, value = found
        for candidate in allowed:
            if value.lower() == candidate.lower():
                return candidate
        raise InvalidArgumentError(f"{key} must be one of {', '.join(allowed)}. Received: {value!r}")

    def flag(self, name: str) -> bool:
        return self.choice(name, "0", ("0", "1", "false", "true", "no", "yes")) in ("1", "true", "yes")

    def number(self, name: str, default: Number, parse: Callable[[str], Number], least: float) -> Number:
        found = self._find(name)
        if found is None:
            return default
        key, text = found
        try:
            value = parse(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            raise InvalidArgumentError(f"{key} must be a number of at least {least:g}. Received: {text!r}")
        return value
