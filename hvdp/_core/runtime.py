"""The process's one engine, and everything that lives as long as it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from itertools import count
from typing import Protocol
from weakref import WeakSet

from hvdp._core.engine import Engine
from hvdp.errors import NotInitializedError

__all__ = ["Joins", "Runtime", "runtime"]


class Joins(Protocol):
    """Has something to do when all ranks have joined."""

    def joined(self) -> None:
        """On every rank, before `join` returns; not collective."""


class Runtime:
    """Holds the engine between `init` and `shutdown`.

    Attributes:
        engine: None outside.
        starts: how many times `init` has met the other ranks; tells two starts apart.
        joins: how many times all ranks have joined since.
        joining: those to tell when they have.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.starts = 0
        self.joins = 0
        self.joining: WeakSet[Joins] = WeakSet()
        self._serials: dict[str, count[int]] = {}
        self._started_before = False

    def require(self, call: str) -> Engine:
        """The engine, for the public function named `call`.

        Raises:
            NotInitializedError: `init` has not been called, or `shutdown` since.
        """
        if self.engine is None:
            raise NotInitializedError(call)
        return self.engine

    def start(self, engine: Engine, at_exit: Callable[[], None]) -> None:
        self.engine = engine
        self._serials.clear()
        if not self._started_before:
            self._started_before = True
            os.register_at_fork(after_in_child=self._forget)
            atexit.register(at_exit)

    def stop(self, reason: str) -> None:
        """Leave the job, telling peers that still wait for us `reason`; nothing if not in one."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close(reason)

    def joined(self) -> None:
        """All ranks have joined."""
        self.joins += 1
        for each in list(self.joining):
            each.joined()

    def serial(self, what: str) -> int:
        """0, 1, 2, ... for each kind of thing that all ranks make in the same order."""
        return next(self._serials.setdefault(what, count()))

    def _forget(self) -> None:
        """A forked child is no rank: it must not hold the links, whose end tells of a death."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.abandon()


runtime = Runtime()
