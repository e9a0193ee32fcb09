"""Keras's PyTorch backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdp._core.arrays import Array
from hvdp.gradients import ArrayReducer, Rows
from hvdp.torch._arrays import as_array, as_tensor
from hvdp.torch.passes import hook_on, remove

__all__ = ["call", "densified", "is_sparse", "reduce", "untraced", "watch", "when"]


def is_sparse(gradient: Any) -> bool:
    """Whether it is zero but for some rows."""
    return bool(gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1)


def densified(gradient: Any) -> Any:
    """A dense tensor of it."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def watch(
    reducer: ArrayReducer, variables: Sequence[Any], hand_over: Callable[[int, Any], Any]
) -> Callable[[], None]:
    """Give the reducer what `hand_over` makes of a gradient that backward is done with."""

    def watched(place: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            # A hook of the user's own may have taken it.
            sent = None if parameter.grad is None else hand_over(place, parameter.grad)
            if sent is not None:
                reducer.give({place: _array(sent)})

        return ready

    # Not `value`, which within a StatelessScope is another tensor.
    hooks = [hook_on(variable._value, watched(place)) for place, variable in enumerate(variables)]
    return lambda: remove(hooks)


def reduce(reducer: ArrayReducer, gradients: Sequence[Any]) -> tuple[list[Any] | None, bool]:
    """The reduced gradients after a window's last pass: views, for the step under way only."""
    own = [i for i, gradient in enumerate(gradients) if gradient is not None]
    reducer.prepare(own, {i for i in own if is_sparse(gradients[i])})
    reducer.give({index: _array(gradients[index]) for index in reversed(own) if index not in reducer.given})
    results = reducer.finish()
    if results is None:
        return None, False
    found: list[Any] = [None] * len(gradients)
    for index, result in results.items():
        if isinstance(result, Rows):
            indices, values = as_tensor(result.indices)[None], as_tensor(result.values)
            shape = reducer.specs[index].shape
            tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        else:
            tensor = as_tensor(result)
        like = gradients[index]
        found[index] = tensor if like is None else tensor.to(like.device)
    return found, True


def _array(gradient: Any) -> Array | Rows:
    if not is_sparse(gradient):
        return as_array(gradient.detach().cpu().contiguous())
    entries = gradient.detach().coalesce().cpu()
    return Rows(as_array(entries.indices()[0]), as_array(entries.values()))


def call(function: Callable[[list[Array]], list[Array]], tensors: Sequence[Any]) -> list[Any]:
    """`function` on copies of the tensors' values; alike in shapes and dtypes."""
    arrays = function([as_array(tensor.detach().cpu().contiguous().clone()) for tensor in tensors])
    return [as_tensor(array).to(tensor.device) for array, tensor in zip(arrays, tensors, strict=True)]


def untraced(function: Any) -> Any:
    """The function outside of `torch.compile`'s graphs, with all that it calls."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def when(flag: bool, step: Callable[[], None], variables: Sequence[Any]) -> None:
    """Make the step if the flag is true."""
    if flag:
        step()
