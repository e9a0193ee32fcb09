"""Callbacks for `model.fit` on several ranks; every rank needs the same ones, in the same order.

BroadcastGlobalVariablesCallback belongs first, StopTogetherCallback last, after those that
stop training, and MetricAverageCallback before all that look at metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdp._core.arrays import Array
from hvdp._core.ops import Sum
from hvdp._numpy import collectives
from hvdp.basics import rank
from hvdp.collectives import allgather_object, join
from hvdp.keras.link import link_of
from hvdp.keras.schedules import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvdp.keras.state import broadcast_global_variables, shared_variables, sync

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "StopTogetherCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """All ranks start from the variables of one, the optimizer's included, and stay together.

    A rank whose data ends before the others' waits at the end of its epoch while they go on,
    averaging among themselves, and then takes over their variables. Passes that
    `backward_passes_per_step` has not made a step of by then count for none.

    Variables that the first batch makes, where TensorFlow builds a model as late as that, are
    the same from the end of that batch on.

    Args:
        root_rank: whose variables to start from.
        device: accepted as Horovod accepts it; not needed.
        local_variables: variables that stay each rank's own, and what the optimizer keeps about
            them; not needed for those that a PartialDistributedOptimizer knows.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = list(local_variables or ())
        self._known: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        counts = allgather_object(self._count())
        self._known = min(counts)
        if self._known == max(counts):  # else some ranks have yet to build the model that others have
            broadcast_global_variables(self.root_rank, self.model, self._local)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        known, self._known = self._known, None
        if known is not None and self._count() > known:
            sync(self.model)
            broadcast_global_variables(self.root_rank, self.model, self._local)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        _end_together(self.model, self._local)

    def _count(self) -> int:
        return len(shared_variables(self.model, self._local, optimizer=False))


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """The metrics in an epoch's logs become those of all ranks.

    Args:
        device: accepted as Horovod accepts it; not needed.
        exact: compute each metric from what all ranks have counted, as one process would have
            on all samples. Else they are averaged over the ranks, however many samples each had.
    """

    def __init__(self, device: str = "", exact: bool = False) -> None:
        super().__init__()
        self._exact = exact
        self._counted: dict[str, list[Array]] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._counted = {}

    def on_test_begin(self, logs: Any = None) -> None:
        self._note("")  # validation starts from zero, in the same variables

    def on_test_end(self, logs: Any = None) -> None:
        self._note("val_")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        own = {key: float(value) for key, value in logs.items() if np.ndim(value) == 0}
        everyone = allgather_object(own)
        for key in own:
            values = [theirs[key] for theirs in everyone if key in theirs]
            logs[key] = sum(values) / len(values)
        if self._exact:
            if not self._counted:
                self._note("")
            for prefix in sorted(self._counted):
                logs.update({f"{prefix}{key}": value for key, value in self._total(prefix).items()})

    def _note(self, prefix: str) -> None:
        sync(self.model)
        if self._exact:
            self._counted[prefix] = _values(self.model.metrics_variables)

    def _total(self, prefix: str) -> dict[str, float]:
        variables = self.model.metrics_variables
        own = _values(variables)
        wide = [np.asarray(array, np.float64) for array in self._counted[prefix]]
        for variable, total in zip(variables, collectives.grouped_allreduce(wide, op=Sum), strict=True):
            variable.assign(total.astype(keras.backend.standardize_dtype(variable.dtype)))
        result = self.model.get_metrics_result()
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)
        return {key: float(value) for key, value in result.items()}


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Rank 0 keeps the best model so far in a file.

    Args:
        monitor, verbose, mode, save_freq: as ModelCheckpoint's.
        filepath: ends in ".keras"; may be set later.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = "best.keras",
    ) -> None:
        super().__init__(filepath, monitor, verbose, save_best_only=True, mode=mode, save_freq=save_freq)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if rank() == 0:
            super().on_epoch_end(epoch, logs)


class StopTogetherCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Where any rank wants to stop training, all stop after the same epoch.

    A rank that stops within an epoch waits at its end, as BroadcastGlobalVariablesCallback
    lets it; that one has to come first where others between the two communicate.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        _end_together(self.model)
        self.model.stop_training = any(allgather_object(bool(self.model.stop_training)))


def _end_together(model: Any, local: Sequence[Any] = ()) -> None:
    """Wait for the ranks that have more batches in this epoch, and take over their variables."""
    last = join()
    sync(model)
    optimizer = model.optimizer
    link = link_of(optimizer)
    steps = 0 if optimizer is None else int(optimizer.iterations)
    if len(set(allgather_object((steps, link.windows if link else 0)))) > 1:
        broadcast_global_variables(last, model, local)
        if link:
            link.begin_anew()


def _values(variables: Sequence[Any]) -> list[Array]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
