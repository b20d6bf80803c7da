"""The benchmark's description of `ssd`: B batch, T time, H heads, G heads of q and k, K keys, V values.

`rule` names the weights of a shape: `euler` has w = n (Mamba-2), `trapezoid` has both (Mamba-3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from subquad.kernels.gated_linear_attention.workloads import products
from subquad.kernels.ssd import ssd, ssd_steps
from subquad.kernels.ssd.reference import ssd_reference
from subquad.kernels.ssd.steps import ssd_steps_reference
from subquad.kernels.workload import (
    Cost,
    Inputs,
    Shape,
    Workload,
    at_most,
    initial_state,
    named,
    normal,
    ours,
    sizes,
    traffic,
    uniform,
)

KEEP = ("log_decay", "write", "own", "skip")


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Step sizes below one, and decays by which a state forgets about half in ten positions."""
    batch, length, heads, groups, keys, values = sizes(shape, "BTHGKV")
    wide, of_heads = torch.promote_types(dtype, torch.float32), (batch, length, heads)
    inputs = {
        "q": normal(generator, dtype, batch, length, groups, keys) * keys**-0.5,
        "k": normal(generator, dtype, batch, length, groups, keys),
        "v": normal(generator, dtype, batch, length, heads, values),
        "log_decay": F.logsigmoid(normal(generator, wide, *of_heads)).div_(8),
        "write": uniform(generator, wide, 0.1, 0.9, *of_heads),
        "skip": normal(generator, wide, heads),
    }
    if shape["rule"] == "trapezoid":
        inputs["own"] = uniform(generator, wide, 0.1, 0.9, *of_heads)
    return inputs | initial_state(shape, dtype, generator, batch, heads, keys, values)


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The products of gated linear attention, which counts the scores of every head."""
    batch, length, heads, groups, keys, values = sizes(shape, "BTHGKV")
    positions, wide = batch * length * heads, max(4, dtype.itemsize)
    shared = 2 * batch * length * groups * keys
    weights = 3 if shape["rule"] == "trapezoid" else 2
    inputs = (shared + positions * values) * dtype.itemsize + positions * weights * wide
    return Cost(
        num_bytes=traffic(inputs, positions * values * dtype.itemsize, backward),
        num_flops=2 * positions * products(keys, values, backward),
        matrix=True,
    )


def shape_of(inputs: Inputs) -> Shape:
    own = inputs["own"]
    rule = "euler" if own is None else "trapezoid"
    return named("BTHV", inputs["v"], G=inputs["q"].shape[2], K=inputs["q"].shape[3], rule=rule)


MAMBA2: Shape = {"B": 8, "T": 2048, "H": 24, "G": 1, "K": 128, "V": 64, "rule": "euler"}
MAMBA3: Shape = {"B": 8, "T": 2048, "H": 24, "G": 24, "K": 128, "V": 64, "rule": "trapezoid"}

WORKLOAD = Workload(
    op="ssd",
    reference=ssd_reference,
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=at_most(B=2, T=130, H=2, G=2),
    implementations=ours(ssd),
    shapes={
        "quick": (MAMBA2, MAMBA3),
        "paper": (MAMBA2, MAMBA3, {**MAMBA2, "B": 32}, {**MAMBA3, "B": 32}, {**MAMBA2, "B": 1, "T": 16384, "H": 64}),
    },
    keep=(*KEEP, "initial_state"),
    states=("initial_state",),
    # one group and several, a chunk that is not full, one position, sizes beside those of tiles
    small=(
        {"B": 2, "T": 70, "H": 4, "G": 1, "K": 16, "V": 16, "rule": "euler", "state": "given"},
        {"B": 1, "T": 130, "H": 4, "G": 2, "K": 20, "V": 24, "rule": "trapezoid"},
        {"B": 2, "T": 33, "H": 3, "G": 3, "K": 8, "V": 5, "rule": "trapezoid", "state": "given"},
        {"B": 1, "T": 1, "H": 2, "G": 1, "K": 4, "V": 4, "rule": "euler"},
    ),
    time=dict.fromkeys(("q", "k", "v", "log_decay", "write", "own"), 1),
)


def make_steps(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Step sizes of about 0.01 to 0.7. Rates of the trapezoidal rule are raised to `least` in some positions."""
    batch, length, heads = sizes(shape, "BTH")
    wide, of_heads = torch.promote_types(dtype, torch.float32), (batch, length, heads)
    inputs: Inputs = {
        "x": normal(generator, dtype, *of_heads),
        "bias": uniform(generator, wide, -4.0, -1.0, heads),
        "rate": uniform(generator, dtype, 1.0, 16.0, heads),
    }
    if shape["rule"] == "trapezoid":
        inputs |= {name: normal(generator, dtype, *of_heads) for name in ("rate", "share")}
        inputs["least"] = 0.3
    return inputs


def steps_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Six operations an exponential."""
    batch, length, heads = sizes(shape, "BTH")
    elements, terms = batch * length * heads, 3 if shape["rule"] == "trapezoid" else 1
    exponentials = (2 if backward else 1) * elements * terms
    outputs = elements * 4 * (4 if terms == 3 else 2)
    num_bytes = traffic(elements * terms * dtype.itemsize, outputs, backward)
    return Cost(num_bytes=num_bytes, num_flops=6 * exponentials, num_exponentials=exponentials)


STEPS = Workload(
    op="ssd_steps",
    reference=ssd_steps_reference,
    make_inputs=make_steps,
    cost=steps_cost,
    short=at_most(B=2, T=70, H=5),
    implementations=ours(ssd_steps),
    shapes={
        "quick": ({"B": 8, "T": 2048, "H": 24, "rule": "euler"}, {"B": 8, "T": 2048, "H": 24, "rule": "trapezoid"}),
        "paper": ({"B": 8, "T": 2048, "H": 64, "rule": "euler"}, {"B": 8, "T": 2048, "H": 64, "rule": "trapezoid"}),
    },
    keep=("bias",),
    # heads that are no power of two, more than one tile, one position
    small=(
        {"B": 2, "T": 300, "H": 5, "rule": "trapezoid"},
        {"B": 3, "T": 7, "H": 3, "rule": "euler"},
        {"B": 2, "T": 1, "H": 2, "rule": "trapezoid"},
    ),
)
