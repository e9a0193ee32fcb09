"""The learning rate for an effective batch size.

With N processes that each take a batch of B samples, one optimizer step sees N * B of
them, and a rate tuned for B is in general no longer right. These are the usual rules as
pure functions of plain numbers; `batch_factor` is always

    effective batch / reference batch,

for example `size() * backward_passes_per_step` where the rate was tuned for one process
and one backward pass. A rate has the unit of the caller's optimizer and keeps it; factors
and epochs are plain numbers.

Sources:
    linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.1.
    sqrt: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural
        networks", arXiv:1404.5997, section 5; Hoffer et al. 2017, "Train longer,
        generalize better", arXiv:1705.08741, section 4; for adaptive methods such as
        Adam and RMSProp: Malladi et al. 2022, arXiv:2205.10343.
    gradual warm-up: Goyal et al. 2017, section 2.2.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal, TypeAlias

from hvdp.errors import InvalidArgumentError

__all__ = ["LrScaling", "scale_factor", "scaled_rate", "warmup_factor", "warmup_rate"]

LrScaling: TypeAlias = Literal["linear", "sqrt"]


def scale_factor(rule: LrScaling | None, batch_factor: float) -> float:
    """What to multiply a learning rate by when the batch grows by `batch_factor`.

        None      1
        "linear"  batch_factor
        "sqrt"    sqrt(batch_factor)

    "linear" suits SGD and momentum, "sqrt" adaptive methods. Both also hold for a batch
    that shrinks (a factor below 1), and both are 1 where the batch stays as it was.

    Raises:
        InvalidArgumentError: an unknown rule, or a factor that is not positive and finite.
    """
    factor = _positive("batch_factor", batch_factor)
    if rule is None:
        return 1.0
    if rule == "linear":
        return factor
    if rule == "sqrt":
        return math.sqrt(factor)
    raise InvalidArgumentError(f"lr_scaling must be None, 'linear' or 'sqrt'. Received: {rule!r}")


def scaled_rate(rate: float, rule: LrScaling | None, batch_factor: float) -> float:
    """`rate * scale_factor(rule, batch_factor)`, in the unit of `rate`.

    A rate of zero stays zero, so frozen parameter groups stay frozen.

    Raises:
        InvalidArgumentError: a rate that is negative or not finite, or as `scale_factor`.
    """
    return _not_negative("rate", rate) * scale_factor(rule, batch_factor)


def warmup_factor(progress: float, warmup_epochs: float, scale: float) -> float:
    """Gradual warm-up, as a multiplier of the *scaled* rate.

        1/scale + (1 - 1/scale) * progress / warmup_epochs    until warmup_epochs
        1                                                     from then on

    so that rate * scale * warmup_factor(...) grows in equal steps from the unscaled rate,
    known to be safe at the start, to the scaled one.

    Args:
        progress: epochs done so far; a fraction within an epoch (1.5 is half-way through
            the second). Take it per step rather than per epoch for a smooth ramp.
        warmup_epochs: length of the ramp in epochs; 0 means no warm-up. Goyal et al. use 5.
        scale: what the rate was multiplied by, from `scale_factor`. Where it is 1 or less
            there is nothing to grow into, and the factor is 1 throughout.

    Raises:
        InvalidArgumentError: a negative progress or length, a scale that is not positive,
            or any of them not finite.
    """
    done = _not_negative("progress", progress)
    length = _not_negative("warmup_epochs", warmup_epochs)
    growth = _positive("scale", scale)
    if done >= length or growth <= 1.0:
        return 1.0
    start = 1.0 / growth
    return start + (1.0 - start) * (done / length)


def warmup_rate(
    rate: float, rule: LrScaling | None, batch_factor: float, progress: float, warmup_epochs: float
) -> float:
    """The rate after `progress` epochs: from `rate` at 0 to `scaled_rate(...)` at the end of the ramp.

    Raises:
        InvalidArgumentError: as the functions that it is made of.
    """
    scale = scale_factor(rule, batch_factor)
    return scaled_rate(rate, rule, batch_factor) * warmup_factor(progress, warmup_epochs, scale)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidArgumentError(f"{name} must be a finite number. Received: {value!r}")
    return float(value)


def _positive(name: str, value: float) -> float:
    number = _number(name, value)
    if number <= 0:
        raise InvalidArgumentError(f"{name} must be greater than zero. Received: {value!r}")
    return number


def _not_negative(name: str, value: float) -> float:
    number = _number(name, value)
    if number < 0:
        raise InvalidArgumentError(f"{name} must not be negative. Received: {value!r}")
    return number
