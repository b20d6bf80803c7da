"""The benchmark's workload: the sums that S4 needs. M products of N pairs of poles in D channels, for a filter of T."""

from __future__ import annotations

import math

import torch

from subquad.kernels.cauchy import cauchy
from subquad.kernels.cauchy.reference import cauchy_reference
from subquad.kernels.ssm_kernel.workloads import make_system
from subquad.kernels.workload import Cost, Inputs, Shape, Workload, at_most, normal, ours, sizes, traffic


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """S4D-Lin, whose poles are S4's without the part of low rank, on S4's circle; residues of the size of dt."""
    length, products, state = sizes(shape, "TMN")
    system = make_system(shape, dtype, generator)
    Lambda, dt = system["A"], system["dt"]
    residues = normal(generator, Lambda.dtype, products, *Lambda.shape) * (4 / math.sqrt(state)) * dt[:, None]
    k = torch.arange(length // 2 + 1, dtype=torch.float64, device=generator.device)
    return {
        "residues": residues,
        "Lambda": Lambda,
        "dt": dt,
        "s": torch.complex(torch.ones_like(k), math.pi * k) / length,
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Two fractions for each pole and point, and M sums of both; `kernels.cauchy.triton` has the formulas."""
    length, width, products, state = sizes(shape, "TDMN")
    points, size = length // 2 + 1, max(4, dtype.itemsize)
    read = size * width * (2 * products * state + 2 * state + 1) + 16 * points
    forward, back = 8 * products + 36, 16 * products + 78
    return Cost(
        num_bytes=traffic(read, 2 * size * products * width * points, backward),
        num_flops=(forward + back if backward else forward) * width * state * points,
        # reciprocals are computed by the unit that computes exponentials
        num_exponentials=(4 if backward else 2) * width * state * points,
    )


def shape_of(inputs: Inputs) -> Shape:
    residues = inputs["residues"]
    *products, width, states = residues.shape
    return {"T": 2 * (len(inputs["s"]) - 1), "D": width, "M": math.prod(products), "N": states}


WORKLOAD = Workload(
    op="cauchy",
    reference=cauchy_reference,
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=at_most(T=130, D=24),
    implementations=ours(cauchy),
    shapes={
        "quick": ({"T": 2048, "D": 2048, "N": 32, "M": 4},),
        "paper": ({"T": 16384, "D": 2048, "N": 32, "M": 4}, {"T": 1024, "D": 256, "N": 32, "M": 6}),
    },
    dtypes=(torch.float32,),
    keep=("dt",),
    small=({"T": 20, "D": 3, "N": 5, "M": 2},),
)
