"""Between parameters and buckets: where a torch gradient lies, and in which form it travels."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from hvdp._core.arrays import Array
from hvdp._core.buckets import ParameterSpec
from hvdp._core.compression import Compressor, NoCompressor
from hvdp.torch._arrays import as_array, as_tensor, dtype_name

__all__ = ["TorchGradients"]


class TorchGradients:
    """The GradientStore of torch parameters.

    On the CPU and without compression a gradient lives in its bucket; otherwise it is
    copied, compressed, on the way in and out.

    Args:
        names: for messages; equally long.
        sparse_as_dense: sparse gradients travel, and come back, as dense ones.
        sparse_alone: the optimizer takes no others, so what has no gradient yet has sparse ones, by rows.
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        names: list[str],
        compression: Compressor,
        sparse_as_dense: bool,
        sparse_alone: bool,
    ) -> None:
        self.parameters = parameters
        self.names = names
        self._compression = compression
        self._plain = isinstance(compression, NoCompressor)
        self._sparse_as_dense = sparse_as_dense
        self._sparse_alone = sparse_alone
        self._places: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        self._contexts: list[Any] = [None] * len(parameters)
        self._reduced: dict[int, torch.Tensor] = {}
        self._midway: dict[int, tuple[TensorWeakRef, int]] = {}
        # With their versions then: an optimizer leaves gradients as they are, who zeroes them does not.
        self._used: dict[int, tuple[TensorWeakRef, int]] = {}

    def of(self, parameters: list[torch.Tensor], names: list[str]) -> TorchGradients:
        """The same for these parameters and others after them."""
        store = TorchGradients(
            parameters, names, self._compression, self._sparse_as_dense, self._sparse_alone
        )
        self.keep_used()
        store._used = self._used
        return store

    def specs(self) -> list[ParameterSpec]:
        """What travels, as the ranks compare it."""
        return [self._spec(name, p) for name, p in zip(self.names, self.parameters, strict=True)]

    def _spec(self, name: str, parameter: torch.Tensor) -> ParameterSpec:
        sent = parameter
        if not self._plain:
            sent, _ = self._compression.compress(torch.zeros_like(parameter.detach()))
        strides = () if sent.is_contiguous() else _dense_strides(sent)
        return ParameterSpec(name, tuple(sent.shape), dtype_name(sent.dtype), sent.element_size(), strides)

    def _lives_in_place(self, index: int) -> bool:
        return self._plain and self.parameters[index].device.type == "cpu"

    def awaits(self, index: int) -> bool:
        parameter = self.parameters[index]
        return parameter.requires_grad or parameter.grad is not None

    def bind(self, index: int, memory: Array) -> None:
        sent = self.parameters[index].detach()
        if not self._plain:
            sent, self._contexts[index] = self._compression.compress(torch.zeros_like(sent))
        flat = as_tensor(memory)
        self._places[index] = flat.as_strided(sent.shape, _dense_strides(sent), flat.storage_offset())

    def holds_reduced(self, index: int) -> bool:
        gradient = self.parameters[index].grad
        if gradient is None:
            return False
        used = self._used.get(index)
        return gradient is self._reduced.get(index) or (used is not None and gradient is used[0]())

    def lost_reduced(self, or_replaced: bool) -> bool:
        current = [(self.parameters[index].grad, reduced) for index, reduced in self._reduced.items()]
        lost = (mine is None or (or_replaced and mine is not reduced) for mine, reduced in current)
        return bool(current) and all(lost)

    def forget_reduced(self) -> None:
        self._reduced.clear()
        self._used.clear()

    def keep_used(self) -> None:
        for index, gradient in self._reduced.items():
            self._used[index] = TensorWeakRef(gradient), gradient._version
        self._reduced.clear()

    def share_used(self, ranks: int) -> None:
        for index, (used, version) in self._used.items():
            gradient = self.parameters[index].grad
            if gradient is not None and gradient is used() and gradient._version == version:
                gradient.div_(ranks)

    def forget_zeroed(self, index: int) -> None:
        """Before a backward adds to the gradient, as it may where that was zeroed after it was delivered."""
        gradient = self.parameters[index].grad
        if gradient is None or not self.holds_reduced(index):
            return
        _, version = self._used.get(index, (None, gradient._version))
        values = gradient if gradient.layout is torch.strided else gradient._values()
        if gradient._version != version or not values.any():
            self._reduced.pop(index, None)
            self._used.pop(index, None)

    def remember(self, midway: bool) -> None:
        """After a backward pass, with `midway` one that does not end a window: what `changed` compares."""
        current = enumerate(parameter.grad for parameter in self.parameters) if midway else ()
        self._midway = {i: (TensorWeakRef(g), g._version) for i, g in current if g is not None}

    def changed(self) -> bool:
        """Whether somebody has written to a gradient since."""
        current = [(self.parameters[i].grad, *known) for i, known in self._midway.items()]
        return any(g is not None and g is known() and g._version != v for g, known, v in current)

    def dropped(self, index: int) -> bool:
        """Whether all that the window's passes had made is gone; asked when one is ready in the next pass."""
        others = [i for i in self._midway if i != index]
        if not others:
            return index in self._midway and self.parameters[index].grad is not self._midway[index][0]()
        return all(self._is_gone(i) for i in others)

    def _is_gone(self, index: int) -> bool:
        gradient = self.parameters[index].grad
        if gradient is None:
            return True
        values = gradient if gradient.layout is torch.strided else gradient._values()
        return gradient._version != self._midway[index][1] and not values.any()

    def withdraw(self, index: int) -> None:
        self.parameters[index].grad = None

    def collect(self, index: int) -> bool:
        parameter, place = self.parameters[index], self._places[index]
        gradient = parameter.grad
        if gradient is place:
            return True
        with torch.no_grad():
            if gradient is None:
                place.zero_()
                return False
            dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
            if not self._plain:
                dense, self._contexts[index] = self._compression.compress(dense)
            place.copy_(dense)
        if self._lives_in_place(index):
            parameter.grad = place
            # A new gradient, though the tensor is the one that was delivered last.
            self._reduced.pop(index, None)
            self._used.pop(index, None)
        return True

    def deliver(self, index: int) -> None:
        parameter, place = self.parameters[index], self._places[index]
        self._used.pop(index, None)
        if self._lives_in_place(index):
            parameter.grad = self._reduced[index] = place
            return
        with torch.no_grad():
            result = place
            if not self._plain:
                result = self._compression.decompress(place, self._contexts[index])
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                parameter.grad = gradient = result.to(parameter.device, copy=True)
            else:
                gradient.copy_(result)
        self._reduced[index] = gradient

    def sparse_dimensions(self, index: int) -> int:
        gradient = self.parameters[index].grad
        if self._sparse_as_dense:
            return 0
        if gradient is None:
            return int(self._sparse_alone)
        if gradient.layout is not torch.sparse_coo:
            return 0
        return gradient.sparse_dim()

    def sparse_entries(self, index: int, dimensions: int) -> tuple[Array, Array, bool]:
        parameter = self.parameters[index]
        gradient = parameter.grad
        if gradient is None:
            coordinates = torch.empty((0, dimensions), dtype=torch.int64)
            values = torch.empty((0, *parameter.shape[dimensions:]), dtype=parameter.dtype)
        else:
            if gradient.layout is torch.strided or gradient.sparse_dim() != dimensions:
                gradient = gradient.to_dense().to_sparse(dimensions)
            entries = gradient.detach().coalesce().cpu()
            coordinates, values = entries.indices().t().contiguous(), entries.values().contiguous()
        return as_array(coordinates), as_array(values), gradient is not None

    def deliver_sparse(self, index: int, coordinates: Array, values: Array) -> None:
        parameter = self.parameters[index]
        entries = torch.sparse_coo_tensor(
            as_tensor(coordinates).t(), as_tensor(values), parameter.shape, check_invariants=False
        )
        self._used.pop(index, None)
        parameter.grad = self._reduced[index] = entries.to(parameter.device).coalesce().to(parameter.dtype)


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides where they cover its memory without holes, else contiguous ones."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= length
    return tensor.stride()
