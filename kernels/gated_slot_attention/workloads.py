"""Benchmark workload of gated slot attention: sizes of its paper (64 slots, 4 heads) and of the MQAR figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.gated_linear_attention.workloads import products
from subquad.kernels.gated_slot_attention import gated_slot_attention
from subquad.kernels.gated_slot_attention.reference import gated_slot_attention_reference
from subquad.kernels.workload import (
    FINAL,
    Cost,
    Implementation,
    Inputs,
    Shape,
    Workload,
    at_most,
    first,
    named,
    normal,
    ours,
    sizes,
    traffic,
)

DAMPING = 8


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Decays are sigmoid(x)^(1/8) and slots one minus the decays, as in the layer.

    Both have the dtype of q, in which the peer was measured.
    """
    batch, length, heads, key_dim, value_dim, num_slots = sizes(shape, "BTHKVM")
    positions = (batch, length, heads)
    q, k = (normal(generator, dtype, *positions, key_dim) for _ in "qk")
    v = normal(generator, dtype, *positions, value_dim)
    log_decay = F.logsigmoid(normal(generator, dtype, *positions, num_slots)).div_(DAMPING)
    inputs = {"q": q, "k": k, "v": v, "slots": torch.expm1(log_decay).neg_(), "log_decay": log_decay}
    if shape.get("state") == "given":
        wide = torch.promote_types(dtype, torch.float32)
        inputs["initial_keys"] = normal(generator, wide, batch, heads, key_dim, num_slots)
        inputs["initial_values"] = normal(generator, wide, batch, heads, num_slots, value_dim)
        return inputs | FINAL
    return inputs


def flat(op: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with the two parts of its states as arguments and results of their own."""

    def run(initial_keys: Tensor | None = None, initial_values: Tensor | None = None, **inputs: Any) -> Any:
        if initial_keys is not None:
            inputs["initial_state"] = (initial_keys, initial_values)
        result = op(**inputs)
        return (result[0], *result[1]) if inputs.get("return_final_state") else result

    return run


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The products of two passes of gated linear attention, K to M and M to V, in chunks of 64; softmax left out."""
    batch, length, heads, key_dim, value_dim, num_slots = sizes(shape, "BTHKVM")
    positions = batch * length * heads
    inputs = positions * (2 * key_dim + value_dim + 2 * num_slots) * dtype.itemsize
    both = products(key_dim, num_slots, backward) + products(num_slots, value_dim, backward)
    return Cost(
        num_bytes=traffic(inputs, positions * value_dim * dtype.itemsize, backward),
        num_flops=2 * positions * both,
        matrix=True,
    )


def load_fla() -> Callable[..., Any]:
    from fla.ops.gsa import chunk_gsa

    def peer(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, log_decay: Tensor) -> Any:
        return chunk_gsa(q, k, v, slots, log_decay)

    return peer


def shape_of(inputs: Inputs) -> Shape:
    return named("BTHV", inputs["v"], K=inputs["q"].shape[-1], M=inputs["slots"].shape[-1])


WORKLOAD = Workload(
    op="gated_slot_attention",
    reference=flat(gated_slot_attention_reference),
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=at_most(B=2, T=130, H=2),
    implementations=(
        *ours(gated_slot_attention, flat),
        Implementation("flash-linear-attention", "peer", load_fla, from_native=first, packages=("fla-core",)),
    ),
    shapes={
        "quick": ({"B": 64, "T": 512, "H": 2, "K": 32, "V": 64, "M": 64},),
        "paper": (
            {"B": 8, "T": 2048, "H": 4, "K": 512, "V": 512, "M": 64},
            {"B": 1, "T": 16384, "H": 4, "K": 512, "V": 512, "M": 64},
            {"B": 64, "T": 512, "H": 2, "K": 32, "V": 64, "M": 64},
        ),
    },
    keep=("initial_keys", "initial_values"),
    small=(
        {"B": 1, "T": 70, "H": 1, "K": 8, "V": 12, "M": 5, "state": "given"},
        {"B": 2, "T": 20, "H": 2, "K": 5, "V": 4, "M": 8},
    ),
    time={"q": 1, "k": 1, "v": 1, "slots": 1, "log_decay": 1},
    states=("initial_keys", "initial_values"),
)
