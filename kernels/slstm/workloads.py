"""Benchmark workloads of sLSTM and of one step of it for decoding. B is the batch, T the length, H heads of width K."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.slstm import slstm, slstm_step
from subquad.kernels.slstm.reference import slstm_reference
from subquad.kernels.workload import (
    FINAL,
    Cost,
    Inputs,
    Shape,
    Workload,
    at_most,
    normal,
    ours,
    sizes,
    traffic,
    uniform,
    updated,
    with_final_state,
)


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Normal gates, and matrices in which a row sums up to about one."""
    batch, length, heads, width = sizes(shape, "BTHK")
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "x": normal(generator, dtype, batch, length, 4, heads, width),
        "recurrent": normal(generator, wide, 4, heads, width, width) / width**0.5,
        "bias": normal(generator, wide, 4, heads, width),
        **({"initial_state": make_state(shape, wide, generator), **FINAL} if shape.get("state") == "given" else {}),
    }


def make_state(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A state with a normaliser of order one."""
    size = sizes(shape, "BHK")
    h, c, m = normal(generator, dtype, 3, *size).unbind(0)
    return torch.stack([torch.tanh(h), c, uniform(generator, dtype, 1.0, 3.0, *size), m], 1)


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The products of h and R, three times as many in backward; about six exponentials for each channel, twice over."""
    batch, length, heads, width = sizes(shape, "BTHK")
    channels, matrices = batch * length * heads * width, 4 * heads * width * (width + 1)
    read = 4 * channels * dtype.itemsize + matrices * max(4, dtype.itemsize)
    return Cost(
        num_bytes=traffic(read, channels * dtype.itemsize, backward),
        num_flops=(4 if backward else 1) * 8 * channels * width,
        matrix=True,
        num_exponentials=(12 if backward else 6) * channels,
    )


def shape_of(inputs: Inputs) -> Shape:
    batch, length, _, heads, width = inputs["x"].shape
    return {"B": batch, "T": length, "H": heads, "K": width}


WORKLOAD = Workload(
    op="slstm",
    reference=with_final_state(slstm_reference),
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=at_most(B=3, T=20, H=2),
    implementations=ours(slstm),
    shapes={
        "quick": ({"B": 1024, "T": 39, "H": 4, "K": 32},),
        "paper": ({"B": 1024, "T": 255, "H": 4, "K": 32}, {"B": 16, "T": 2048, "H": 12, "K": 64}),
    },
    keep=("recurrent", "bias", "initial_state"),
    small=(
        {"B": 3, "T": 6, "H": 2, "K": 5, "state": "given"},
        {"B": 1, "T": 5, "H": 1, "K": 8},
        {"B": 17, "T": 2, "H": 1, "K": 20},
    ),
    time={"x": 1},
    states=("initial_state",),
    # in half precision a term of it has four roundings where the floor grants one: of R, of h, and of the gradient of
    # the gates before its products with R and with h. They are independent, so the square of the error is four times
    # as large (README.md)
    floors={"recurrent": 2.0},
)


def step_reference(state: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    x = inputs.pop("x").unsqueeze(1)
    y, state = slstm_reference(x, **inputs, initial_state=state)
    return y.squeeze(1), state


def make_step_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """One position, and a state in float32."""
    inputs = make_inputs({**shape, "T": 1}, dtype, generator)
    return {**inputs, "x": inputs["x"].squeeze(1), "state": make_state(shape, inputs["recurrent"].dtype, generator)}


def step_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The cost of one position, and of reading and writing the state."""
    batch, heads, width = sizes(shape, "BHK")
    now = cost({**shape, "T": 1}, dtype, False)
    state = 2 * 4 * batch * heads * width * max(4, dtype.itemsize)
    return Cost(now.num_bytes + state, now.num_flops, matrix=True, num_exponentials=now.num_exponentials)


def step_shape_of(inputs: Inputs) -> Shape:
    batch, _, heads, width = inputs["x"].shape
    return {"B": batch, "H": heads, "K": width}


STEP = Workload(
    op="slstm_step",
    reference=step_reference,
    make_inputs=make_step_inputs,
    cost=step_cost,
    shape_of=step_shape_of,
    short=at_most(B=3, H=2),
    implementations=ours(slstm_step, updated),
    shapes={"quick": ({"B": 64, "H": 12, "K": 64},), "paper": ({"B": 1, "H": 12, "K": 64},)},
    keep=("recurrent", "bias", "state"),
    backward=False,
    small=({"B": 3, "H": 2, "K": 5},),
    states=("state",),
    in_place=("state",),
)
