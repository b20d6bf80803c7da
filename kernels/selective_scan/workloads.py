"""Benchmark workloads of the selective scan and of one step of it for decoding.

In the shapes B is the batch, T the length, D the width and N the number of states. `form` is `gated` (with z, D,
dt_bias and softplus, which is what Mamba's layer uses) or `core` (the recurrence alone). The shapes with B 1 and D 1024
are the sweep of Mamba's figure 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.selective_scan import selective_scan, selective_scan_step
from kernels.selective_scan.reference import selective_scan_reference
from kernels.selective_scan.unfused import selective_scan_unfused
from kernels.workload import Cost, Implementation, Inputs, Shape, Workload, normal, sizes, traffic, uniform

DT_MIN, DT_MAX = 1e-3, 1e-1


def reference(**inputs: Any) -> Tensor:
    return selective_scan_reference(**inputs)[0]


def log_uniform_dt(generator: torch.Generator, dtype: torch.dtype, *size: int) -> Tensor:
    return uniform(generator, dtype, math.log(DT_MIN), math.log(DT_MAX), *size).exp_()


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Parameters as Mamba initializes them: A = -(1 .. N), D = 1, step sizes log-uniform between 0.001 and 0.1."""
    batch, length, width, state = sizes(shape, "BTDN")
    wide = torch.promote_types(dtype, torch.float32)
    A = -torch.arange(1, state + 1, dtype=wide, device=generator.device).repeat(width, 1)
    inputs: Inputs = {"x": normal(generator, dtype, batch, length, width), "A": A}
    for name in "BC":
        inputs[name] = normal(generator, dtype, batch, length, state)
    if shape["form"] == "core":
        return {**inputs, "dt": log_uniform_dt(generator, dtype, batch, length, width)}
    # the inverse of softplus, so that softplus(dt_bias) is log-uniform
    dt_bias = log_uniform_dt(generator, wide, width).expm1().log()
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
    softplus and gate are left out: they are 2 for each element of [B, T, D].
    """
    batch, length, width, state = sizes(shape, "BTDN")
    gated = shape["form"] == "gated"
    sequence, wide = batch * length * dtype.itemsize, max(4, dtype.itemsize)
    parameters = width * (state + 2 if gated else state) * wide
    inputs = sequence * ((3 if gated else 2) * width + 2 * state) + parameters
    terms = batch * length * width * state
    return Cost(
        num_bytes=traffic(inputs, sequence * width, backward),
        num_flops=(26 if backward else 6) * terms,
        num_exponentials=(2 if backward else 1) * terms,
    )


def short(shape: Shape) -> Shape:
    return {**shape, "B": min(2, int(shape["B"])), "T": min(130, int(shape["T"])), "D": min(24, int(shape["D"]))}


def load_triton() -> Callable[..., Any]:
    import triton  # noqa: F401

    return partial(selective_scan, backend="triton")


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


def time_second(y: Any) -> Any:
    return y.transpose(1, 2)


WORKLOAD = Workload(
    op="selective_scan",
    reference=reference,
    make_inputs=make_inputs,
    cost=cost,
    short=short,
    implementations=(
        Implementation("triton", "ours", load_triton, cold_start=True),
        Implementation("torch", "ours", lambda: partial(selective_scan, backend="torch")),
        Implementation("unfused", "torch", lambda: selective_scan_unfused),
        Implementation("mamba-ssm", "peer", load_mamba, channel_first, time_second),
    ),
    shapes={
        "quick": ({"B": 8, "T": 2048, "D": 2048, "N": 16, "form": "gated"},),
        "paper": tuple(
            {"B": batch, "T": length, "D": width, "N": 16, "form": form}
            for batch, length, width in (
                (8, 2048, 2048),
                (8, 2048, 1536),
                (64, 4096, 128),
                *((1, length, 1024) for length in (512, 2048, 8192, 32768, 131072, 524288)),
            )
            for form in ("gated", "core")
        ),
    },
    keep=("A", "D", "dt_bias"),
)


def step_reference(**inputs: Any) -> tuple[Tensor, Tensor]:
    along_time = {name: inputs[name].unsqueeze(1) for name in ("x", "dt", "B", "C", "z")}
    state = inputs["state"]
    rest = {name: value for name, value in inputs.items() if name not in along_time and name != "state"}
    y, state = selective_scan_reference(**along_time, **rest, initial_state=state)
    return y.squeeze(1), state


def make_step_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """The gated form at one position, and a state in float32."""
    inputs = make_inputs({**shape, "T": 1, "form": "gated"}, dtype, generator)
    now = {name: inputs[name].squeeze(1) for name in ("x", "dt", "B", "C", "z")}
    state = normal(generator, torch.promote_types(dtype, torch.float32), *sizes(shape, "BDN"))
    return {**inputs, **now, "state": state}


def step_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The cost of the scan at one position, and of reading and writing the state."""
    once = {**shape, "T": 1, "form": "gated"}
    batch, width, state = sizes(shape, "BDN")
    terms = batch * width * state
    num_bytes = cost(once, dtype, False).num_bytes + 2 * terms * max(4, dtype.itemsize)
    return Cost(num_bytes=num_bytes, num_flops=6 * terms, num_exponentials=terms)


def short_step(shape: Shape) -> Shape:
    return {**shape, "B": min(2, int(shape["B"])), "D": min(72, int(shape["D"]))}


def load_triton_step() -> Callable[..., tuple[Tensor, Tensor]]:
    import triton  # noqa: F401

    return updated(partial(selective_scan_step, backend="triton"))


def load_torch_step() -> Callable[..., tuple[Tensor, Tensor]]:
    return updated(partial(selective_scan_step, backend="torch"))


def load_mamba_step() -> Callable[..., tuple[Tensor, Tensor]]:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    return updated(selective_state_update)


def updated(step: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A step that also returns the state that it has updated in place, so that the state can be judged.

    Every call continues from the state that the call before it left.
    """

    def run(state: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        return step(state=state, **inputs), state

    return run


STEP = Workload(
    op="selective_scan_step",
    reference=step_reference,
    make_inputs=make_step_inputs,
    cost=step_cost,
    short=short_step,
    implementations=(
        Implementation("triton", "ours", load_triton_step, cold_start=True),
        Implementation("torch", "ours", load_torch_step),
        Implementation("mamba-ssm", "peer", load_mamba_step),
    ),
    shapes={
        "quick": ({"B": 64, "D": 4096, "N": 16},),
        "paper": tuple({"B": batch, "D": 4096, "N": 16} for batch in (1, 64, 256)),
    },
    keep=("A", "D", "dt_bias", "state"),
    backward=False,
)
