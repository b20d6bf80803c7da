"""The benchmark's description of the inputs of RWKV-7's delta rule, in the sizes of a layer of width 2048."""

from __future__ import annotations

import torch

from subquad.kernels.rwkv7_inputs import rwkv7_inputs
from subquad.kernels.rwkv7_inputs.reference import rwkv7_inputs_reference
from subquad.kernels.workload import Cost, Inputs, Shape, Workload, at_most, normal, ours, sizes, uniform

PARAMETERS = ("w_0", "a_0", "xi", "alpha", "rho")


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Decays and rates over their whole range; rho is larger than at the start of a network, where own is small."""
    batch, length, heads, key = sizes(shape, "BTHK")
    wide = torch.promote_types(dtype, torch.float32)
    width = heads * key
    return {
        **{name: normal(generator, dtype, batch, length, width) for name in "rkwa"},
        "w_0": normal(generator, wide, width),
        "a_0": normal(generator, wide, width),
        "xi": uniform(generator, wide, 0.5, 1.0, width),
        "alpha": uniform(generator, wide, 0.5, 1.5, width),
        "rho": normal(generator, wide, width) * key**-0.5,
        "head_dim": key,
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Four inputs are read, and k, write, plain, log_decay and b written, the last two in float32. r is not copied.

    The backward pass reads the inputs and the gradients of the six results, and writes four.
    """
    batch, length, heads, key = sizes(shape, "BTHK")
    size, element, wide = batch * length * heads * key, dtype.itemsize, max(4, dtype.itemsize)
    num_bytes = size * (7 * element + wide) + (size * (12 * element + wide) if backward else 0)
    num_bytes += (2 if backward else 1) * batch * length * heads * wide
    return Cost(
        num_bytes=num_bytes,
        num_flops=(90 if backward else 25) * size,
        num_exponentials=(6 if backward else 3) * size,
    )


PAPER: tuple[Shape, ...] = ({"B": 8, "T": 2048, "H": 32, "K": 64},)

WORKLOAD = Workload(
    op="rwkv7_inputs",
    reference=rwkv7_inputs_reference,
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(B=2, T=20, H=3),
    implementations=ours(rwkv7_inputs),
    shapes={"quick": PAPER, "paper": PAPER},
    keep=PARAMETERS,
    # channels and positions that fill no tile, a whole tile, several programs of the backward pass
    small=tuple(
        {"B": batch, "T": length, "H": heads, "K": key}
        for batch, length, heads, key in ((3, 7, 3, 5), (2, 4, 2, 64), (3, 90, 1, 32))
    ),
    time=dict.fromkeys("rkwa", 1),
)
