"""The benchmark's description of forget gates, in the sizes of HGRN2 and GSA of 1.3B parameters, and of KDA.

O is the number of layers whose logits make the bounds of a `bounded` gate, and H that of the rates of a `rated` one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.forget_gate import forget_gate
from subquad.kernels.forget_gate.reference import forget_gate_reference
from subquad.kernels.workload import Cost, Inputs, Shape, Workload, at_most, normal, ours, sizes, traffic, uniform


def _with_layer(op: Callable[..., Any]) -> Callable[..., Any]:
    """The operator in the second layer, or damped by 8 where there are no bounds.

    In late layers the bounds are near 1 and the logarithms of the gates near 0, which tests no accuracy.
    """

    def run(x: Tensor, logits: Tensor | None = None, bias: Tensor | None = None, log_rate: Tensor | None = None) -> Any:
        if logits is not None:
            return op(x, logits, layer=min(1, len(logits) - 1))
        return op(x, damping=8.0) if log_rate is None else op(x, bias=bias, log_rate=log_rate)

    return run


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, width, layers = sizes(shape, "RDO")
    inputs: Inputs = {"x": normal(generator, dtype, rows, width)}
    if shape["gate"] == "bounded":
        inputs["logits"] = normal(generator, torch.promote_types(dtype, torch.float32), layers, width)
    if shape["gate"] == "rated":
        wide = torch.promote_types(dtype, torch.float32)
        inputs["bias"] = normal(generator, wide, width)
        inputs["log_rate"] = uniform(generator, wide, -0.7, 0.7, sizes(shape, "H")[0])
    return inputs


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """x and the parameters once, and both results in float32; backward the same again, and gradients."""
    rows, width, layers = sizes(shape, "RDO")
    layers *= shape["gate"] == "bounded"
    size, passes = rows * width, 2 if backward else 1
    read = size * dtype.itemsize + 4 * layers * width
    if shape["gate"] == "rated":
        read += 4 * (width + sizes(shape, "H")[0])
    return Cost(
        num_bytes=traffic(read, 8 * size, backward),
        num_flops=10 * size * passes,
        num_exponentials=(2 * size + layers * width) * passes,
    )


PAPER: tuple[Shape, ...] = (
    {"R": 1, "D": 2048, "O": 24, "gate": "bounded"},
    {"R": 16384, "D": 2048, "O": 24, "gate": "bounded"},
    {"R": 1, "D": 256, "O": 1, "gate": "damped"},
    {"R": 16384, "D": 256, "O": 1, "gate": "damped"},
    {"R": 16384, "D": 1024, "O": 1, "gate": "rated", "H": 8},
)

WORKLOAD = Workload(
    op="forget_gate",
    reference=_with_layer(forget_gate_reference),
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(R=70, D=144),
    implementations=ours(forget_gate, _with_layer),
    shapes={"quick": PAPER[:1], "paper": PAPER},
    keep=("logits", "bias", "log_rate"),
    small=(
        {"R": 3, "D": 20, "O": 4, "gate": "bounded"},
        {"R": 3, "D": 20, "O": 1, "gate": "damped"},
        {"R": 90, "D": 160, "O": 1, "gate": "rated", "H": 5},
    ),
)
