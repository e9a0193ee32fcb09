"""Where Keras offers no hook: three of its methods, wrapped once, that act on our optimizers alone.

- `LossScaleOptimizer.apply` and `.stateless_apply` look for infinite gradients and may skip the
  step, each rank for itself. Around one of ours (as `compile` does it for "mixed_float16"),
  gradients have to be reduced before they look, so that all ranks skip or none does.
- `Model.make_train_function` keeps a program that it traced before the optimizer became ours,
  and compiles with XLA, which cannot call back. It is also where a training step can be
  seen that moves weights past our optimizers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
from keras import ops

from hvdp._core.ops import Adasum
from hvdp.basics import rank, size
from hvdp.errors import HvdpError, InvalidArgumentError
from hvdp.keras.consistency import DriftWatch
from hvdp.keras.link import Link, key_of, known_keys, link_of

__all__ = ["attach", "install", "stateless_step"]

_log = logging.getLogger("hvdp")


def attach(optimizer: Any, link: Link) -> None:
    """Make an optimizer ours."""
    # Past Keras's own __setattr__, which would track what it finds.
    optimizer.__dict__["_hvdp"] = link


def stateless_step(
    link: Link,
    optimizer: Any,
    optimizer_variables: Sequence[Any],
    gradients: Sequence[Any],
    variables: Sequence[Any],
    apply: Callable[..., Any],
) -> Any:
    """Reduce and apply, where all state is handed in and out (JAX)."""
    with link.entered():
        known = optimizer._trainable_variables
        link.handed.update(map(key_of, known))
        if link.policy.op is Adasum:
            changed, state = apply(optimizer_variables, link.scaled(gradients, known), variables)
            return link.combined(variables, changed, known), state
        results, done = link.reduced(optimizer, gradients, known)
        if done is False:
            return variables, optimizer_variables
        changed, state = apply(optimizer_variables, results, variables)
        if done is True:
            return changed, state
        return _select(done, changed, variables), _select(done, state, optimizer_variables)


def _select(flag: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    return [ops.where(flag, n, o) for n, o in zip(new, old, strict=True)]


def install() -> None:
    """Wrap the methods, unless they are."""
    if hasattr(keras.Model.make_train_function, "__hvdp__"):
        return
    loss_scale = keras.optimizers.LossScaleOptimizer
    plain_apply, plain_stateless = loss_scale.apply, loss_scale.stateless_apply
    plain_make = keras.Model.make_train_function

    @functools.wraps(plain_apply)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        link = link_of(self)
        if link is None or link.inside:
            plain_apply(self, grads, trainable_variables)
        else:
            link.step(self, grads, trainable_variables, functools.partial(plain_apply, self))

    @functools.wraps(plain_stateless)
    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        link = link_of(self)
        plain = functools.partial(plain_stateless, self)
        if link is None or link.inside:
            return plain(optimizer_variables, grads, trainable_variables)
        return stateless_step(link, self, optimizer_variables, grads, trainable_variables, plain)

    @functools.wraps(plain_make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        optimizer = getattr(self, "optimizer", None)
        link = link_of(optimizer)
        if link is None:
            parts = {type(part).__name__: link_of(part) for part in getattr(optimizer, "optimizers", ())}
            if any(parts.values()) and not all(parts.values()):
                raise InvalidArgumentError(
                    "some parts of the optimizer step on their own rank's gradients alone: "
                    f"make it a DistributedOptimizer as a whole. Received: {' and '.join(parts)}"
                )
            return plain_make(self, force)
        if keras.backend.backend() == "tensorflow" and self.jit_compile:
            if link.process_set.rank() == 0:
                _log.info("training without XLA (jit_compile=False): it cannot exchange gradients")
            self.jit_compile = False
            force = True
        if force or getattr(self.train_function, "__hvdp__", None) is not link:
            plain_make(self, True)
            self.train_function = _checked(self, self.train_function, link)
        return self.train_function

    make_train_function.__hvdp__ = True  # type: ignore[attr-defined]
    loss_scale.apply, loss_scale.stateless_apply = apply, stateless_apply
    keras.Model.make_train_function = make_train_function


def _checked(model: Any, train: Callable[..., Any], link: Link) -> Callable[..., Any]:
    """`train`, which tells of weights that it moves and no optimizer of ours has reduced: all, or some."""
    jax, checked = keras.backend.backend() == "jax", False
    drift = DriftWatch(model, link)

    @functools.wraps(train)
    def run(*args: Any) -> Any:
        drift.before(args[0] if jax else None)
        return step(*args)

    def step(*args: Any) -> Any:
        nonlocal checked
        if checked:
            with link.overlap.step() if _is_plain(model) else nullcontext():
                return train(*args)
        before = [np.array(value) for value in _weights(model, args[0])]
        result = train(*args)
        after = _weights(model, result[-1] if jax else None)
        if len(before) == len(after):  # else the step has built the model
            known, steps = known_keys(), zip(model.trainable_variables, before, after, strict=True)
            own = (
                variable for variable, *values in steps if key_of(variable) not in known and _differ(*values)
            )
            _tell(model, next(own, None), bool(link.handed))
            checked = bool(link.handed)
        return result

    run.__hvdp__ = link  # type: ignore[attr-defined]
    return run


def _tell(model: Any, moved: Any, others_reduced: bool) -> None:
    """Of a variable that moved without a word to the other ranks, if there is one."""
    if moved is None:
        return
    if not others_reduced:
        raise HvdpError(
            "the first training step changed weights without a word to the other ranks: "
            "train_step() has to hand its gradients to the DistributedOptimizer's apply() or "
            f"apply_gradients(). Received: a step of {type(model).__name__} that does not."
        )
    if size() > 1:
        _log.warning(
            "rank %d: the training step of %s moves %s past every DistributedOptimizer: unless all ranks "
            "move it alike, they drift apart. Wrap every optimizer of the step; a variable that is each "
            "rank's own goes to register_local_var().",
            rank(),
            type(model).__name__,
            moved.path,
        )


def _differ(old: Any, new: Any) -> bool:
    return not np.array_equal(old, np.array(new))


def _is_plain(model: Any) -> bool:
    """Whether Keras's code alone, which leaves gradients as they are, is between backward and our `apply`."""
    step, optimizer = getattr(model.train_step, "__func__", None), model.optimizer
    known = "_hvdp" in vars(optimizer) or type(optimizer) is keras.optimizers.LossScaleOptimizer
    return step is keras.Model.train_step and known and not model.jit_compile


def _weights(model: Any, state: Any) -> list[Any]:
    """The trainable weights; on JAX they come first in the state that the step takes and returns."""
    if keras.backend.backend() == "jax":
        return list(state[0])
    return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]
