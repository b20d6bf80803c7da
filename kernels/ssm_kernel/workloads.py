"""The benchmark's workload: filters of diagonal state space models with N conjugate pairs, zoh, float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from subquad.kernels.ssm_kernel import ssm_kernel
from subquad.kernels.ssm_kernel.reference import ssm_kernel_reference
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
    uniform,
)

DT_MIN, DT_MAX = 1e-3, 1e-1


def make_system(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """S4D-Lin: A = -1/2 + i pi n, B = 1, C complex normal, dt log-uniform in 0.001 .. 0.1; at least float32."""
    width, state = sizes(shape, "DN")
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = math.pi * torch.arange(state, dtype=wide, device=generator.device)
    return {
        "A": torch.complex(torch.full_like(frequencies, -0.5), frequencies).repeat(width, 1),
        "B": None,
        "C": normal(generator, wide.to_complex(), width, state),
        "dt": uniform(generator, wide, math.log(DT_MIN), math.log(DT_MAX), width).exp_(),
    }


def system_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of A and C, which are complex, and of dt."""
    width, state = sizes(shape, "DN")
    return width * (4 * state + 1) * max(4, dtype.itemsize)


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """The system, with C scaled so that the taps are of order one for the middle step size."""
    system = make_system(shape, dtype, generator)
    inputs = {**system, "C": system["C"] / math.sqrt(DT_MIN * DT_MAX), "length": sizes(shape, "T")[0]}
    if "rule" in shape:
        # the taps of these rules are not multiplied by dt
        given = shape["rule"] in ("dss-softmax", "dss-exp-no-scale")
        inputs |= {"discretization": shape["rule"], "C": system["C"] if given else inputs["C"]}
    return inputs


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """A real matrix product of inner size 2 N for each channel, and two of them more for a backward pass.

    Making the factors, two tables of sqrt(T) powers, is not counted.
    """
    length, width, state = sizes(shape, "TDN")
    flops = 4 * state * width * length
    return Cost(
        num_bytes=traffic(system_bytes(shape, dtype), width * length * max(4, dtype.itemsize), backward),
        num_flops=(3 if backward else 1) * flops,
        matrix=True,
    )


def vandermonde_kernel(A: Tensor, B: None, C: Tensor, dt: Tensor, length: int) -> Tensor:
    """The filter [D, T] from all powers exp(dt A l) at once, [D, N, T] complex, as in unfused PyTorch code.

    The phases are wrong by |dt A l| rounding errors of float32: 1e-2 at T 16384, and little at the lengths for which
    accuracy is checked.
    """
    z = dt[:, None] * A
    powers = torch.exp(z[..., None] * torch.arange(length, device=z.device))
    return 2 * torch.einsum("dn,dnl->dl", C * (torch.exp(z) - 1) / A, powers).real


def shape_of(inputs: Inputs) -> Shape:
    width, states = inputs["C"].shape
    return {"T": inputs["length"], "D": width, "N": states}


WORKLOAD = Workload(
    op="ssm_kernel",
    reference=ssm_kernel_reference,
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=at_most(T=130, D=24),
    implementations=(
        *ours(ssm_kernel),
        Implementation("vandermonde", "torch", lambda: vandermonde_kernel),
    ),
    shapes={
        "quick": ({"T": 2048, "D": 128, "N": 32},),
        "paper": (
            {"T": 2048, "D": 128, "N": 32},
            {"T": 16384, "D": 256, "N": 32},
            {"T": 1024, "D": 512, "N": 32},
            {"T": 1024, "D": 256, "N": 32},
        ),
    },
    dtypes=(torch.float32,),
    keep=("dt",),
    small=tuple(
        {"T": 20, "D": 3, "N": 4, "rule": rule}
        for rule in ("zoh", "bilinear", "dss-softmax", "dss-exp", "dss-exp-no-scale")
    ),
)
