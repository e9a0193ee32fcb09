"""DistributedOptimizer for any `torch.optim` optimizer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvdp._core.arrays import Array
from hvdp._core.buckets import ParameterSpec
from hvdp._core.config import Config
from hvdp._core.ops import Average, ReduceOp
from hvdp._core.runtime import runtime
from hvdp.errors import InvalidArgumentError
from hvdp.optimizer import GradientReducer
from hvdp.scaling import LrScaling, scale_factor
from hvdp.torch._arrays import as_tensor, dtype_name

__all__ = ["DistributedOptimizer"]

_log = logging.getLogger(__name__)
_LR_FACTOR = "hvdp_lr_factor"
"""In every scaled parameter group, and so in checkpoints: what its rate was multiplied by."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    backward_passes_per_step: int = 1,
    op: int = Average,
    lr_scaling: LrScaling | None = None,
) -> torch.optim.Optimizer:
    """Make an optimizer step on the gradients of all ranks; collective.

    The optimizer itself is changed and returned: it stays an instance of its class, and
    schedulers that hold it stay valid. Gradients are averaged when the last `backward()`
    of a step's `backward_passes_per_step` returns, so clipping and logging need no
    further call.

    Args:
        named_parameters: `model.named_parameters()`, for messages; must name every parameter.
        backward_passes_per_step: `backward()` calls that accumulate before each `step()`.
        op: Average or Sum.
        lr_scaling: multiply the learning rate once, for the batch that all ranks and
            passes form together: "linear", "sqrt" or not at all. Checkpoints remember it.

    Raises:
        MismatchError: the ranks hold different parameters; names the first of them.
        InvalidArgumentError: an argument is wrong on any rank; on every rank.
    """
    runtime.require("DistributedOptimizer")
    parameters, specs, fault = _described(optimizer, named_parameters)
    if isinstance(optimizer, _Distributed):
        fault = "the optimizer is a DistributedOptimizer already"
    if backward_passes_per_step < 1:
        fault = f"backward_passes_per_step must be at least 1. Received: {backward_passes_per_step}"
    reducer = GradientReducer(
        _Gradients(parameters),
        specs,
        ReduceOp.check(op),
        backward_passes_per_step,
        Config.from_env().fusion_threshold,
        fault,
    )
    base = type(optimizer)
    optimizer.__class__ = type(f"Distributed{base.__name__}", (_Distributed, base), {})
    assert isinstance(optimizer, _Distributed)
    optimizer._attach(reducer, parameters)
    if lr_scaling is not None:
        optimizer._scale_rates(lr_scaling)
    return optimizer


class _Gradients:
    """Moves gradients between parameters and buckets; on the CPU they live in the buckets."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters
        self._places: list[torch.Tensor] = [torch.empty(0)] * len(parameters)

    def bind(self, index: int, memory: Array) -> None:
        parameter = self._parameters[index]
        flat = as_tensor(memory)
        strides = _dense_strides(parameter)
        self._places[index] = flat.as_strided(parameter.shape, strides, flat.storage_offset())

    def collect(self, index: int) -> bool:
        parameter, place = self._parameters[index], self._places[index]
        gradient = parameter.grad
        if gradient is place:
            return True
        with torch.no_grad():
            if gradient is None:
                place.zero_()
                return False
            place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if parameter.device == place.device:
            parameter.grad = place
        return True

    def deliver(self, index: int) -> None:
        parameter, place = self._parameters[index], self._places[index]
        if parameter.device == place.device:
            parameter.grad = place
        elif parameter.grad is None:
            parameter.grad = place.to(parameter.device)
        else:
            with torch.no_grad():
                parameter.grad.copy_(place)


class _PassWatch:
    """Tells the reducer of ready gradients and of the end of each backward pass."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._pass = -1

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            # By its id, not by a flag: a backward that raised never reports its end.
            current = torch._C._current_graph_task_id()
            if current != self._pass:
                self._pass = current
                torch.autograd.Variable._execution_engine.queue_callback(self._reducer.end_pass)
            self._reducer.ready(index)

        return ready


class _Distributed(torch.optim.Optimizer):
    """What DistributedOptimizer adds to the optimizer's own class."""

    _reducer: GradientReducer

    def _attach(self, reducer: GradientReducer, parameters: list[torch.Tensor]) -> None:
        self._reducer = reducer
        self._watch(parameters)
        self.register_step_pre_hook(_before_step)
        self.register_step_post_hook(_after_step)

    def _watch(self, parameters: list[torch.Tensor]) -> None:
        watch = _PassWatch(self._reducer)
        hooks = [_hook(parameter, watch.hook(i)) for i, parameter in enumerate(parameters)]
        # The parameters outlive the optimizer: without it nothing must be reduced any more.
        self._detach = weakref.finalize(self, _remove, hooks)
        self._detach.atexit = False

    def synchronize(self) -> None:
        """Reduce what no backward pass has reduced yet; Horovod scripts call it before clipping."""
        self._reducer.before_step()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Around a `step()` after `synchronize()`, as Horovod scripts write it; costs nothing."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next window on; the same on all ranks."""
        if passes < 1:
            raise InvalidArgumentError(f"backward_passes_per_step must be at least 1. Received: {passes}")
        self._reducer.passes_per_step = passes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own, on all ranks; the new parameters are reduced like the others."""
        super().add_param_group(param_group)
        if hasattr(self, "_reducer"):
            self._detach()
            parameters, specs, fault = _described(self, None)
            self._reducer.replace(_Gradients(parameters), specs, fault)
            self._watch(parameters)

    def __reduce__(self) -> Any:
        """Copies and pickles are plain optimizers of the original class."""
        base = type(self).__mro__[2]
        return base.__new__, (base,), self.__getstate__()

    def _scale_rates(self, rule: LrScaling) -> None:
        factor = scale_factor(rule, runtime.require("size").topology.size * self._reducer.passes_per_step)

        def scale(optimizer: torch.optim.Optimizer) -> None:
            old = [float(group["lr"]) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                change = factor / group.get(_LR_FACTOR, 1.0)
                group[_LR_FACTOR] = factor
                if change != 1.0:
                    for key in ("lr", "initial_lr"):
                        if key in group:
                            group[key] = group[key] * change
            new = [float(group["lr"]) for group in optimizer.param_groups]
            if new != old and runtime.require("rank").topology.rank == 0:
                _log.info(
                    "learning rate %s -> %s: %s scaling for an effective batch of %g times one rank's",
                    _few(old),
                    _few(new),
                    rule,
                    factor,
                )

        scale(self)
        self.register_load_state_dict_post_hook(scale)


def _few(rates: list[float]) -> str:
    distinct = list(dict.fromkeys(f"{rate:g}" for rate in rates))
    return ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    has_closure = len(args) > 1 or kwargs.get("closure") is not None
    if not has_closure:
        optimizer._reducer.before_step()


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer._reducer.after_step()


def _hook(parameter: torch.Tensor, ready: Callable[[torch.Tensor], None]) -> Any:
    """Register also on a parameter that is frozen now and may be unfrozen later."""
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
    if frozen:
        parameter.requires_grad_(False)
    return handle


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _described(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> tuple[list[torch.Tensor], list[ParameterSpec], str]:
    """The optimizer's parameters, what is to be equal about them, and what is wrong here."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names: dict[torch.Tensor, str] = {}
    fault = ""
    if named_parameters is None:
        names = {parameter: f"parameter.{i}" for i, parameter in enumerate(parameters)}
    else:
        taken = set()
        for name, parameter in named_parameters:
            if name in taken:
                fault = f"named_parameters gives the name {name!r} twice"
            taken.add(name)
            names.setdefault(parameter, name)
        unnamed = [tuple(parameter.shape) for parameter in parameters if parameter not in names]
        if unnamed:
            fault = (
                f"named_parameters lacks {len(unnamed)} parameters of the optimizer, of shapes {unnamed[:3]}"
            )
    specs = [
        ParameterSpec(
            names.get(parameter, "unnamed"),
            tuple(parameter.shape),
            dtype_name(parameter.dtype),
            parameter.element_size(),
            () if parameter.is_contiguous() else _dense_strides(parameter),
        )
        for parameter in parameters
    ]
    return parameters, specs, fault


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides where they cover its memory without holes, else contiguous ones."""
    expected = 1
    for stride, length in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if length > 1 and stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= length
    return parameter.stride()
