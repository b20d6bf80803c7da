"""Description of an operator for the benchmark: shapes, inputs, cost and implementations.

Every operator has one `Workload` in `kernels/<op>/workloads.py`. An implementation imports what it needs when it is
loaded, so a peer that is not installed appears in a table with this reason and is not a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

Shape = Mapping[str, int | str]
"""Sizes by their letter, and named variants: {"B": 8, "T": 2048, "D": 2048, "W": 4, "activation": "silu"}."""

Inputs = dict[str, Any]
"""Keyword arguments of the operator: tensors, options, None."""


@dataclass(frozen=True)
class Cost:
    """Minimum work of one call: every input is read once, every output is written once, and the arithmetic."""

    num_bytes: int
    num_flops: int
    """FLOPs of the products that could run on matrix units, or of the scalar operations where there are none."""
    matrix: bool = False
    """Whether `num_flops` counts matrix products."""
    num_exponentials: int = 0
    """Number of exponentials. A separate unit computes them, 16 for each clock and multiprocessor on NVIDIA GPUs, and
    its rate may be the limit."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute the operator.

    load:        imports and returns the callable. Raises ImportError with the reason where it cannot be imported.
    to_native, from_native: convert our keyword arguments to its own, and its results to ours. Both are differentiable
                 and their time is not measured, so that a peer is timed in the layout that suits it best.
    supports:    gives the reason why it cannot run a shape in a dtype, or None.
    cold_start:  whether its first call compiles something, so that the time of a cold start is worth reporting.
    packages:    distributions whose versions decide what runs; rows of the benchmark record them.
    backward:    whether it has a backward pass.
    floors:      as those of `Workload`, where the conversion of arguments loses precision that the peer does not.
    """

    name: str
    kind: Literal["ours", "torch", "peer"]
    load: Callable[[], Callable[..., Any]]
    to_native: Callable[[Inputs], Inputs] = dict
    from_native: Callable[[Any], Any] = lambda result: result
    supports: Callable[[Shape, torch.dtype], str | None] = lambda shape, dtype: None
    cold_start: bool = False
    packages: tuple[str, ...] = ()
    backward: bool = True
    floors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """An operator as the benchmark sees it.

    reference:   the recurrence, with the results of the operator for `make_inputs`; it judges every implementation.
    make_inputs: draws inputs of a shape and dtype from a generator, on its device, so that outputs are of order one.
    cost:        the minimum cost of one call, given the shape, the dtype and whether a backward pass follows.
    short:       reduces a shape to one that the reference can judge, and keeps the sizes that choose a kernel.
    shape_of:    the shape of a call of the operator from all of its arguments by name, so that `kernels.operations` can
                 count the operations of a model; None: it works on single elements, whose operations are not counted.
    keep:        inputs that stay float32 where the others are in half precision.
    backward:    whether gradients are measured; a step of decoding has none.

    The rest is for the laws of operators (`suite.laws.operators`) alone:

    small:       shapes that take Triton's interpreter a second, with every variant of the inputs, and lengths beside
                 the sizes of chunks and tiles. Where there are none, the laws take `short` of the quick shapes.
    time:        the axis of time of each input that has one; outputs have it at axis 1. Such an operator is causal.
    states:      names of initial states. The final states are the last outputs where `return_final_state` is given.
    in_place:    inputs that a call updates; its implementations return them among the outputs.
    floors:      inputs whose gradients may err by so many times the floor of the accuracy rule (`suite.laws.accuracy`),
                 for a reason that the operator's README gives.
    """

    op: str
    reference: Callable[..., Any]
    make_inputs: Callable[[Shape, torch.dtype, torch.Generator], Inputs]
    cost: Callable[[Shape, torch.dtype, bool], Cost]
    short: Callable[[Shape], Shape]
    implementations: tuple[Implementation, ...]
    shapes: Mapping[str, tuple[Shape, ...]]
    """Shapes by set: `paper` has those of the papers and peers, `quick` one or two of them, seconds on a GPU, and
    `arena`, where the quick ones are too few, those of the two sets on which the arena compares ours with peers."""
    shape_of: Callable[[Inputs], Shape] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    keep: tuple[str, ...] = ()
    backward: bool = True
    version: int = 1
    """Version of the inputs; raised whenever the inputs of a shape change."""
    small: tuple[Shape, ...] = ()
    time: Mapping[str, int] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    floors: Mapping[str, float] = field(default_factory=dict)


def sizes(shape: Shape, letters: Sequence[str]) -> tuple[int, ...]:
    """The sizes behind some letters: `batch, length = sizes(shape, "BT")`."""
    return tuple(int(shape[letter]) for letter in letters)


def named(letters: str, x: Tensor, **others: int | str) -> Shape:
    """The shape whose letters are the sizes of a tensor, one after the other, and others: `named("BTD", x, N=16)`."""
    return {**dict(zip(letters, x.shape, strict=True)), **others}


def at_most(**limits: int) -> Callable[[Shape], Shape]:
    """Returns a function that reduces some sizes of a shape to these limits; the others stay."""

    def short(shape: Shape) -> Shape:
        return {**shape, **{letter: min(limit, int(shape[letter])) for letter, limit in limits.items()}}

    return short


def ours(
    op: Callable[..., Any], around: Callable[..., Any] = lambda run: run, **of_triton: Any
) -> tuple[Implementation, Implementation]:
    """An operator's Triton kernels and its plain PyTorch.

    around:    takes the operator with a backend and returns what takes the inputs of the workload, where the operator
               itself does not.
    of_triton: fields of the implementation in Triton besides those that it always has.
    """

    def load_triton() -> Callable[..., Any]:
        # raises ImportError where Triton is missing
        import triton  # noqa: F401

        return around(partial(op, backend="triton"))

    return (
        Implementation("triton", "ours", load_triton, cold_start=True, **of_triton),
        Implementation("torch", "ours", lambda: around(partial(op, backend="torch"))),
    )


def traffic(inputs: int, outputs: int, backward: bool) -> int:
    """Bytes moved by a call that reads `inputs` bytes and writes `outputs` bytes, once each.

    A backward pass reads the inputs again and the output gradients, writes the input gradients, and keeps nothing else.
    """
    return 3 * inputs + 2 * outputs if backward else inputs + outputs


def normal(generator: torch.Generator, dtype: torch.dtype, *size: int) -> Tensor:
    """A tensor of standard normal values on the generator's device."""
    return torch.randn(size, generator=generator, device=generator.device, dtype=dtype)


def uniform(generator: torch.Generator, dtype: torch.dtype, low: float, high: float, *size: int) -> Tensor:
    """A tensor of values between low and high on the generator's device."""
    return torch.rand(size, generator=generator, device=generator.device, dtype=dtype) * (high - low) + low


def initial_state(shape: Shape, dtype: torch.dtype, generator: torch.Generator, *size: int) -> Inputs:
    """An initial state and the wish for the final one, for a shape with `state: given`; nothing for others."""
    if shape.get("state") != "given":
        return {}
    return {"initial_state": normal(generator, torch.promote_types(dtype, torch.float32), *size), **FINAL}


FINAL: Inputs = {"return_final_state": True}


def with_final_state(reference: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Any]:
    """A reference that gives its final state where `return_final_state` asks for it, as operators do."""

    def run(*, return_final_state: bool = False, **inputs: Any) -> Any:
        y, state = reference(**inputs)
        return (y, state) if return_final_state else y

    return run


def updated(step: Callable[..., Tensor], states: Sequence[str] = ("state",)) -> Callable[..., tuple[Tensor, ...]]:
    """A step that also returns the states that it has updated in place, so that they can be judged.

    Every call continues from the states that the call before it left.
    """

    def run(**inputs: Any) -> tuple[Tensor, ...]:
        return step(**inputs), *(inputs[name] for name in states)

    return run


def first(results: Any) -> Any:
    """The first result of a peer that gives several."""
    return results[0]


def time_second(y: Tensor) -> Tensor:
    """[B, D, T] as [B, T, D], and [B, H, T, K] as [B, T, H, K]."""
    return y.transpose(1, 2)
