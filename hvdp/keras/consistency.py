"""Variables that are no longer, or never were, equal on all ranks."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np

from hvdp._core.config import Config
from hvdp._core.ops import Adasum
from hvdp._core.runtime import runtime
from hvdp.consistency import Entry, digest, find_drift, require_same
from hvdp.keras.link import Link, key_of, label_of
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
    """Looks at a model's variables, and its optimizer's, before its first step, and every so many steps.

    Args:
        link: of the optimizer.
    """

    def __init__(self, model: Any, link: Link) -> None:
        self._model = model
        self._link = link
        self._every = Config.from_env().check_every if link.policy.op is not Adasum else 0
        self._joins = runtime.joins
        self._compared = link.process_set.size() == 1
        # As counted since the last join: the ranks made different numbers of steps before.
        self._windows = 0

    def before(self, state: Any) -> None:
        """A rank warns if the ranks start apart; they go on, as somebody may want just that.

        Args:
            state: on JAX what the step takes: all variables' values.
        """
        if self._joins != runtime.joins:
            self._compared = True  # by those who had data then
        if self._compared:
            return
        entries = _entries(self._model, state)
        drift = find_drift("keras.consistency.start", entries, self._link.process_set.number())
        if drift is None or drift.missing:
            # Else the model is built later, on some ranks or all.
            self._compared = drift is None and bool(self._model.trainable_variables)
            return
        self._compared = True
        if self._link.process_set.rank() == 0:
            _log.warning(
                "at the first step %s: give fit() hvd.callbacks.BroadcastGlobalVariablesCallback(0), or call "
                "hvd.broadcast_global_variables(0, model) before training, or the ranks train apart",
                drift,
            )

    def after(self, state: Any) -> None:
        """Compare after every so many steps.

        Args:
            state: as for `before`, from what the step returns.
        """
        if not self._every:
            return
        if state is not None:
            np.asarray(state[0][0])  # JAX is done when a result can be read
        windows, earlier = self._link.windows, self._windows
        self._windows = windows
        if windows // self._every > (earlier // self._every if windows >= earlier else 0):
            entries = _entries(self._model, state)
            require_same("keras.consistency.every", entries, self._link.process_set.number(), windows)


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
        Entry(f"variable {label_of(variable)!r}", _digest(value))
        for variable, value in zip(variables, values, strict=True)
        if key_of(variable) in shared
    ]


def _digest(value: Any) -> int:
    array = np.ascontiguousarray(keras.ops.convert_to_numpy(value))
    return digest(array.reshape(-1).view(np.uint8))
