"""What an adapter tells about its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from hvdp._core import submit, wording
from hvdp._core.arrays import Array
from hvdp._core.compression import Compressor, NoCompressor
from hvdp._core.operation import Operation
from hvdp._core.ops import Kind
from hvdp._core.submit import Options
from hvdp.errors import HvdpError, InvalidArgumentError
from hvdp.process_sets import ProcessSet

__all__ = ["Build", "Map", "OnTensors", "T", "Tensors", "gradient_name", "no_compression"]

no_compression = NoCompressor()

T = TypeVar("T")
Map = Callable[[list[T]], list[T]]
Build = Callable[[T, Options], Operation]


class Tensors(Protocol[T]):
    """How one framework's tensors become C-contiguous NumPy arrays, and back."""

    def copied(self, tensor: T) -> Array:
        """A new array with the tensor's values."""

    def shared(self, tensor: T) -> Array:
        """The tensor's own memory where possible, for reading; else a new array."""

    def writable(self, tensor: T) -> Array:
        """As `shared`, for an operation in place.

        Raises:
            InvalidArgumentError: the tensor cannot be written.
        """

    def made(self, array: Array, like: T) -> T:
        """A tensor of a new array, on the device of `like`."""

    def written(self, tensor: T, array: Array) -> T:
        """`tensor`, which now has the values of the array that `writable` gave."""

    def device(self, tensor: T) -> str:
        """The kind of device, as "cpu" or "cuda": compared between the ranks."""

    def with_gradient(self, forward: Map[T], backward: Map[T], tensors: list[T]) -> list[T]:
        """`forward(tensors)`, whose gradient with respect to them the framework gets from `backward`.

        `backward` maps the results' gradients to the tensors'. It is a collective, so every
        rank must take the same results into its loss.
        """


class OnTensors(Generic[T]):
    """Base of the collectives' classes."""

    def __init__(self, tensors: Tensors[T]) -> None:
        self._tensors = tensors

    def _differentiable(self, forward: Map[T], backward: Map[T], tensors: list[T]) -> list[T]:
        """`forward(tensors)`, with `backward` as its gradient; exceptions for tensors make it raise."""
        if any(isinstance(tensor, Exception) for tensor in tensors):
            return forward(tensors)
        return self._tensors.with_gradient(forward, backward, tensors)

    def _through(
        self, compression: Compressor, tensors: Sequence[T], forward: Map[T], backward: Map[T]
    ) -> list[T]:
        """`forward` on compressed tensors, with `backward` as its gradient."""
        pairs = [_compressed(compression, tensor) for tensor in tensors]
        values, contexts = [small for small, _ in pairs], [context for _, context in pairs]
        results = self._differentiable(forward, backward, values)
        return [compression.decompress(r, c) for r, c in zip(results, contexts, strict=True)]

    def _options(self, tensor: T, name: str | None, process_set: ProcessSet) -> Options:
        return Options(name, process_set.number(), self._tensors.device(tensor))

    def _each(
        self,
        kind: Kind,
        tensors: Sequence[T],
        name: str | None,
        process_set: ProcessSet,
        build: Build[T],
    ) -> list[Operation]:
        """An operation for each tensor of a group, under a name of its own."""
        group = Options(name, process_set.number(), group_size=len(tensors)).named(kind)
        return [
            self._described(
                kind, tensor, group._replace(device=self._tensors.device(tensor)).numbered(index), build
            )
            for index, tensor in enumerate(tensors)
        ]

    def _one(
        self,
        kind: Kind,
        tensor: T,
        name: str | None,
        process_set: ProcessSet,
        build: Build[T],
    ) -> Operation:
        """The operation for one tensor."""
        return self._described(kind, tensor, self._options(tensor, name, process_set), build)

    @staticmethod
    def _described(kind: Kind, tensor: T, options: Options, build: Build[T]) -> Operation:
        """What `build` returns; where it finds an argument wrong, an operation that tells everybody.

        Args:
            tensor: or the exception to tell, where none could be made.
        """
        try:
            if isinstance(tensor, Exception):
                raise tensor
            return build(tensor, options)
        except InvalidArgumentError as error:
            fault = str(error)
        except HvdpError:
            raise
        except Exception as error:  # noqa: BLE001 - NumPy's and the frameworks' word on rubbish
            fault = wording.exception(error)
        return submit.faulty(kind, options, fault)


def _compressed(compression: Compressor, tensor: Any) -> tuple[Any, Any]:
    """What the compressor makes of the tensor; an exception in its place is told to every rank."""
    if isinstance(tensor, Exception):
        return tensor, None
    try:
        small, context = compression.compress(tensor)
    except Exception as error:  # noqa: BLE001 - users write their own
        return error, None
    return small, context


def gradient_name(name: str | None) -> str | None:
    """For the collective that is the gradient of the one of this name."""
    return None if name is None else f"{name}.gradient"
