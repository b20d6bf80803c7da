"""The benchmark's description of the inner decoding step of an H3 layer, in the sizes of the 1.3B model."""

from __future__ import annotations

from functools import partial

import torch

from subquad.kernels.h3_inner import h3_inner_step
from subquad.kernels.h3_inner.reference import h3_inner_step_reference
from subquad.kernels.lti_ssm.workloads import PARAMETERS, make_parameters
from subquad.kernels.lti_ssm.workloads import with_state as with_states
from subquad.kernels.workload import Cost, Inputs, Shape, Workload, at_most, named, normal, ours, sizes

STATES = ("window", "state")
KEEP = ("window", "state", "taps", "shift_skip", *(name for name in PARAMETERS if name != "B"))


with_state = partial(with_states, states=STATES)
"""The step as a function of the inputs of `make_inputs`, which also returns what it has updated."""


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """The inputs of the step, with the system of `lti_ssm_step`."""
    batch, width, taps, states = sizes(shape, "BDMN")
    wide = torch.promote_types(dtype, torch.float32)
    pairs = normal(generator, wide, batch, width, states, 2)
    return {
        **{name: normal(generator, dtype, batch, width) for name in "qkv"},
        "window": normal(generator, wide, batch, width, taps - 1),
        "state": torch.view_as_complex(pairs),
        "taps": normal(generator, wide, width, taps) * taps**-0.5,
        "shift_skip": normal(generator, wide, width),
        **make_parameters(shape, dtype, generator),
        **({"discretization": shape["rule"]} if "rule" in shape else {}),
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The parameters, q, k and v once; the window and the state are read and written."""
    batch, width, taps, states = sizes(shape, "BDMN")
    wide = max(4, dtype.itemsize)
    kept = batch * width * (taps - 1 + 2 * states)
    parameters = width * (taps + 3 + 4 * states)
    return Cost(
        num_bytes=4 * batch * width * dtype.itemsize + (2 * kept + parameters) * wide,
        num_flops=batch * width * (2 * taps + 14 * states),
        num_exponentials=width * states,
    )


def shape_of(inputs: Inputs) -> Shape:
    return named("BDN", inputs["state"], M=inputs["taps"].shape[1])


STEP = Workload(
    op="h3_inner_step",
    reference=h3_inner_step_reference,
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=at_most(B=2, D=40),
    implementations=ours(h3_inner_step, with_state),
    shapes={
        "quick": ({"B": 1, "D": 2048, "M": 64, "N": 32}, {"B": 64, "D": 2048, "M": 64, "N": 32}),
        "paper": tuple({"B": batch, "D": 2048, "M": 64, "N": 32} for batch in (1, 16, 64)),
    },
    keep=KEEP,
    backward=False,
    small=({"B": 1, "D": 40, "M": 5, "N": 4}, {"B": 9, "D": 20, "M": 2, "N": 3, "rule": "bilinear"}),
    states=STATES,
    in_place=STATES,
)
