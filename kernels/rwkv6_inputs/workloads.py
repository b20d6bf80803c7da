"""The benchmark's description of the inputs of RWKV-6's linear attention, in the sizes of a layer of width 2048."""

from __future__ import annotations

import torch

from subquad.kernels.rwkv6_inputs import rwkv6_inputs
from subquad.kernels.rwkv6_inputs.reference import rwkv6_inputs_reference
from subquad.kernels.workload import Cost, Inputs, Shape, Workload, at_most, normal, ours, sizes, uniform

PARAMETERS = ("w_0", "bonus")


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Decays as at the start of a network; the bonus is such that own is of order one."""
    batch, length, heads, key = sizes(shape, "BTHK")
    wide = torch.promote_types(dtype, torch.float32)
    width = heads * key
    return {
        **{name: normal(generator, dtype, batch, length, width) for name in "rkvw"},
        "w_0": uniform(generator, wide, -6.0, -1.0, width),
        "bonus": normal(generator, wide, width) * key**-0.5,
        "head_dim": key,
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Four inputs are read and q, log_decay and own written, the last two in float32. k and v are not copied.

    The backward pass reads the inputs and the gradients of the five results, and writes four.
    """
    batch, length, heads, key = sizes(shape, "BTHK")
    size, element, wide = batch * length * heads * key, dtype.itemsize, max(4, dtype.itemsize)
    num_bytes = size * (5 * element + 2 * wide) + (size * (11 * element + 2 * wide) if backward else 0)
    return Cost(
        num_bytes=num_bytes,
        num_flops=(22 if backward else 6) * size,
        num_exponentials=(2 if backward else 1) * size,
    )


PAPER: tuple[Shape, ...] = ({"B": 8, "T": 2048, "H": 32, "K": 64},)

WORKLOAD = Workload(
    op="rwkv6_inputs",
    reference=rwkv6_inputs_reference,
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(B=2, T=20, H=3),
    implementations=ours(rwkv6_inputs),
    shapes={"quick": PAPER, "paper": PAPER},
    keep=PARAMETERS,
    # channels and positions that fill no tile, a whole tile, several programs of the backward pass, tiles with several
    # short sequences
    small=tuple(
        {"B": batch, "T": length, "H": heads, "K": key}
        for batch, length, heads, key in ((3, 7, 3, 5), (2, 8, 2, 64), (2, 150, 1, 64), (90, 3, 1, 32))
    ),
)
