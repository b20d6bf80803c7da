"""The benchmark's description of rotated keys, in the sizes of Mamba-3: B batch, T time, H heads, N states, R pairs."""

from __future__ import annotations

import torch

from subquad.kernels.rotated_keys import rotated_keys
from subquad.kernels.rotated_keys.reference import rotated_keys_reference
from subquad.kernels.workload import Cost, Inputs, Shape, Workload, at_most, normal, ours, sizes, traffic, uniform

KEEP = ("B_weight", "C_weight", "B_bias", "C_bias", "dt")


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Steps and biases of a model at its start."""
    batch, length, heads, states, pairs = sizes(shape, "BTHNR")
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "B": normal(generator, dtype, batch, length, states),
        "C": normal(generator, dtype, batch, length, states),
        "B_weight": 1 + normal(generator, wide, states) / 4,
        "C_weight": 1 + normal(generator, wide, states) / 4,
        "B_bias": 1 + normal(generator, wide, heads, states) / 4,
        "C_bias": 1 + normal(generator, wide, heads, states) / 4,
        "dt": uniform(generator, wide, 0.01, 0.1, batch, length, heads),
        "w": normal(generator, dtype, batch, length, pairs),
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """A rotation is 6 operations for each pair, a bias one for each element."""
    batch, length, heads, states, pairs = sizes(shape, "BTHNR")
    rows, wide = batch * length, max(4, dtype.itemsize)
    of_heads = rows * heads
    read = rows * (2 * states + pairs) * dtype.itemsize + (2 * heads * states + of_heads) * wide
    written = 2 * of_heads * states * dtype.itemsize
    return Cost(
        num_bytes=traffic(read, written, backward),
        num_flops=(3 if backward else 1) * of_heads * (14 * pairs + 2 * states),
        num_exponentials=(2 if backward else 1) * of_heads * 2 * pairs,
    )


PAPER: tuple[Shape, ...] = (
    {"B": 8, "T": 2048, "H": 64, "N": 128, "R": 32},
    {"B": 1, "T": 16384, "H": 64, "N": 128, "R": 32},
    {"B": 8, "T": 2048, "H": 32, "N": 64, "R": 16},
)

WORKLOAD = Workload(
    op="rotated_keys",
    reference=rotated_keys_reference,
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(B=2, T=20, H=3),
    implementations=ours(rotated_keys),
    shapes={"quick": PAPER[:1], "paper": PAPER},
    keep=KEEP,
    # neither pairs nor what is left are a power of two; all channels rotate; one position
    small=(
        {"B": 2, "T": 20, "H": 3, "N": 9, "R": 4},
        {"B": 3, "T": 11, "H": 2, "N": 17, "R": 3},
        {"B": 1, "T": 5, "H": 2, "N": 6, "R": 3},
        {"B": 1, "T": 1, "H": 1, "N": 2, "R": 1},
    ),
)
