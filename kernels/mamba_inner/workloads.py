"""The benchmark's description of the inner decoding step of a Mamba block, in the sizes of Mamba 1.4B and 130M."""

from __future__ import annotations

from functools import partial

import torch

from subquad.kernels.mamba_inner import mamba_inner_step
from subquad.kernels.mamba_inner.reference import mamba_inner_step_reference
from subquad.kernels.workload import (
    Cost,
    Inputs,
    Shape,
    Workload,
    at_most,
    named,
    normal,
    ours,
    sizes,
    uniform,
    updated,
)

TAPS = 4
STATES = ("window", "state")
KEEP = ("window", "state", "conv_weight", "conv_bias", "dt_bias", "log_A", "D")


with_state = partial(updated, states=STATES)
"""The step, which then also returns what it has updated."""


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Step sizes between about 0.03 and 0.3."""
    batch, width, states, rank = sizes(shape, "BDNR")
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "x": normal(generator, dtype, batch, width),
        "z": normal(generator, dtype, batch, width),
        "window": normal(generator, wide, batch, width, TAPS - 1),
        "state": normal(generator, wide, batch, width, states),
        "conv_weight": normal(generator, wide, width, TAPS) * TAPS**-0.5,
        "conv_bias": normal(generator, wide, width),
        "x_proj": normal(generator, dtype, rank + 2 * states, width) * width**-0.5,
        "dt_proj": normal(generator, dtype, width, rank) * rank**-0.5,
        "dt_bias": uniform(generator, wide, -3.5, -1.0, width),
        "log_A": uniform(generator, wide, 0.0, 2.0, width, states),
        "D": normal(generator, wide, width),
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Weights, x and z once; the window and the state are read and written."""
    batch, width, states, rank = sizes(shape, "BDNR")
    size, wide = dtype.itemsize, max(4, dtype.itemsize)
    kept = batch * width * (TAPS - 1 + states)
    weights = width * (2 * rank + 2 * states)
    return Cost(
        num_bytes=(weights + 3 * batch * width) * size + (2 * kept + width * (TAPS + 3 + states)) * wide,
        num_flops=2 * batch * weights + 6 * batch * width * states,
        num_exponentials=batch * width * (states + 3),
    )


def half_only(shape: Shape, dtype: torch.dtype) -> str | None:
    return None if dtype.itemsize == 2 else f"takes weights in half precision only, not in {dtype}"


def shape_of(inputs: Inputs) -> Shape:
    return named("BDN", inputs["state"], R=inputs["dt_proj"].shape[1])


STEP = Workload(
    op="mamba_inner_step",
    reference=mamba_inner_step_reference,
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=at_most(B=2, D=96, R=8),
    implementations=ours(mamba_inner_step, with_state, supports=half_only),
    shapes={
        "quick": ({"B": 1, "D": 4096, "N": 16, "R": 128}, {"B": 64, "D": 4096, "N": 16, "R": 128}),
        "paper": (
            *({"B": batch, "D": 4096, "N": 16, "R": 128} for batch in (1, 4, 16, 64, 128)),
            {"B": 1, "D": 1536, "N": 16, "R": 48},
        ),
    },
    keep=KEEP,
    backward=False,
    small=({"B": 3, "D": 72, "N": 5, "R": 20}, {"B": 1, "D": 300, "N": 16, "R": 5}, {"B": 18, "D": 40, "N": 4, "R": 3}),
    states=STATES,
    in_place=STATES,
)
