"""The benchmark's description of the gradient of embeddings, in the sizes of associative recall and language models.

What is timed as "forward" is the gradient alone, since the lookup is torch's. `filler` is the share of the tokens that
are one and the same, in percent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from subquad.kernels.embedding.reference import embedding_gradient_reference
from subquad.kernels.workload import Cost, Implementation, Inputs, Shape, Workload, at_most, normal, sizes, uniform


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, classes, width, filler = sizes(shape, ("R", "C", "D", "filler"))
    drawn = uniform(generator, torch.float32, 0, classes, rows).long().clamp(max=classes - 1)
    is_filler = uniform(generator, torch.float32, 0, 100, rows) < filler
    return {
        "tokens": drawn.where(~is_filler, 0),
        "dy": normal(generator, dtype, rows, width),
        "num_tokens": classes,
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """dy is read once, the gradient of the weight written once."""
    rows, classes, width = sizes(shape, ("R", "C", "D"))
    return Cost(num_bytes=(rows + classes) * width * dtype.itemsize + 8 * rows, num_flops=rows * width)


def load_triton() -> Callable[..., Tensor]:
    from subquad.kernels.embedding.triton import embedding_gradient

    return embedding_gradient


def load_torch() -> Callable[..., Tensor]:
    def gradient(tokens: Tensor, dy: Tensor, num_tokens: int) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(dy, tokens, num_tokens, -1, False)

    return gradient


PAPER: tuple[Shape, ...] = (
    {"R": 65536, "C": 8192, "D": 128, "filler": 50},
    {"R": 65536, "C": 8192, "D": 128, "filler": 1},
    {"R": 16384, "C": 50277, "D": 768, "filler": 1},
)

WORKLOAD = Workload(
    op="embedding",
    reference=embedding_gradient_reference,
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(R=300, C=40, D=70),
    implementations=(
        Implementation("triton", "ours", load_triton, cold_start=True),
        Implementation("torch", "ours", load_torch),
    ),
    shapes={"quick": PAPER[:1], "paper": PAPER},
    dtypes=(torch.float32,),
    backward=False,
    # few tokens, many classes of which most do not occur, runs of a token over several chunks and over all of them
    small=tuple(
        {"R": rows, "C": classes, "D": 5, "filler": filler}
        for rows, classes, filler in ((50, 7, 30), (70, 4000, 0), (300, 20, 70), (2200, 4, 100))
    ),
)
