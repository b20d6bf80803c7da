"""The benchmark's description of rotary positions, in the sizes of Transformer++ and RetNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.rotary import rotary
from subquad.kernels.rotary.reference import rotary_reference
from subquad.kernels.workload import Cost, Inputs, Shape, Workload, at_most, normal, ours, sizes


def _with_tables(op: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with its tables and positions 0 .. T - 1, as a function of queries and keys.

    first: [B], the first position of each row, where the rows have positions of their own.
    """

    def run(q: Tensor, k: Tensor, angle: Tensor, first: Tensor | None = None) -> Any:
        angle, time = angle.detach(), torch.arange(q.shape[1], device=q.device)
        return op(q, k, angle.cos(), angle.sin(), time if first is None else first[:, None] + time)

    return run


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Rows of a shape with `starts` begin at some of so many positions."""
    batch, length, heads, size = sizes(shape, "BTHK")
    starts = int(shape.get("starts", 1))
    time = torch.arange(length + starts - 1, device=generator.device, dtype=torch.promote_types(dtype, torch.float32))
    channels = torch.arange(size // 2, device=generator.device) / size * 2
    return {
        "q": normal(generator, dtype, batch, length, heads, size),
        "k": normal(generator, dtype, batch, length, heads, size),
        "angle": time[:, None] * 10000.0**-channels,
        **({"first": torch.arange(batch, device=generator.device) * 3 % starts} if starts > 1 else {}),
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Both tensors are read once and written once, with the angles; a backward pass does so with their gradients."""
    batch, length, heads, size = sizes(shape, "BTHK")
    both = 2 * batch * length * heads * size
    passes = 2 if backward else 1
    angles = length * size // 2 * max(4, dtype.itemsize)
    return Cost(num_bytes=passes * 2 * both * dtype.itemsize + angles, num_flops=passes * 3 * both)


PAPER: tuple[Shape, ...] = ({"B": 8, "T": 2048, "H": 16, "K": 128}, {"B": 8, "T": 2048, "H": 8, "K": 256})

WORKLOAD = Workload(
    op="rotary",
    reference=_with_tables(rotary_reference),
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(B=2, T=70, H=2),
    implementations=ours(rotary, _with_tables),
    shapes={"quick": PAPER[:1], "paper": PAPER},
    keep=("angle",),
    small=({"B": 2, "T": 20, "H": 3, "K": 8}, {"B": 3, "T": 5, "H": 4, "K": 2, "starts": 8}),
    time={"q": 1, "k": 1},
)
