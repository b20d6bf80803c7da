"""Interfaces of the workloads that are timed, which each operator defines in `kernels/<op>/workloads.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Shape = Mapping[str, int | str]
"""Sizes by their letter, and named variants: `{"B": 8, "T": 2048, "D": 2048, "activation": "silu"}`."""


class Cost(Protocol):
    """Minimum work of one call: bytes moved and operations."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all inputs read once and all outputs written once."""
        ...

    @property
    def num_flops(self) -> int: ...

    @property
    def matrix(self) -> bool:
        """Whether `num_flops` counts matrix products."""
        ...

    @property
    def num_exponentials(self) -> int: ...


class Implementation(Protocol):
    """One way to compute an operator."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """`ours`, `torch` or `peer`."""
        ...

    @property
    def load(self) -> Callable[[], Callable[..., Any]]:
        """Imports and returns the callable. Raises ImportError where it is not installed."""
        ...

    @property
    def to_native(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Converts our keyword arguments to those of the implementation. Its time is not measured."""
        ...

    @property
    def from_native(self) -> Callable[[Any], Any]:
        """Converts the results of the implementation to ours. Its time is not measured."""
        ...

    @property
    def supports(self) -> Callable[[Shape, torch.dtype], str | None]:
        """The reason why the implementation cannot run a shape in a dtype, or None if it can."""
        ...

    @property
    def cold_start(self) -> bool:
        """Whether the first call compiles something, so that its time gets a row of its own."""
        ...

    @property
    def packages(self) -> Sequence[str]:
        """Distributions whose versions decide what runs."""
        ...

    @property
    def backward(self) -> bool:
        """Whether it has a backward pass."""
        ...

    @property
    def floors(self) -> Mapping[str, float]:
        """Inputs whose gradients may err by so many times the floor, as converting the arguments loses precision."""
        ...


class Workload(Protocol):
    """An operator as the benchmark sees it."""

    @property
    def op(self) -> str: ...

    @property
    def version(self) -> int:
        """Version of the inputs; raised whenever the inputs of a shape change."""
        ...

    @property
    def reference(self) -> Callable[..., Any]:
        """The reference (the recurrence) with which every implementation is compared."""
        ...

    @property
    def make_inputs(self) -> Callable[[Shape, torch.dtype, torch.Generator], dict[str, Any]]:
        """Keyword arguments of a shape, drawn on the generator's device."""
        ...

    @property
    def cost(self) -> Callable[[Shape, torch.dtype, bool], Cost]:
        """Function from a shape, a dtype and whether a backward pass follows to the minimum cost of one call."""
        ...

    @property
    def short(self) -> Callable[[Shape], Shape]:
        """A shape cut down to one that the reference can judge, with the sizes that choose a kernel kept."""
        ...

    @property
    def implementations(self) -> Sequence[Implementation]: ...

    @property
    def shapes(self) -> Mapping[str, Sequence[Shape]]:
        """Shapes by the name of their set, `quick` among them."""
        ...

    @property
    def dtypes(self) -> Sequence[torch.dtype]: ...

    @property
    def keep(self) -> Sequence[str]:
        """Inputs that stay float32 where the others are in half precision."""
        ...

    @property
    def backward(self) -> bool:
        """Whether the backward pass is checked and timed, too."""
        ...

    @property
    def small(self) -> Sequence[Shape]:
        """Shapes on which the laws are tried; none: `short` of the quick ones."""
        ...

    @property
    def time(self) -> Mapping[str, int]:
        """Axis of time of each input that has one."""
        ...

    @property
    def states(self) -> Sequence[str]:
        """Names of initial states, whose successors are the last outputs."""
        ...

    @property
    def in_place(self) -> Sequence[str]:
        """Inputs that a call updates."""
        ...

    @property
    def floors(self) -> Mapping[str, float]:
        """Inputs whose gradients may err by so many times the floor of the accuracy rule."""
        ...
