"""The benchmark's description of the gated linear unit, in the sizes of Transformer++ and GSA."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from subquad.kernels.swiglu import swiglu
from subquad.kernels.swiglu.reference import swiglu_reference
from subquad.kernels.workload import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    Workload,
    at_most,
    normal,
    ours,
    sizes,
    traffic,
)


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """With D, the weight of a linear map behind the unit; with `halves: apart` both halves are tensors of their own."""
    rows, width = sizes(shape, "RF")
    apart = shape.get("halves") == "apart"
    inputs: Inputs = {"x": normal(generator, dtype, rows, width if apart else 2 * width)}
    if apart:
        inputs["up"] = normal(generator, dtype, rows, width)
    if "D" in shape:
        inputs["weight"] = normal(generator, dtype, sizes(shape, "D")[0], width) * width**-0.5
    return inputs


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Forward reads x and writes y; the backward pass reads x and dy and writes dx."""
    rows, width = sizes(shape, "RF")
    size = rows * width
    return Cost(
        num_bytes=traffic(2 * size, size, backward) * dtype.itemsize,
        num_flops=(15 if backward else 5) * size,
        num_exponentials=(2 if backward else 1) * size,
    )


def load_liger() -> Callable[..., Tensor]:
    """liger-kernel's unit takes the halves as two contiguous tensors; its gradients overwrite them."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def peer(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return LigerSiLUMulFunction.apply(gate, up)

    return peer


PAPER: tuple[Shape, ...] = ({"R": 16384, "F": 2736}, {"R": 16384, "F": 5464})

WORKLOAD = Workload(
    op="swiglu",
    reference=swiglu_reference,
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(R=70, F=144),
    implementations=(
        *ours(swiglu),
        Implementation("liger", "peer", load_liger, cold_start=True, packages=("liger-kernel",)),
    ),
    shapes={"quick": PAPER[:1], "paper": PAPER},
    dtypes=(torch.bfloat16,),
    small=(
        {"R": 5, "F": 20},
        {"R": 300, "F": 17},
        {"R": 9, "F": 350},
        {"R": 9, "F": 20, "D": 12},
        {"R": 9, "F": 20, "D": 12, "halves": "apart"},
        {"R": 5, "F": 17, "halves": "apart"},
    ),
)
