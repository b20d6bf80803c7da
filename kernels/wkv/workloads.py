"""Benchmark workloads of WKV and of one step of it for decoding. B is the batch, T the length, D the width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.wkv import wkv, wkv_step
from subquad.kernels.wkv.reference import wkv_reference
from subquad.kernels.workload import (
    FINAL,
    Cost,
    Inputs,
    Shape,
    Workload,
    at_most,
    named,
    normal,
    ours,
    sizes,
    traffic,
    uniform,
    updated,
    with_final_state,
)


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Decays exp(-exp(d)) with d uniform between -5 and 3, as RWKV-4 starts, and bonuses around log 0.3."""
    batch, length, width = sizes(shape, "BTD")
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "k": normal(generator, dtype, batch, length, width),
        "v": normal(generator, dtype, batch, length, width),
        "log_decay": uniform(generator, wide, -5.0, 3.0, width).exp_().neg_(),
        "bonus": uniform(generator, wide, -1.7, -0.7, width),
        **({"initial_state": make_state(shape, wide, generator), **FINAL} if shape.get("state") == "given" else {}),
    }


def make_state(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A state with a denominator of order one."""
    size = sizes(shape, "BD")
    a, p = normal(generator, dtype, 2, *size).unbind(0)
    return torch.stack([a, uniform(generator, dtype, 1.0, 3.0, *size), p], 1)


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


def shape_of(inputs: Inputs) -> Shape:
    return named("BTD", inputs["k"])


WORKLOAD = Workload(
    op="wkv",
    reference=with_final_state(wkv_reference),
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=at_most(B=2, T=300, D=40),
    implementations=ours(wkv),
    shapes={
        "quick": ({"B": 8, "T": 2048, "D": 2048},),
        "paper": ({"B": 8, "T": 1024, "D": 768}, {"B": 1, "T": 32768, "D": 2048}),
    },
    keep=("log_decay", "bonus", "initial_state"),
    small=(
        {"B": 2, "T": 20, "D": 5, "state": "given"},
        {"B": 1, "T": 9, "D": 3},
        {"B": 1, "T": 65, "D": 2, "state": "given"},
    ),
    time={"k": 1, "v": 1},
    states=("initial_state",),
    floors={"k": 2.0, "log_decay": 2.0},
)


def step_reference(state: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    along_time = {name: inputs.pop(name).unsqueeze(1) for name in "kv"}
    y, state = wkv_reference(**along_time, **inputs, initial_state=state)
    return y.squeeze(1), state


def make_step_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """One position, and a state in float32."""
    inputs = make_inputs({**shape, "T": 1}, dtype, generator)
    now = {name: inputs[name].squeeze(1) for name in "kv"}
    return {**inputs, **now, "state": make_state(shape, inputs["bonus"].dtype, generator)}


def step_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The cost of one position, and of reading and writing the state."""
    once = {**shape, "T": 1}
    now = cost(once, dtype, False)
    state = 2 * 3 * shape_elements(once) * max(4, dtype.itemsize)
    return Cost(now.num_bytes + state, num_flops=now.num_flops, num_exponentials=now.num_exponentials)


def step_shape_of(inputs: Inputs) -> Shape:
    return named("BD", inputs["k"])


STEP = Workload(
    op="wkv_step",
    reference=step_reference,
    make_inputs=make_step_inputs,
    cost=step_cost,
    shape_of=step_shape_of,
    short=at_most(B=2, D=40),
    implementations=ours(wkv_step, updated),
    shapes={"quick": ({"B": 64, "D": 2048},), "paper": ({"B": 1, "D": 2048},)},
    keep=("log_decay", "bonus", "state"),
    backward=False,
    small=({"B": 2, "D": 5},),
    states=("state",),
    in_place=("state",),
)
