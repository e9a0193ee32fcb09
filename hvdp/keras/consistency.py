"""Variables that are no longer, or never were, equal on all ranks."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from keras import ops

from hvdp._core.config import Config
from hvdp._core.ops import Adasum
from hvdp._core.runtime import runtime
from hvdp.consistency import Entry, digest, find_drift, require_same
from hvdp.keras.link import Link, is_replaced, key_of, path_of
from hvdp.keras.state import shared_variables, sync
from hvdp.process_sets import ProcessSet, global_process_set

__all__ = ["DriftWatch", "check_consistency"]

_log = logging.getLogger("hvdp")


def check_consistency(model: Any, process_set: ProcessSet = global_process_set) -> None:
    """Raise if what a model trains, or its optimizer's state, differs between ranks by a bit; collective.

    Every variable is hashed, and 8 bytes for each are exchanged. Left out are a rank's own variables, and
    what is not trained: running statistics differ by nature. So does the state of an optimizer with
    op=hvd.Adasum.

    Raises:
        MismatchError: on every rank, naming the first that differs and the ranks.
    """
    sync(model)
    require_same("check_consistency", _entries(model), process_set.number())


class DriftWatch:
    """Looks at a model's variables, and its optimizer's, before its first step, and after every so many.

    The latter before the step that follows: a rank without data for that has joined, and is not waited for.

    Args:
        link: of the optimizer.
    """

    def __init__(self, model: Any, link: Link) -> None:
        self._model = model
        self._link = link
        self._every = Config.from_env().check_every if link.policy.op is not Adasum else 0
        self._joins = link.joins
        self._compared = link.process_set.size() == 1
        self._windows = link.windows
        # Since the last join: the ranks made different numbers of steps before.
        self._steps = 0

    def before(self, state: Any) -> None:
        """Before each step.

        Args:
            state: on JAX what the step takes: all variables' values.

        Raises:
            MismatchError: variables differ after so many steps; at the first step one rank warns, and all go
                on, as somebody may want just that.
        """
        if self._joins != runtime.joins:
            self._joins, self._windows, self._steps = runtime.joins, self._link.windows, 0
            self._compared = True  # by those who had data then
        elif not self._compared:
            self._compare_starts(state)
        elif self._every:
            self._count(state)

    def _compare_starts(self, state: Any) -> None:
        drift = find_drift(
            "keras.consistency.start", _entries(self._model, state), self._link.process_set.number()
        )
        # Else the model is built later, on some ranks or all.
        self._compared = bool(self._model.trainable_variables) if drift is None else not drift.missing
        if drift is not None and self._compared and self._link.process_set.rank() == 0:
            _log.warning(
                "at the first step %s: give fit() hvd.callbacks.BroadcastGlobalVariablesCallback(0), or call "
                "hvd.broadcast_global_variables(0, model) before training, or the ranks train apart",
                drift,
            )

    def _count(self, state: Any) -> None:
        for value in state[0][:1] if state is not None else ():
            np.asarray(value)  # which JAX's last step has made when it can be read
        earlier, self._steps = self._steps, self._steps + self._link.windows - self._windows
        self._windows = self._link.windows
        if self._steps // self._every > earlier // self._every:
            number = self._link.process_set.number()
            require_same("keras.consistency.every", _entries(self._model, state), number, self._steps)


def _entries(model: Any, state: Any = None) -> list[Entry]:
    variables = list(model.trainable_variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += optimizer.variables
    values = variables
    if state is not None:
        trainable, _, kept, *_ = state
        values = [*trainable, *kept]
    shared = set(map(key_of, shared_variables(model, statistics=False)))
    return [
        Entry(f"variable {path_of(variable)!r}", _digest(value), f"variable {number} {tuple(variable.shape)}")
        for number, (variable, value) in enumerate(zip(variables, values, strict=True))
        if key_of(variable) in shared and not is_replaced(variable)
    ]


def _digest(value: Any) -> int:
    array = np.ascontiguousarray(ops.convert_to_numpy(value))
    return digest(array.reshape(-1).view(np.uint8))
