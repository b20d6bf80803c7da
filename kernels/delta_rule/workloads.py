"""Benchmark workloads of the delta rule, of one step of it for decoding, and of the generalised rule of RWKV-7.

`decay` names the log-decay of a shape, and with it the model that the shape belongs to:

    none  no decay: DeltaNet
    head  for each head and position, logsigmoid(x) / 16: Gated DeltaNet
    key   for each key channel, logsigmoid(x) / 16: Kimi Delta Attention

Where a shape has G, its H heads of values share G heads of queries and keys. Queries and keys are unit vectors, and
beta is a sigmoid, as in the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.delta_rule import delta_rule, delta_rule_step
from subquad.kernels.delta_rule.generalised import generalised_delta_rule, generalised_delta_rule_reference
from subquad.kernels.delta_rule.reference import delta_rule_reference, step
from subquad.kernels.delta_rule.workload_peers import FLA, PEERS
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
    traffic,
)

CHUNK = 64
DAMPING = 16
FORMS = ("write", "plain")


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    batch, length, heads, key_dim, value_dim = sizes(shape, "BTHKV")
    leading = (batch, length, heads)
    shared = (batch, length, int(shape.get("G", heads)), key_dim)
    q, k = (F.normalize(normal(generator, dtype, *shared), dim=-1) for _ in "qk")
    v = normal(generator, dtype, *leading, value_dim)
    beta = torch.sigmoid(normal(generator, dtype, *leading))
    log_decay = None
    if shape["decay"] != "none":
        channels = (key_dim,) if shape["decay"] == "key" else ()
        log_decay = F.logsigmoid(normal(generator, dtype, *leading, *channels)).div_(DAMPING)
    # outputs of unit queries are of order one where the scale is one
    inputs: Inputs = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "scale": 1.0}
    # a shape may ask for `write`, another key to write with, or for `plain`, a key of values that are added as well
    for name in FORMS[: 1 + FORMS.index(str(shape["form"]))] if "form" in shape else ():
        inputs[name] = F.normalize(normal(generator, dtype, *leading, key_dim), dim=-1)
    return inputs | initial_state(shape, dtype, generator, batch, heads, key_dim, value_dim)


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Multiply-adds of matrix products for one position of one head, in chunks of C = 64 that are computed in full.

    Forward: scores of keys and of queries 2 C K, the inverse of the triangle times values and keys C (K + V), A U C V,
    and products with the state 3 K V. Backward: two products for each of them, with what forward gives at hand.
    A key of values that are added as well (`plain`) makes the forward pass that of `generalised_cost`.
    """
    batch, length, heads, key_dim, value_dim = sizes(shape, "BTHKV")
    channels = {"none": 0, "head": 1}.get(str(shape["decay"]), key_dim)
    positions = batch * length * heads
    keys = batch * length * int(shape.get("G", heads)) * key_dim
    inputs = (2 * keys + positions * (value_dim + 1 + channels)) * dtype.itemsize
    products = CHUNK * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim
    if shape.get("form") == "plain":
        products = CHUNK * (5 * key_dim + 4 * value_dim) + 4 * key_dim * value_dim
    return Cost(
        num_bytes=traffic(inputs, positions * value_dim * dtype.itemsize, backward),
        num_flops=2 * positions * products * (3 if backward else 1),
        matrix=True,
    )


def shape_of(inputs: Inputs) -> Shape:
    decay = inputs["log_decay"]
    kind = "none" if decay is None else "key" if decay.dim() == inputs["q"].dim() else "head"
    form = {} if inputs.get("plain") is None else {"form": "plain"}
    return named("BTHV", inputs["v"], K=inputs["q"].shape[-1], decay=kind, **form)


def short(shape: Shape) -> Shape:
    return {**at_most(B=2, T=130, H=2)(shape), **({"G": 1} if "G" in shape else {})}


def of_decay(decay: str) -> tuple[Shape, ...]:
    """A batch of training and one long sequence."""
    sizes_of_time = (8, 2048), (1, 16384)
    return tuple({"B": batch, "T": time, "H": 16, "K": 128, "V": 128, "decay": decay} for batch, time in sizes_of_time)


# large Gated DeltaNets have twice as many heads of values as of keys
LARGE: Shape = {"B": 1, "T": 32768, "H": 32, "G": 16, "K": 128, "V": 128, "decay": "head"}
WORKLOAD = Workload(
    op="delta_rule",
    reference=delta_rule_reference,
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=short,
    implementations=(
        *ours(delta_rule),
        *PEERS,
    ),
    shapes={
        "quick": ({"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128, "decay": "head"},),
        "paper": (
            *of_decay("none"),
            *of_decay("head"),
            *of_decay("key"),
            LARGE,
            # a length that the kernels for Hopper do not take
            {"B": 8, "T": 2000, "H": 16, "K": 128, "V": 128, "decay": "head"},
        ),
        "arena": (
            *of_decay("head"),
            LARGE,
        ),
    },
    keep=("initial_state",),
    small=(
        {"B": 1, "T": 70, "H": 2, "K": 8, "V": 12, "decay": "key", "state": "given"},
        {"B": 2, "T": 20, "H": 1, "K": 8, "V": 4, "decay": "head", "state": "given"},
        {"B": 1, "T": 20, "H": 2, "K": 5, "V": 9, "decay": "none"},
        {"B": 1, "T": 20, "H": 1, "K": 8, "V": 4, "decay": "key", "state": "given", "form": "plain"},
        {"B": 1, "T": 20, "H": 4, "G": 2, "K": 8, "V": 12, "decay": "head", "state": "given"},
        {"B": 1, "T": 10, "H": 2, "G": 1, "K": 8, "V": 4, "decay": "none", "state": "given"},
        {"B": 1, "T": 10, "H": 2, "G": 1, "K": 5, "V": 9, "decay": "key", "state": "given", "form": "write"},
    ),
    time={"q": 1, "k": 1, "v": 1, "beta": 1, "log_decay": 1, "write": 1, "plain": 1},
    states=("initial_state",),
)


def step_reference(state: Tensor, **inputs: Any) -> Any:
    return step(state=state, **inputs)


def make_step_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """One position, and a state in float32."""
    inputs = make_inputs({**shape, "T": 1}, dtype, generator)
    now = {name: x.squeeze(1) for name, x in inputs.items() if isinstance(x, Tensor)}
    state = normal(generator, torch.promote_types(dtype, torch.float32), *sizes(shape, "BHKV"))
    return {**inputs, **now, "state": state}


def step_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """One position; the state is read, decayed, multiplied with k, added to, multiplied with q, and written."""
    once = cost({**shape, "T": 1}, dtype, False)
    batch, heads, key_dim, value_dim = sizes(shape, "BHKV")
    elements = batch * heads * key_dim * value_dim
    return Cost(num_bytes=once.num_bytes + 2 * elements * max(4, dtype.itemsize), num_flops=7 * elements)


def step_shape_of(inputs: Inputs) -> Shape:
    return named("BHKV", inputs["state"], decay="none")


STEP = Workload(
    op="delta_rule_step",
    reference=step_reference,
    make_inputs=make_step_inputs,
    cost=step_cost,
    shape_of=step_shape_of,
    short=at_most(B=2, H=2),
    implementations=ours(delta_rule_step),
    shapes={
        "quick": ({"B": 64, "H": 16, "K": 128, "V": 128, "decay": "head"},),
        "paper": tuple(
            {"B": batch, "H": 16, "K": 128, "V": 128, "decay": decay}
            for batch in (1, 64)
            for decay in ("none", "head", "key")
        ),
    },
    keep=("state",),
    states=("state",),
    backward=False,
    small=(
        {"B": 2, "H": 2, "K": 5, "V": 12, "decay": "key", "form": "write"},
        {"B": 2, "H": 2, "K": 5, "V": 12, "decay": "head"},
        {"B": 2, "H": 1, "K": 5, "V": 12, "decay": "none"},
        {"B": 1, "H": 1, "K": 130, "V": 300, "decay": "key"},
        {"B": 2, "H": 6, "G": 2, "K": 5, "V": 12, "decay": "head"},
    ),
)


def make_generalised_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """RWKV-7 has such inputs: it removes a unit vector and adds a share of it, and no decay is below exp(-0.606)."""
    batch, length, heads, key_dim, value_dim = sizes(shape, "BTHKV")
    leading = (batch, length, heads)
    unit, q, k = (F.normalize(normal(generator, dtype, *leading, key_dim), dim=-1) for _ in range(3))
    share = torch.sigmoid(normal(generator, dtype, *leading, key_dim))
    log_decay = -0.606 * torch.sigmoid(normal(generator, torch.promote_types(dtype, torch.float32), *leading, key_dim))
    v = normal(generator, dtype, *leading, value_dim)
    return {"q": q, "k": k, "v": v, "remove": -unit, "add": share * unit, "log_decay": log_decay}


def generalised_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Multiply-adds of matrix products for one position of one head, in chunks of C = 64 that are computed in full.

    Forward: four kinds of scores 4 C K, the inverse of the triangle times V + K columns, its right side C V and the two
    parts of the output 2 C V, and products with the state 4 K V. Backward: two products for each of them.
    """
    batch, length, heads, key_dim, value_dim = sizes(shape, "BTHKV")
    positions = batch * length * heads
    inputs = positions * ((4 * key_dim + value_dim) * dtype.itemsize + key_dim * max(4, dtype.itemsize))
    states = batch * heads * key_dim * value_dim * max(4, dtype.itemsize)
    products = CHUNK * (5 * key_dim + 4 * value_dim) + 4 * key_dim * value_dim
    return Cost(
        num_bytes=traffic(inputs, positions * value_dim * dtype.itemsize + states, backward),
        num_flops=2 * positions * products * (3 if backward else 1),
        matrix=True,
    )


def load_fla_rwkv7() -> Callable[..., Any]:
    """flash-linear-attention's chunked operator of RWKV-7."""
    from fla.ops.rwkv7 import chunk_rwkv7

    def peer(q: Tensor, k: Tensor, v: Tensor, remove: Tensor, add: Tensor, log_decay: Tensor) -> Any:
        return chunk_rwkv7(r=q, w=log_decay, k=k, v=v, a=remove, b=add, output_final_state=True)

    return peer


GENERALISED = Workload(
    op="generalised_delta_rule",
    reference=generalised_delta_rule_reference,
    make_inputs=make_generalised_inputs,
    cost=generalised_cost,
    short=at_most(B=2, T=130, H=2),
    implementations=(
        *ours(generalised_delta_rule),
        Implementation("flash-linear-attention", "peer", load_fla_rwkv7, packages=FLA),
    ),
    shapes={
        "quick": ({"B": 8, "T": 2048, "H": 32, "K": 64, "V": 64},),
        "paper": tuple(
            {"B": batch, "T": length, "H": 32, "K": 64, "V": 64} for batch, length in ((8, 2048), (1, 16384))
        ),
    },
    keep=("log_decay",),
    small=({"B": 1, "T": 70, "H": 1, "K": 8, "V": 8}, {"B": 2, "T": 10, "H": 2, "K": 5, "V": 12}),
    time={"q": 1, "k": 1, "v": 1, "remove": 1, "add": 1, "log_decay": 1},
)
