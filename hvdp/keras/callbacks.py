"""Callbacks for `model.fit` on several ranks; every rank needs the same ones, in the same order.

BroadcastGlobalVariablesCallback belongs first, StopTogetherCallback last, after those that
stop training, and MetricAverageCallback before all that look at metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdp._core.arrays import Array
from hvdp._core.ops import Sum
from hvdp._numpy import collectives
from hvdp.basics import rank, size
from hvdp.collectives import allgather_object, join
from hvdp.errors import InvalidArgumentError
from hvdp.keras.hooks import link_of
from hvdp.keras.state import broadcast_global_variables
from hvdp.scaling import warmup_factor

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "StopTogetherCallback",
]

_log = logging.getLogger("hvdp")


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """All ranks start from the variables of one, the optimizer's included, and stay together.

    A rank whose data ends before the others' waits at the end of its epoch while they go on,
    averaging among themselves, and then takes over their variables. Passes that
    `backward_passes_per_step` has not made a step of by then count for none.

    Args:
        root_rank: whose variables to start from.
        device: accepted as Horovod accepts it; not needed.
        local_variables: variables that stay each rank's own.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = list(local_variables or ())

    def on_train_begin(self, logs: Any = None) -> None:
        broadcast_global_variables(self.root_rank, self.model, self._local)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        last = join()
        _sync(self.model)
        optimizer = self.model.optimizer
        link = link_of(optimizer)
        steps = 0 if optimizer is None else int(optimizer.iterations)
        if len(set(allgather_object((steps, link.windows if link else 0)))) > 1:
            broadcast_global_variables(last, self.model, self._local)
            if link:
                link.begin_anew()


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
        _sync(self.model)
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


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """The learning rate is `initial_lr * multiplier(epoch)` from one epoch to another.

    It depends on the epoch alone, so that a run resumed with `fit(initial_epoch=...)` goes on
    as an unbroken one would.

    Args:
        multiplier: a number, or a function of the epoch.
        start_epoch, end_epoch: of the first epoch, and of the first one after; None is no end.
        staircase: change it with each epoch; else with each batch, by fractions of an epoch.
        momentum_correction: where the rate changes, scale accumulated momentum by as much, for it
            contains the old rate (arXiv:1706.02677, section 3). For optimizers with `momentum`.
        steps_per_epoch: batches in an epoch, where Keras does not know.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InvalidArgumentError("initial_lr is needed. Received: None")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.staircase = staircase or not callable(multiplier)
        self._given = multiplier
        self._epoch = 0
        self._began = False

    def multiplier(self, epoch: float) -> float:
        """At an epoch, or a fraction of one."""
        return self._given(epoch) if callable(self._given) else self._given

    def on_train_begin(self, logs: Any = None) -> None:
        self._began = False
        if isinstance(getattr(self._optimizer(), "_learning_rate", None), _SCHEDULE):
            raise InvalidArgumentError(
                f"{type(self).__name__} sets the learning rate, and the optimizer has a LearningRateSchedule "
                "that does so as well: use one of them"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if not self._began and self.end_epoch is not None and epoch >= self.end_epoch:
            # Resumed after the end: what the last epoch in range has left behind.
            last = int(np.ceil(self.end_epoch)) - 1
            if last >= self.start_epoch:
                self._set(self.multiplier(last if self.staircase else self._at(last, self._steps() - 1)))
        self._began = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        within = self.start_epoch <= self._epoch and (self.end_epoch is None or self._epoch < self.end_epoch)
        if within and not (self.staircase and batch > 0):
            self._set(self.multiplier(self._epoch if self.staircase else self._at(self._epoch, batch)))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _at(self, epoch: int, batch: int) -> float:
        return epoch + batch / self._steps()

    def _steps(self) -> int:
        steps = self.steps_per_epoch or self.params.get("steps")
        if not steps:
            raise InvalidArgumentError(
                f"{type(self).__name__} needs steps_per_epoch: Keras does not know the number of batches"
            )
        return int(steps)

    def _optimizer(self) -> Any:
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    def _rate(self) -> float:
        _sync(self.model)
        return float(keras.ops.convert_to_numpy(self._optimizer().learning_rate))

    def _set(self, multiplier: float) -> None:
        old, new = self._rate(), self.initial_lr * multiplier
        if new == old:
            return
        optimizer = self._optimizer()
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0 and getattr(optimizer, "momentum", None):
            buffers = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
            for variable in buffers or ():
                if variable is not None:
                    variable.assign(keras.ops.multiply(variable, new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """The learning rate grows from `initial_lr / size()` to `initial_lr`, batch by batch.

    Args:
        initial_lr: the rate for the batch of all ranks, reached at the end.
        warmup_epochs: how many epochs it takes.
        momentum_correction, steps_per_epoch: as LearningRateScheduleCallback's.
        verbose: 1: say when it is done, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def grown(epoch: float) -> float:
            # Counted from the end of a batch: the last one of an epoch gets a round number.
            done = min(epoch + 1 / self._steps(), warmup_epochs)
            return warmup_factor(done, warmup_epochs, size())

        super().__init__(initial_lr, grown, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if (
            self.verbose
            and rank() == 0
            and self.end_epoch is not None
            and epoch + 1 == int(np.ceil(self.end_epoch))
        ):
            _log.info("epoch %d: the learning rate has grown to %g", epoch + 1, self._rate())


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
    """Where any rank wants to stop training, all stop after the same epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = any(allgather_object(bool(self.model.stop_training)))


_SCHEDULE = keras.optimizers.schedules.LearningRateSchedule


def _values(variables: Sequence[Any]) -> list[Array]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def _sync(model: Any) -> None:
    """On JAX a model's variables are behind during an epoch, and what is assigned then would be lost."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
