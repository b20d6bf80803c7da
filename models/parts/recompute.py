"""Recomputation: results that the backward pass computes again, so that they need not be kept in memory.

`recomputed_layer` does so for everything between the input of a layer and its result. `Recomputing` does so for single
results inside a layer that are large and cheap, such as a short convolution; what made them is kept, and so is what an
expensive operation makes of them. Both give the same values, bit by bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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

    With `layer` it does not: torch applies the innermost hook alone, so all that `Recomputing` does not make again
    would be kept. Inside `torch.compile` it does not either; the compiler decides there.
    """
    if recompute != "auto" or not x.is_cuda or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return num_bytes > AUTO_SHARE * torch.cuda.get_device_properties(x.device).total_memory


Made = TypeVar("Made", Tensor, tuple[Tensor, ...])
"""One result, or several that are made together."""
Keep = Callable[..., Any]
"""`keep` of `Recomputing`, or `at_once`: from a function and its arguments to what it makes, of type `Made`."""


class _Recipe:
    """Results that are made together and computed again, and the number of operations that still want one of them."""

    def __init__(self, make: Callable[..., Any], inputs: tuple[Any, ...], kind: str) -> None:
        self.make, self.inputs = make, inputs
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.num_uses = self.num_left = 0
        self.values: tuple[Tensor, ...] = ()

    def packed(self, index: int, x: Tensor) -> Packed:
        self.num_uses += 1
        return Packed(self, index, x.shape, x.stride(), int(x.storage_offset()))

    def take(self, index: int) -> Tensor:
        if not self.values:
            kind, dtype, enabled = self.autocast
            with torch.no_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
                self.values = _all_of(self.make(*map(_unpacked, self.inputs)))
            self.num_left = self.num_uses
        value = self.values[index]
        self.num_left -= 1
        if not self.num_left:
            self.values = ()
        return value


def _all_of(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


class Packed(NamedTuple):
    """A saved tensor that is a result of a recipe, or a part of one: its place in the memory of the result."""

    recipe: _Recipe
    which: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpacked(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    recipe, index, *place = packed
    return recipe.take(index).as_strided(*place)


class Recomputing:
    """A context in which operations keep, of results made by `keep(make)`, only how to make them.

        with Recomputing() as keep:
            y = expensive(keep(lambda: cheap(x)))

    `make` is called now and again in the backward pass, there without a gradient; tensors that it closes over stay in
    memory. What is made of kept results gets them as arguments: `keep(make, y)` calls make(y), and y is made once for
    all that reads it. `make` gives a tensor or a tuple of them, each with a memory of its own or side by side in one.
    The results must be contiguous, and live until the context ends. Views of them are not kept either.
    """

    def __init__(self) -> None:
        self._recipes: dict[int, tuple[_Recipe, int, torch.dtype]] = {}
        self._results: list[Any] = []
        self._hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpacked)

    def __enter__(self) -> Keep:
        self._hooks.__enter__()
        return self._keep

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._recipes.clear()
        self._results.clear()

    def _keep(self, make: Callable[..., Made], *inputs: Tensor) -> Made:
        made = make(*inputs)
        recipe = _Recipe(make, tuple(map(self._pack, inputs)), _all_of(made)[0].device.type)
        covered = Counter[int]()
        for index, result in enumerate(_all_of(made)):
            memory = result.untyped_storage()
            covered[memory.data_ptr()] += result.numel() * result.element_size() * result.is_contiguous()
            # results that are part of another tensor share its memory with what `make` does not give
            if covered[memory.data_ptr()] == memory.nbytes():
                self._recipes[memory.data_ptr()] = recipe, index, result.dtype
        # while they live, no other tensor has their memory
        self._results.append(made)
        return made

    def _pack(self, x: Tensor) -> Any:
        recipe, index, dtype = self._recipes.get(x.untyped_storage().data_ptr(), (None, 0, None))
        # strides count elements, so a view in another dtype has no place in the memory of the result
        return x if recipe is None or x.dtype != dtype else recipe.packed(index, x)


def at_once(make: Callable[..., Made], *inputs: Tensor) -> Made:
    """Stands for `keep` of `Recomputing` where results are kept: make(*inputs)."""
    return make(*inputs)
