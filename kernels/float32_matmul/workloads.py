"""The benchmark's description of float32 products, in the sizes of associative recall.

A is [R, D] and B [D, O]. `layout` says which of them is stored by columns: `map` is a linear map (B), `input` the
gradient of its input (neither), and `weight` that of its weight (A).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from subquad.kernels.float32_matmul import float32_matmul
from subquad.kernels.float32_matmul.reference import float32_matmul_reference
from subquad.kernels.workload import Cost, Implementation, Inputs, Shape, Workload, at_most, normal, ours, sizes


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, columns, depth = sizes(shape, "ROD")
    a = (
        normal(generator, dtype, depth, rows).t()
        if shape["layout"] == "weight"
        else normal(generator, dtype, rows, depth)
    )
    b = (
        normal(generator, dtype, columns, depth).t()
        if shape["layout"] == "map"
        else normal(generator, dtype, depth, columns)
    )
    return {"a": a, "b": b * depth**-0.5}


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Both factors and the product once. The FLOPs count each product once, not three times."""
    rows, columns, depth = sizes(shape, "ROD")
    num_elements = rows * depth + depth * columns + rows * columns
    return Cost(num_bytes=num_elements * dtype.itemsize, num_flops=2 * rows * columns * depth, matrix=True)


def load_parts() -> Callable[..., Tensor]:
    import triton  # noqa: F401

    from subquad.kernels.float32_matmul.parts import Parts, parts_matmul, split

    def parts(x: Tensor) -> Parts:
        return split(x) if x.stride(1) == 1 else split(x.t()).t()

    def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return parts_matmul(parts(a), parts(b), bias)

    return product


def single_only(shape: Shape, dtype: torch.dtype) -> str | None:
    return None if dtype == torch.float32 else f"takes float32, not {dtype}"


PAPER: tuple[Shape, ...] = (
    {"R": 65536, "O": 384, "D": 128, "layout": "map"},
    {"R": 65536, "O": 128, "D": 384, "layout": "input"},
    {"R": 384, "O": 128, "D": 65536, "layout": "weight"},
    {"R": 8192, "O": 8192, "D": 128, "layout": "map"},
    {"R": 8192, "O": 128, "D": 8192, "layout": "input"},
    {"R": 8192, "O": 128, "D": 8192, "layout": "weight"},
)

WORKLOAD = Workload(
    op="float32_matmul",
    reference=float32_matmul_reference,
    make_inputs=make_inputs,
    cost=cost,
    short=at_most(R=200, O=150, D=300),
    implementations=(
        *ours(float32_matmul, supports=single_only),
        # the parts are made for one product here, while linear maps and readouts make them for several
        Implementation("parts", "ours", load_parts, supports=single_only, cold_start=True),
    ),
    shapes={"quick": PAPER[:1], "paper": PAPER},
    dtypes=(torch.float32,),
    backward=False,
    small=tuple({"R": 20, "O": 9, "D": 33, "layout": layout} for layout in ("map", "input", "weight")),
)
