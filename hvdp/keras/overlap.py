"""Reducing gradients while backward still computes others, on backends where backward can be watched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hvdp.gradients import ArrayReducer
from hvdp.keras._backend import backend

__all__ = ["Overlap"]

ToSend = Callable[[Any, Any], tuple[Any, Any]]


class _HandedOver(NamedTuple):
    """A gradient as backward left it, of which version, and as it travels."""

    gradient: Any
    version: int
    sent: Any
    context: Any


class Overlap:
    """Of one optimizer's reduction with backward.

    A gradient that changes between backward and `apply`, by a hook or a second backward, is
    found out there: the reduction then begins anew, and the overlap ends for good.

    Args:
        to_send: makes what travels, and its context, of a gradient and its variable.
        possible: False lets nothing be handed over.
    """

    def __init__(self, to_send: ToSend, possible: bool) -> None:
        self._to_send = to_send
        self._possible = possible
        self._on = False
        self._failed = False
        self._early: dict[int, _HandedOver] = {}
        self._reducer: ArrayReducer | None = None

    def watch(self, reducer: ArrayReducer, variables: Sequence[Any]) -> None:
        """Learn of these variables' gradients, which go to the reducer under their places here."""
        watch = backend().watch
        if watch is None:
            return
        self._reducer = reducer
        this = weakref.ref(self)  # the variables outlive it

        def hand_over(place: int, gradient: Any) -> Any:
            overlap = this()
            return overlap._take(place, gradient, variables[place]) if overlap and overlap._on else None

        weakref.finalize(self, watch(reducer, variables, hand_over)).atexit = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step that does nothing to gradients between backward and `apply`."""
        self._on = self._possible
        try:
            yield
        finally:
            self._on = False
            self._failed |= bool(self._early)
            self._early.clear()

    def handed_over(self, gradients: Mapping[int, Any]) -> dict[int, tuple[Any, Any]]:
        """What travels already of the gradients that come to `apply`; nothing if any has changed."""
        early, self._early = self._early, {}
        known = {place: early[place] for place in gradients if place in early}
        changed = any(
            gradients[place] is not handed.gradient or gradients[place]._version != handed.version
            for place, handed in known.items()
        )
        if changed:
            self._possible = False  # as they will be again
        if changed or self._failed:
            self._begin_anew()
            return {}
        return {place: (handed.sent, handed.context) for place, handed in known.items()}

    def _take(self, place: int, gradient: Any, variable: Any) -> Any:
        """What travels, or None where backward has come to the variable a second time."""
        if self._failed:
            self._begin_anew()
        if place in self._early:
            self._early[place] = self._early[place]._replace(version=-1)
            return None
        handed = _HandedOver(gradient, gradient._version, *self._to_send(gradient, variable))
        self._early[place] = handed
        return handed.sent

    def _begin_anew(self) -> None:
        assert self._reducer is not None
        self._failed = False
        self._reducer.drop()
