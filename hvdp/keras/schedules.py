"""Callbacks that set the learning rate by the epoch, or by the batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdp.basics import rank, size
from hvdp.collectives import allgather_object
from hvdp.errors import InvalidArgumentError
from hvdp.keras.state import sync
from hvdp.scaling import warmup_factor

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]

_log = logging.getLogger("hvdp")


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
        steps_per_epoch: batches in an epoch, where Keras does not know. Without `staircase` the
            largest number of all ranks counts on all, so that they step with equal rates.
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
        self._most_steps = 0

    def multiplier(self, epoch: float) -> float:
        """At an epoch, or a fraction of one."""
        return self._given(epoch) if callable(self._given) else self._given

    def on_train_begin(self, logs: Any = None) -> None:
        self._began = False
        if not self.staircase:
            self._most_steps = max(allgather_object(self.steps_per_epoch or self.params.get("steps") or 0))
        if isinstance(
            getattr(self._optimizer(), "_learning_rate", None),
            keras.optimizers.schedules.LearningRateSchedule,
        ):
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
        if not self._most_steps:
            raise InvalidArgumentError(
                f"{type(self).__name__} needs steps_per_epoch: Keras does not know the number of batches"
            )
        return int(self._most_steps)

    def _optimizer(self) -> Any:
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    def _rate(self) -> float:
        sync(self.model)
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
