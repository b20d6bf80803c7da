"""Benchmark workloads of WKV and of one step of it for decoding. B is the batch, T the length, D the width."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.wkv import wkv, wkv_step
from kernels.wkv.reference import wkv_reference
from kernels.workload import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    Workload,
    at_most,
    needs_triton,
    normal,
    sizes,
    traffic,
    uniform,
    updated,
)


def reference(**inputs: Any) -> Tensor:
    return wkv_reference(**inputs)[0]


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Decays exp(-exp(d)) with d uniform between -5 and 3, as RWKV-4 starts, and bonuses around log 0.3."""
    batch, length, width = sizes(shape, "BTD")
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "k": normal(generator, dtype, batch, length, width),
        "v": normal(generator, dtype, batch, length, width),
        "log_decay": uniform(generator, wide, -5.0, 3.0, width).exp_().neg_(),
        "bonus": uniform(generator, wide, -1.7, -0.7, width),
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Four exponentials and about 16 operations for each element of k; twice as many exponentials in backward."""
    elements, parameters = shape_elements(shape), 2 * int(shape["D"]) * max(4, dtype.itemsize)
    flops, exponentials = (52, 10) if backward else (16, 4)
    return Cost(
        num_bytes=traffic(2 * elements * dtype.itemsize + parameters, elements * dtype.itemsize, backward),
        num_flops=flops * elements,
        num_exponentials=exponentials * elements,
    )


def shape_elements(shape: Shape) -> int:
    batch, length, width = sizes(shape, "BTD")
    return batch * length * width


WORKLOAD = Workload(
    op="wkv",
    reference=reference,
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(B=2, T=300, D=40),
    implementations=(
        Implementation("triton", "ours", needs_triton(partial(wkv, backend="triton")), cold_start=True),
        Implementation("torch", "ours", lambda: partial(wkv, backend="torch")),
    ),
    shapes={
        "quick": ({"B": 8, "T": 2048, "D": 2048},),
        "paper": ({"B": 8, "T": 1024, "D": 768}, {"B": 1, "T": 32768, "D": 2048}),
    },
    keep=("log_decay", "bonus"),
)


def step_reference(state: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    along_time = {name: inputs.pop(name).unsqueeze(1) for name in "kv"}
    y, state = wkv_reference(**along_time, **inputs, initial_state=state)
    return y.squeeze(1), state


def make_step_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """One position, and a state in float32 with a denominator of order one."""
    inputs = make_inputs({**shape, "T": 1}, dtype, generator)
    batch, width = sizes(shape, "BD")
    wide = inputs["bonus"].dtype
    a, p = normal(generator, wide, 2, batch, width).unbind(0)
    state = torch.stack([a, uniform(generator, wide, 1.0, 3.0, batch, width), p], 1)
    return {**inputs, "k": inputs["k"].squeeze(1), "v": inputs["v"].squeeze(1), "state": state}


def step_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The cost of one position, and of reading and writing the state."""
    once = {**shape, "T": 1}
    now = cost(once, dtype, False)
    state = 2 * 3 * shape_elements(once) * max(4, dtype.itemsize)
    return Cost(now.num_bytes + state, num_flops=now.num_flops, num_exponentials=now.num_exponentials)


STEP = Workload(
    op="wkv_step",
    reference=step_reference,
    make_inputs=make_step_inputs,
    cost=step_cost,
    short=at_most(B=2, D=40),
    implementations=(
        Implementation("triton", "ours", needs_triton(updated(partial(wkv_step, backend="triton"))), cold_start=True),
        Implementation("torch", "ours", lambda: updated(partial(wkv_step, backend="torch"))),
    ),
    shapes={"quick": ({"B": 64, "D": 2048},), "paper": ({"B": 1, "D": 2048},)},
    keep=("log_decay", "bonus", "state"),
    backward=False,
)
