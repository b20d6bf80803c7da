"""What a benchmark needs to know of an operator: its shapes, inputs, cost and implementations.

Every operator describes itself in `kernels/<op>/workloads.py` as one `Workload`. Implementations import what they need
when they are loaded, so a missing peer is a reason and not a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Shape = Mapping[str, int | str]
"""Sizes by their letter, and named variants: {"B": 8, "T": 2048, "D": 2048, "W": 4, "activation": "silu"}."""

Inputs = dict[str, Any]
"""Keyword arguments of the operator: tensors, options, None."""


@dataclass(frozen=True)
class Cost:
    """What one call must do at least: every input read once, every output written once, and the arithmetic."""

    num_bytes: int
    num_flops: int
    """Of the products that could run on matrix units, or else the scalar operations."""
    matrix: bool = False
    """Whether `num_flops` are those of matrix products."""
    num_exponentials: int = 0
    """A unit of their own computes them (on NVIDIA GPUs 16 a clock and multiprocessor), at times the bottleneck."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute the operator.

    load:        imports and returns the callable. Raises ImportError with the reason where it is not to be had.
    to_native, from_native: from our keyword arguments to its own, and from its results to ours; both differentiable
                 and outside of what is timed (a peer is timed in the memory layout it likes best).
    supports:    the reason why it cannot run a shape in a dtype, or None.
    cold_start:  whether the first call compiles something that is worth a figure.
    """

    name: str
    kind: Literal["ours", "torch", "peer"]
    load: Callable[[], Callable[..., Any]]
    to_native: Callable[[Inputs], Inputs] = dict
    from_native: Callable[[Any], Any] = lambda result: result
    supports: Callable[[Shape, torch.dtype], str | None] = lambda shape, dtype: None
    cold_start: bool = False


@dataclass(frozen=True)
class Workload:
    """An operator as the benchmark sees it.

    reference:   the recurrence, giving what the operator returns for `make_inputs`; the judge of every implementation.
    make_inputs: inputs of a shape, with outputs of order one, drawn from a generator on its device in a dtype.
    cost:        floor of one call, given the shape, the dtype and whether a backward pass follows.
    short:       the shape cut down to one that the reference can judge, with the sizes that choose a kernel kept.
    keep:        inputs that stay float32 where the others are in half precision.
    backward:    whether gradients are asked for; a step of decoding has none.
    """

    op: str
    reference: Callable[..., Any]
    make_inputs: Callable[[Shape, torch.dtype, torch.Generator], Inputs]
    cost: Callable[[Shape, torch.dtype, bool], Cost]
    short: Callable[[Shape], Shape]
    implementations: tuple[Implementation, ...]
    shapes: Mapping[str, tuple[Shape, ...]]
    """By set: `paper` (those of the papers and peers), `quick` (one or two of them, seconds on a GPU)."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    keep: tuple[str, ...] = ()
    backward: bool = True
    version: int = 1
    """Raised whenever a shape name comes to mean other inputs."""


def sizes(shape: Shape, letters: str) -> tuple[int, ...]:
    """The sizes behind some letters: `batch, length = sizes(shape, "BT")`."""
    return tuple(int(shape[letter]) for letter in letters)


def traffic(inputs: int, outputs: int, backward: bool) -> int:
    """Bytes moved where forward reads inputs and writes outputs, once each.

    The backward pass reads inputs and output gradients again and writes input gradients, and nothing is kept for it.
    """
    return 3 * inputs + 2 * outputs if backward else inputs + outputs


def normal(generator: torch.Generator, dtype: torch.dtype, *size: int) -> Tensor:
    """Standard normal numbers on the generator's device."""
    return torch.randn(size, generator=generator, device=generator.device, dtype=dtype)


def uniform(generator: torch.Generator, dtype: torch.dtype, low: float, high: float, *size: int) -> Tensor:
    """Numbers between low and high on the generator's device."""
    return torch.rand(size, generator=generator, device=generator.device, dtype=dtype) * (high - low) + low
