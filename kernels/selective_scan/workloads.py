"""Benchmark workloads of the selective scan and of one step of it for decoding.

In the shapes B is the batch, T the length, D the width and N the number of states. `form` is `gated` (with z, D,
dt_bias and softplus, as Mamba's layer has it), `core` (the recurrence alone), `complex` (the gated form with
N complex states, as in Mamba's table 8) or `negative` (the gated form with negative eigenvalues, at the size of
`state-tracking/formal-languages`). The shapes with B 1 and D 1024 are the sweep of Mamba's figure 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.selective_scan import selective_scan, selective_scan_step
from subquad.kernels.selective_scan.reference import selective_scan_reference
from subquad.kernels.selective_scan.unfused import selective_scan_unfused
from subquad.kernels.workload import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    Workload,
    at_most,
    initial_state,
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

DT_MIN, DT_MAX = 1e-3, 1e-1


def log_uniform_dt(generator: torch.Generator, dtype: torch.dtype, *size: int) -> Tensor:
    return uniform(generator, dtype, math.log(DT_MIN), math.log(DT_MAX), *size).exp_()


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Parameters as Mamba initializes them: A = -(1 .. N), D = 1, step sizes log-uniform between 0.001 and 0.1.

    Complex: A = -1/2 + (0 .. N - 1) i, and C is doubled, since each state stands for a conjugate pair.
    """
    batch, length, width, state = sizes(shape, "BTDN")
    wide = torch.promote_types(dtype, torch.float32)
    A = -torch.arange(1, state + 1, dtype=wide, device=generator.device).repeat(width, 1)
    inputs: Inputs = {"x": normal(generator, dtype, batch, length, width), "A": A}
    for name in "BC":
        inputs[name] = normal(generator, dtype, batch, length, state)
    if shape["form"] == "complex":
        inputs["A"] = torch.complex(torch.full_like(A, -0.5), -1 - A)
        for name, scale in (("B", 0.5**0.5), ("C", 2**0.5)):
            real, imaginary = normal(generator, wide, 2, batch, length, state).mul_(scale).unbind(0)
            inputs[name] = torch.complex(real, imaginary)
    inputs |= initial_state(shape, dtype, generator, batch, width, state)
    if shape.get("state") == "given" and shape["form"] == "complex":
        start = inputs["initial_state"]
        inputs["initial_state"] = torch.complex(start, normal(generator, wide, *start.shape))
    if shape["form"] == "core":
        return {**inputs, "dt": log_uniform_dt(generator, dtype, batch, length, width)}
    # the inverse of softplus, so that softplus(dt_bias) is log-uniform
    dt_bias = log_uniform_dt(generator, wide, width).expm1().log()
    if shape["form"] == "negative":
        inputs["negative_eigenvalues"] = True
    return {
        **inputs,
        "dt": normal(generator, dtype, batch, length, width).mul_(0.3),
        "dt_bias": dt_bias,
        "dt_softplus": True,
        "D": torch.ones(width, dtype=wide, device=generator.device),
        "z": normal(generator, dtype, batch, length, width),
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Each element of [B, T, D, N] takes 6 operations and one exponential: dt A, dt x B, and two multiply-adds.

    Backward recomputes the state (4 operations and the exponential) and takes 16 operations more. The exponentials of
    softplus and gate are left out: they are 2 for each element of [B, T, D]. A complex state takes 16 operations, and
    56 more in backward; sines and cosines, which need not run on the unit of the exponentials, are left out.
    """
    batch, length, width, state = sizes(shape, "BTDN")
    gated, is_complex = shape["form"] != "core", shape["form"] == "complex"
    sequence, wide = batch * length * dtype.itemsize, max(4, dtype.itemsize)
    # the parts of a complex map are at least float32
    maps = 2 * state * (2 * wide // dtype.itemsize if is_complex else 1)
    parameters = width * ((2 if is_complex else 1) * state + (2 if gated else 0)) * wide
    inputs = sequence * ((3 if gated else 2) * width + maps) + parameters
    terms = batch * length * width * state
    flops = (16, 56) if is_complex else (6, 20)
    return Cost(
        num_bytes=traffic(inputs, sequence * width, backward),
        num_flops=sum(flops if backward else flops[:1]) * terms,
        num_exponentials=(2 if backward else 1) * terms,
    )


def load_mamba() -> Callable[..., Tensor]:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn


def channel_first(inputs: Inputs) -> Inputs:
    """The inputs by the peer's names and in its layout: x, dt, z as [B, D, T] and B, C as [B, N, T]."""
    names = ("x", "dt", "B", "C", "z")
    first: Inputs = {name: inputs[name].transpose(1, 2).contiguous() for name in names if name in inputs}
    native = {"u": first.pop("x"), "delta": first.pop("dt"), "A": inputs["A"], **first}
    if "D" in inputs:
        native |= {"D": inputs["D"], "delta_bias": inputs["dt_bias"], "delta_softplus": inputs["dt_softplus"]}
    return native


def real_only(shape: Shape, dtype: torch.dtype) -> str | None:
    if shape.get("form") == "negative":
        return "has no negative eigenvalues"
    return "is set up for real states only" if shape.get("form") == "complex" else None


def shape_of(inputs: Inputs) -> Shape:
    form = "complex" if inputs["A"].is_complex() else "core" if inputs["z"] is None else "gated"
    return named("BTD", inputs["x"], N=inputs["A"].shape[-1], form=form)


WORKLOAD = Workload(
    op="selective_scan",
    reference=with_final_state(selective_scan_reference),
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=at_most(B=2, T=130, D=24),
    implementations=(
        *ours(selective_scan),
        Implementation("unfused", "torch", lambda: selective_scan_unfused, supports=real_only),
        Implementation("mamba-ssm", "peer", load_mamba, channel_first, time_second, real_only, packages=("mamba-ssm",)),
    ),
    shapes={
        "quick": (
            {"B": 8, "T": 2048, "D": 2048, "N": 16, "form": "gated"},
            {"B": 8, "T": 2048, "D": 2048, "N": 8, "form": "complex"},
        ),
        "paper": (
            *(
                {"B": batch, "T": length, "D": width, "N": 16, "form": form}
                for batch, length, width in (
                    (8, 2048, 2048),
                    (8, 2048, 1536),
                    (64, 4096, 128),
                    *((1, length, 1024) for length in (512, 2048, 8192, 32768, 131072, 524288)),
                )
                for form in ("gated", "core")
            ),
            {"B": 1, "T": 32768, "D": 1024, "N": 8, "form": "complex"},
            {"B": 1024, "T": 39, "D": 256, "N": 16, "form": "negative"},
        ),
    },
    keep=("A", "D", "dt_bias", "initial_state"),
    small=(
        {"B": 1, "T": 20, "D": 5, "N": 4, "form": "gated", "state": "given"},
        {"B": 2, "T": 9, "D": 3, "N": 3, "form": "core"},
        {"B": 1, "T": 9, "D": 3, "N": 2, "form": "complex", "state": "given"},
        {"B": 1, "T": 9, "D": 3, "N": 4, "form": "negative", "state": "given"},
    ),
    time=dict.fromkeys(("x", "dt", "B", "C", "z"), 1),
    states=("initial_state",),
)


def step_reference(**inputs: Any) -> tuple[Tensor, Tensor]:
    along_time = {name: inputs[name].unsqueeze(1) for name in ("x", "dt", "B", "C", "z")}
    state = inputs["state"]
    rest = {name: value for name, value in inputs.items() if name not in along_time and name != "state"}
    y, state = selective_scan_reference(**along_time, **rest, initial_state=state)
    return y.squeeze(1), state


def make_step_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """The gated or the complex form at one position, and a state in float32 or complex64."""
    inputs = make_inputs({"form": "gated", **shape, "T": 1}, dtype, generator)
    now = {name: inputs[name].squeeze(1) for name in ("x", "dt", "B", "C", "z")}
    state = normal(generator, torch.promote_types(dtype, torch.float32), *sizes(shape, "BDN"))
    if inputs["A"].is_complex():
        state = torch.complex(state, normal(generator, state.dtype, *state.shape))
    return {**inputs, **now, "state": state}


def step_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The cost of the scan at one position, and of reading and writing the state."""
    once = cost({"form": "gated", **shape, "T": 1}, dtype, False)
    batch, width, state = sizes(shape, "BDN")
    parts = 2 if shape.get("form") == "complex" else 1
    num_bytes = once.num_bytes + 2 * parts * batch * width * state * max(4, dtype.itemsize)
    return Cost(num_bytes=num_bytes, num_flops=once.num_flops, num_exponentials=once.num_exponentials)


def load_mamba_step() -> Callable[..., tuple[Tensor, ...]]:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    return updated(selective_state_update)


def step_shape_of(inputs: Inputs) -> Shape:
    return named("BDN", inputs["state"], form="complex" if inputs["A"].is_complex() else "gated")


STEP = Workload(
    op="selective_scan_step",
    reference=step_reference,
    make_inputs=make_step_inputs,
    cost=step_cost,
    shape_of=step_shape_of,
    short=at_most(B=2, D=72),
    implementations=(
        *ours(selective_scan_step, updated),
        Implementation("mamba-ssm", "peer", load_mamba_step, supports=real_only, packages=("mamba-ssm",)),
    ),
    shapes={
        "quick": ({"B": 64, "D": 4096, "N": 16}, {"B": 64, "D": 4096, "N": 8, "form": "complex"}),
        "paper": tuple({"B": batch, "D": 4096, "N": 16} for batch in (1, 64, 256)),
    },
    keep=("A", "D", "dt_bias", "state"),
    backward=False,
    small=(
        {"B": 2, "D": 5, "N": 4},
        {"B": 2, "D": 5, "N": 2, "form": "complex"},
        {"B": 3, "D": 2, "N": 5, "form": "negative"},
    ),
    states=("state",),
    in_place=("state",),
)
