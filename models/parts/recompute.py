"""Memory for time: results that the backward pass computes again instead of keeping them.

`recomputed_layer` does so for everything between the input of a layer and its result. `Recomputing` does so for single
results inside a layer that are large and cheap, such as a short convolution; what made them is kept, and so is what an
expensive operation makes of them. Both give the same values, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Made = TypeVar("Made", Tensor, tuple[Tensor, Tensor])
Recompute = Literal["auto", "never", "layer"]
"""`auto`: what a layer can compute again in little time, where memory is short. `layer`: all of every layer."""
AUTO_SHARE = 1 / 128
"""`auto` computes again where keeping would take more than this share of the memory of the device."""


def recomputed_layer(recompute: Recompute, layer: Callable[..., Any], *inputs: Any) -> Any:
    """layer(*inputs); with `layer`, nothing but the inputs is kept for the backward pass."""
    if recompute != "layer" or not torch.is_grad_enabled():
        return layer(*inputs)
    # a recorded CUDA graph cannot put back the state of a random generator, so layers with dropout are refused
    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)


def spares(recompute: Recompute, num_bytes: int, x: Tensor) -> bool:
    """Whether `auto` computes results of so many bytes, those of all layers together, again in the backward pass of x.

    Inside `torch.compile` it does not; the compiler decides there.
    """
    if recompute == "never" or not x.is_cuda or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return num_bytes > AUTO_SHARE * torch.cuda.get_device_properties(x.device).total_memory


class _Recipe:
    """One result that is computed again, and the number of operations that still want it."""

    def __init__(self, make: Callable[[], Tensor | tuple[Tensor, ...]], kind: str) -> None:
        self.make = make
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.num_uses = self.num_left = 0
        self.value: Tensor | None = None

    def packed(self, x: Tensor) -> Packed:
        self.num_uses += 1
        return Packed(self, x.shape, x.stride(), int(x.storage_offset()))

    def take(self) -> Tensor:
        if self.value is None:
            kind, dtype, enabled = self.autocast
            with torch.no_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
                made = self.make()
            # all of them are views of one memory
            self.value = made if isinstance(made, Tensor) else made[0]
            self.num_left = self.num_uses
        value = self.value
        self.num_left -= 1
        if not self.num_left:
            self.value = None
        return value


class Packed(NamedTuple):
    """A saved tensor that is the result of a recipe, or a part of it: its place in the memory of the result."""

    recipe: _Recipe
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Recomputing:
    """A context in which operations keep, of results made by `keep(make)`, only how to make them.

        with Recomputing() as keep:
            y = expensive(keep(lambda: cheap(x)))

    `make` is called now and again in the backward pass, there without a gradient; tensors that it closes over stay in
    memory. The results must be contiguous, and must live until the context ends. Views of them are not kept either.
    make may give several tensors; they are kept unless they lie in one memory, side by side.
    """

    def __init__(self) -> None:
        self._recipes: dict[int, _Recipe] = {}
        self._hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Callable[[Callable[[], Made]], Made]:
        self._hooks.__enter__()
        return self._keep

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._recipes.clear()

    def _keep(self, make: Callable[[], Made]) -> Made:
        made = make()
        parts = (made,) if isinstance(made, Tensor) else made
        memory = parts[0].untyped_storage()
        num_bytes = sum(part.numel() * part.element_size() for part in parts if part.is_contiguous())
        together = all(part.untyped_storage().data_ptr() == memory.data_ptr() for part in parts)
        # a result that is part of another tensor shares its memory with what `make` does not give
        if together and num_bytes == memory.nbytes():
            self._recipes[memory.data_ptr()] = _Recipe(make, parts[0].device.type)
        return made

    def _pack(self, x: Tensor) -> Any:
        recipe = self._recipes.get(x.untyped_storage().data_ptr())
        return x if recipe is None else recipe.packed(x)

    @staticmethod
    def _unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        recipe, *place = packed
        return recipe.take().as_strided(*place)


def at_once(make: Callable[[], Made]) -> Made:
    """Stands for `keep` of `Recomputing` where results are kept: make()."""
    return make()
