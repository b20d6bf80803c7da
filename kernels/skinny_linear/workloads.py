"""The benchmark's description of linear maps of few rows.

D is the number of channels, O that of outputs. The forms are those of a layer: `norm` maps into it, behind an RMS norm;
`residual` maps out of it, onto the residual stream; `swiglu` does so behind a gate. The sizes are those of Mamba 1.4B
and of a transformer of the same width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.skinny_linear import Norm, skinny_linear
from subquad.kernels.skinny_linear.reference import skinny_linear_reference
from subquad.kernels.workload import Cost, Inputs, Shape, Workload, at_most, normal, ours, sizes, uniform


def _with_norm(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator with the weight of its RMS norm as an argument of its own."""

    def run(norm_weight: Tensor | None = None, **inputs: Any) -> Tensor:
        norm = None if norm_weight is None else Norm("rms", norm_weight, None, 1e-5)
        return op(**inputs, norm=norm)

    return run


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    batch, width, outputs = sizes(shape, "BDO")
    inputs: Inputs = {
        "x": normal(generator, dtype, batch, width),
        "weight": normal(generator, dtype, outputs, width) * width**-0.5,
    }
    if shape["form"] == "norm":
        inputs["norm_weight"] = uniform(generator, torch.promote_types(dtype, torch.float32), 0.5, 1.5, width)
    else:
        inputs["residual"] = normal(generator, dtype, batch, outputs)
    if shape["form"] == "swiglu":
        inputs["gate"] = normal(generator, dtype, batch, width)
    return inputs


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The weights once, and the rows beside them."""
    batch, width, outputs = sizes(shape, "BDO")
    size, form = dtype.itemsize, shape["form"]
    rows = batch * (width * (2 if form == "swiglu" else 1) + outputs * (1 if form == "norm" else 2))
    norm = width * max(4, size) if form == "norm" else 0
    return Cost(
        num_bytes=(outputs * width + rows) * size + norm,
        num_flops=2 * batch * outputs * width,
        matrix=True,
        num_exponentials=batch * width if form == "swiglu" else 0,
    )


def limits(shape: Shape, dtype: torch.dtype) -> str | None:
    if dtype.itemsize != 2:
        return f"takes weights in half precision only, not in {dtype}"
    return "takes norms and gates of one row only" if shape["B"] != 1 and shape["form"] != "residual" else None


WORKLOAD = Workload(
    op="skinny_linear",
    reference=_with_norm(skinny_linear_reference),
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(B=2, D=160, O=48),
    implementations=ours(skinny_linear, _with_norm, supports=limits),
    shapes={
        "quick": ({"B": 1, "D": 2048, "O": 8192, "form": "norm"}, {"B": 16, "D": 4096, "O": 2048, "form": "residual"}),
        "paper": (
            {"B": 1, "D": 2048, "O": 8192, "form": "norm"},
            {"B": 1, "D": 5464, "O": 2048, "form": "swiglu"},
            {"B": 1, "D": 2048, "O": 50304, "form": "norm"},
            *({"B": batch, "D": 4096, "O": 2048, "form": "residual"} for batch in (1, 4, 16, 64)),
        ),
    },
    keep=("norm_weight",),
    backward=False,
    small=(
        {"B": 1, "D": 40, "O": 20, "form": "norm"},
        {"B": 1, "D": 40, "O": 20, "form": "swiglu"},
        {"B": 3, "D": 40, "O": 20, "form": "residual"},
    ),
)
