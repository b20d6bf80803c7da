"""The benchmark's workload: time-invariant state space models at the sizes of long convolutions, N conjugate pairs.

`gates` is `plain` (S4D, DSS) or `gated` (H3). The system stays float32 (complex64) where u is in half precision.
`triton` is timed on [B, T, D] views of memory [B, D, T], which is also the memory of the baselines.

There are two baselines in PyTorch, both with transforms in float32. `fft` computes the whole operator: the filter from
all powers at once, and the convolution. `fft-filter-given` is the convolution alone with a filter computed in advance,
without the gradients of the system: the part of the work that a kernel which forms no filter has to beat.

`STEP` is one position of decoding, at the sizes of S4D (N 32), DSS (N 64) and GSS (N 64, a quarter of the width).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.fft_conv.workloads import channel_first, torch_fft_conv
from subquad.kernels.lti_ssm import DiagonalSystem, lti_ssm, lti_ssm_step
from subquad.kernels.lti_ssm.reference import lti_ssm_reference, lti_ssm_step_reference
from subquad.kernels.ssm_kernel import ssm_kernel
from subquad.kernels.ssm_kernel.workloads import make_system, system_bytes, vandermonde_kernel
from subquad.kernels.workload import (
    FINAL,
    Cost,
    Implementation,
    Inputs,
    Shape,
    Workload,
    at_most,
    named,
    normal,
    ours,
    sizes,
    time_second,
    traffic,
    uniform,
    updated,
    with_final_state,
)

CHUNK = 64
SEQUENCES = ("u", "gate_in", "gate_out")
PARAMETERS = DiagonalSystem._fields


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    size = sizes(shape, "BTD")
    names = SEQUENCES if shape["gates"] == "gated" else SEQUENCES[:1]
    sequences = {name: normal(generator, dtype, *size) for name in names}
    skip = normal(generator, torch.promote_types(dtype, torch.float32), size[-1])
    inputs: Inputs = {**sequences, **make_system(shape, dtype, generator), "D": skip}
    if "rule" in shape:
        inputs["discretization"] = shape["rule"]
    if shape.get("state") == "given":
        pairs = normal(generator, skip.dtype, size[0], *inputs["A"].shape, 2)
        inputs |= {"initial_state": torch.view_as_complex(pairs), **FINAL}
    return inputs


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Matrix products in chunks of CHUNK steps: 2 CHUNK FLOPs a step for the taps, and 8 N for N complex states.

    Backward costs twice that: as much for du, and as much for the gradients of taps, states and maps.
    """
    batch, length, width, state = sizes(shape, "BTDN")
    sequence = batch * length * width * dtype.itemsize
    inputs = (3 if shape["gates"] == "gated" else 1) * sequence
    inputs += system_bytes(shape, dtype) + width * max(4, dtype.itemsize)
    return Cost(
        num_bytes=traffic(inputs, sequence, backward),
        num_flops=(3 if backward else 1) * batch * length * width * (2 * CHUNK + 8 * state),
        matrix=True,
    )


def with_skip(filters: Tensor, skip: Tensor) -> Tensor:
    """Filters [D, T] with the skip [D] added to the tap at lag zero."""
    return torch.cat([filters[:, :1] + skip[:, None], filters[:, 1:]], dim=1)


def time_contiguous(inputs: Inputs) -> Inputs:
    """u and gates [B, T, D] in memory [B, D, T], the order in which the kernels and every peer work."""
    names = [name for name in SEQUENCES if name in inputs]
    return inputs | {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in names}


def no_softmax(shape: Shape, dtype: torch.dtype) -> str | None:
    return "the Triton kernels have no dss-softmax" if shape.get("rule") == "dss-softmax" else None


def fft(A: Tensor, B: None, C: Tensor, dt: Tensor, D: Tensor, **sequences: Any) -> Tensor:
    return torch_fft_conv(filter=with_skip(vandermonde_kernel(A, B, C, dt, sequences["u"].shape[-1]), D), **sequences)


def sequences_first(inputs: Inputs) -> Inputs:
    """Inputs with u and gates as [B, D, T]."""
    return inputs | channel_first({name: inputs[name] for name in SEQUENCES if name in inputs})


def with_filter(inputs: Inputs) -> Inputs:
    system = {name: inputs[name] for name in ("A", "B", "C", "dt")}
    filters = ssm_kernel(**system, length=inputs["u"].shape[1], backend="torch")
    sequences = channel_first({name: inputs[name] for name in SEQUENCES if name in inputs})
    return {**sequences, "filter": with_skip(filters, inputs["D"])}


def shape_of(inputs: Inputs) -> Shape:
    """Two directions are a system of twice the width; states that are real are counted as if they were complex."""
    batch, length, width = inputs["u"].shape
    gates = "plain" if inputs["gate_in"] is None else "gated"
    width *= 2 if inputs["bidirectional"] else 1
    return {"B": batch, "T": length, "D": width, "N": inputs["A"].shape[-1], "gates": gates}


WORKLOAD = Workload(
    op="lti_ssm",
    reference=with_final_state(lti_ssm_reference),
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    # 656 exceeds 512, below which the operator takes other paths than at real sizes; it is a multiple of 16, as real
    # lengths are, and no multiple of a chunk
    short=at_most(B=2, T=656, D=16),
    implementations=(
        *ours(lti_ssm, to_native=time_contiguous, supports=no_softmax),
        Implementation("fft", "torch", lambda: fft, sequences_first, time_second),
        Implementation("fft-filter-given", "torch", lambda: torch_fft_conv, with_filter, time_second),
    ),
    shapes={
        "quick": ({"B": 50, "T": 1024, "D": 256, "N": 32, "gates": "plain"},),
        "paper": (
            {"B": 8, "T": 512, "D": 1024, "N": 32, "gates": "plain"},
            {"B": 8, "T": 2048, "D": 1024, "N": 32, "gates": "plain"},
            {"B": 8, "T": 8192, "D": 1024, "N": 32, "gates": "plain"},
            {"B": 8, "T": 32768, "D": 1024, "N": 32, "gates": "plain"},
            {"B": 8, "T": 8192, "D": 1024, "N": 32, "gates": "gated"},
            {"B": 8, "T": 2048, "D": 2048, "N": 64, "gates": "gated"},
            {"B": 1, "T": 131072, "D": 1024, "N": 32, "gates": "plain"},
            {"B": 50, "T": 1024, "D": 256, "N": 32, "gates": "plain"},
            {"B": 16, "T": 16384, "D": 256, "N": 32, "gates": "plain"},
            {"B": 50, "T": 2048, "D": 128, "N": 64, "gates": "plain"},
        ),
    },
    keep=("dt", "D"),
    small=(
        {"B": 2, "T": 70, "D": 3, "N": 4, "gates": "gated", "state": "given"},
        {"B": 1, "T": 20, "D": 2, "N": 4, "gates": "plain", "rule": "bilinear"},
        {"B": 1, "T": 20, "D": 2, "N": 4, "gates": "plain", "rule": "dss-softmax"},
    ),
    time={"u": 1, "gate_in": 1, "gate_out": 1},
    states=("initial_state",),
    floors={"dt": 1.25},
)


def make_parameters(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """The fields of a `DiagonalSystem`: eigenvalues of S4D-Lin, step sizes between 0.001 and 0.1."""
    width, states = sizes(shape, "DN")
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "log_dt": uniform(generator, wide, -7.0, -2.3, width),
        "log_A_real": uniform(generator, wide, -1.0, 0.0, width, states),
        "A_imag": 3.14 * torch.arange(states, device=generator.device, dtype=wide).expand(width, -1).contiguous(),
        "B": None,
        "C": normal(generator, wide, width, states, 2) * (2 * states) ** -0.5,
        "skip": normal(generator, wide, width),
    }


def make_step_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    batch, width, states = sizes(shape, "BDN")
    pairs = normal(generator, torch.promote_types(dtype, torch.float32), batch, width, states, 2)
    u = normal(generator, dtype, batch, width)
    inputs = {"u": u, "state": torch.view_as_complex(pairs), **make_parameters(shape, dtype, generator)}
    return inputs | ({"discretization": shape["rule"]} if "rule" in shape else {})


def step_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The parameters and u once, and the state twice, since it is read and written."""
    batch, width, states = sizes(shape, "BDN")
    wide = max(4, dtype.itemsize)
    return Cost(
        num_bytes=2 * batch * width * dtype.itemsize + (4 * batch * width * states + width * (2 + 4 * states)) * wide,
        num_flops=batch * width * 14 * states,
        num_exponentials=width * states,
    )


def with_state(step: Callable[..., Tensor], states: Sequence[str] = ("state",)) -> Callable[..., tuple[Tensor, ...]]:
    """A step of flat arguments that also returns the states, which it has updated in place."""

    def run(**inputs: Any) -> Tensor:
        system = DiagonalSystem(**{name: inputs.pop(name) for name in PARAMETERS})
        return step(system=system, **inputs)

    return updated(run, states)


def step_shape_of(inputs: Inputs) -> Shape:
    return named("BDN", inputs["state"])


STEP = Workload(
    op="lti_ssm_step",
    reference=lti_ssm_step_reference,
    make_inputs=make_step_inputs,
    cost=step_cost,
    shape_of=step_shape_of,
    short=at_most(B=2, D=40),
    implementations=ours(lti_ssm_step, with_state),
    shapes={
        "quick": ({"B": 1, "D": 2048, "N": 32}, {"B": 32, "D": 2048, "N": 32}),
        "paper": (
            *({"B": batch, "D": 2048, "N": 32} for batch in (1, 16, 32, 64)),
            {"B": 32, "D": 2048, "N": 64},
            {"B": 32, "D": 512, "N": 64},
        ),
    },
    keep=("state", *(name for name in PARAMETERS if name != "B")),
    backward=False,
    small=tuple(
        {"B": batch, "D": width, "N": states, "rule": rule}
        for batch, width, states in ((1, 20, 4), (5, 11, 3), (17, 9, 1))
        for rule in ("zoh", "bilinear", "dss-exp", "dss-exp-no-scale")
    ),
    states=("state",),
    in_place=("state",),
)
