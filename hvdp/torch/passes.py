"""When gradients are ready, and when a backward pass has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvdp.optimizer import GradientReducer
from hvdp.torch.gradients import TorchGradients

__all__ = ["PassWatch", "hook_on", "remove"]


class PassWatch:
    """Tells the reducer of ready gradients and of the end of each backward pass."""

    def __init__(self, reducer: GradientReducer, store: TorchGradients) -> None:
        self._reducer = reducer
        self._store = store
        self._watched: set[int] = set()
        # When the last gradient became ready: a hook of the user's own may make the step during backward.
        self._steps = 0

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if parameter.grad is None:
                return  # a hook of the user's own has stepped and zeroed it
            self._steps = self._reducer.steps
            if self._watch() and self._reducer.within_window and self._store.dropped(index):
                self._reducer.cleared()  # by the model's zero_grad(), which does not tell
            self._reducer.ready(index)

        return ready

    def _watch(self) -> bool:
        """Be told when the backward that now runs has ended; whether that is new."""
        # By its id, not by a flag: a backward that raised never reports its end.
        current = torch._C._current_graph_task_id()
        if current in self._watched:
            return False
        self._watched.add(current)
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        return True

    def _ended(self) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._watched.clear()
            if self._steps == self._reducer.steps:
                self._reducer.end_pass()
                self._store.remember(self._reducer.within_window)
            return
        # A backward within another one's node, as a reentrant checkpoint runs it: the pass ends with
        # the outer one, which can be watched from the node that it comes to next.
        following = next(after for after, _ in node.next_functions if after is not None)

        def reached(gradients: Any) -> None:
            handle.remove()
            self._watch()

        handle = following.register_prehook(reached)


def hook_on(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None], before: bool = False) -> Any:
    """Have `hook` called after, or before, backward adds to the gradient; for `remove`.

    A parameter that is frozen now may be unfrozen later.
    """
    frozen = not parameter.requires_grad
    if frozen and not (parameter.is_floating_point() or parameter.is_complex()):
        return None  # integers never have a gradient
    if frozen:
        parameter.requires_grad_(True)
    handle = getattr(parameter, "register_hook" if before else "register_post_accumulate_grad_hook")(hook)
    if frozen:
        parameter.requires_grad_(False)
    return handle


def remove(hooks: Iterable[Any]) -> None:
    """End what `hook_on` returned."""
    for hook in hooks:
        if hook is not None:
            hook.remove()
