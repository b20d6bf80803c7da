"""The benchmark's description of the token shift, in the sizes of a layer of width 2048."""

from __future__ import annotations

import torch

from subquad.kernels.token_shift import token_shift
from subquad.kernels.token_shift.reference import token_shift_reference
from subquad.kernels.workload import Cost, Inputs, Shape, Workload, at_most, normal, ours, sizes, traffic, uniform


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """mu over its whole range. `delta` says whether the factors depend on the data, as in RWKV-6."""
    batch, length, width, uses = sizes(shape, "BTDU")
    wide = torch.promote_types(dtype, torch.float32)
    changes = normal(generator, dtype, uses, batch, length, width) * 0.5 if shape["delta"] == "yes" else None
    return {
        "x": normal(generator, dtype, batch, length, width),
        "mu": uniform(generator, wide, 0.0, 1.0, uses, width),
        "delta": changes,
        **({"initial_state": normal(generator, dtype, batch, width)} if shape.get("state") == "given" else {}),
        **({"weighs": shape["weighs"]} if "weighs" in shape else {}),
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """x and delta are read and U results written; the backward pass reads all of them and writes the gradients."""
    batch, length, width, uses = sizes(shape, "BTDU")
    size = batch * length * width
    num_inputs = 1 + (uses if shape["delta"] == "yes" else 0)
    mu = uses * width * max(4, dtype.itemsize)
    num_bytes = traffic(num_inputs * size * dtype.itemsize + mu, uses * size * dtype.itemsize, backward)
    return Cost(num_bytes=num_bytes, num_flops=(11 if backward else 4) * uses * size)


LAYER: Shape = {"B": 8, "T": 2048, "D": 2048}
RWKV6: Shape = {**LAYER, "U": 5, "delta": "yes"}
RWKV7: Shape = {**LAYER, "U": 6, "delta": "no"}

WORKLOAD = Workload(
    op="token_shift",
    reference=token_shift_reference,
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(B=2, T=40, D=96),
    implementations=ours(token_shift),
    shapes={
        "quick": (RWKV6, RWKV7),
        # the shift with mu_x in front of the low-rank maps of RWKV-6, and that of RWKV-4
        "paper": (RWKV6, RWKV7, {**LAYER, "U": 1, "delta": "no"}, {**LAYER, "U": 3, "delta": "no"}),
    },
    keep=("mu",),
    small=(
        {"B": 3, "T": 19, "D": 6, "U": 5, "delta": "yes", "state": "given"},
        {"B": 2, "T": 7, "D": 5, "U": 3, "delta": "no"},
        # chunks that cross sequences, several tiles of channels, one position, and mu as the factor of the present
        {"B": 3, "T": 45, "D": 24, "U": 2, "delta": "yes"},
        {"B": 1, "T": 3, "D": 600, "U": 2, "delta": "no", "state": "given"},
        {"B": 2, "T": 1, "D": 16, "U": 6, "delta": "no"},
        {"B": 2, "T": 9, "D": 12, "U": 3, "delta": "no", "state": "given", "weighs": "now"},
    ),
    time={"x": 1, "delta": 2},
    states=("initial_state",),
)
