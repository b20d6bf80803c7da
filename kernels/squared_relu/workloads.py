"""The benchmark's description of the squared rectified linear unit, in the sizes of RWKV-7 of width 1024 and 2048."""

from __future__ import annotations

import torch

from subquad.kernels.squared_relu import squared_relu
from subquad.kernels.squared_relu.reference import squared_relu_reference
from subquad.kernels.workload import Cost, Inputs, Shape, Workload, at_most, normal, ours, sizes, traffic


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """With D, the weight of a linear map behind the unit."""
    rows, width = sizes(shape, "RF")
    inputs: Inputs = {"x": normal(generator, dtype, rows, width)}
    if "D" in shape:
        inputs["weight"] = normal(generator, dtype, sizes(shape, "D")[0], width) * width**-0.5
    return inputs


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Forward reads x and writes y; the backward pass reads x and dy and writes dx."""
    rows, width = sizes(shape, "RF")
    size = rows * width
    return Cost(num_bytes=traffic(size, size, backward) * dtype.itemsize, num_flops=(5 if backward else 2) * size)


PAPER: tuple[Shape, ...] = ({"R": 16384, "F": 4096}, {"R": 16384, "F": 8192})

WORKLOAD = Workload(
    op="squared_relu",
    reference=squared_relu_reference,
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(R=70, F=144),
    implementations=ours(squared_relu),
    shapes={"quick": PAPER[:1], "paper": PAPER},
    dtypes=(torch.bfloat16,),
    small=({"R": 5, "F": 20}, {"R": 300, "F": 17}, {"R": 9, "F": 20, "D": 12}),
)
