"""The gated linear unit in Triton: one pass over memory in each direction.

With g, u the halves of x and σ the logistic function:

    y = g σ(g) u,   dg = dy u σ(g) (1 + g (1 - σ(g))),   du = dy g σ(g)

In front of a linear map the backward pass also writes y, which the gradient of the weight reads; only x is kept.

Layout: x [R, 2 F] and y [R, F], dense, where R counts all axes but the last. float32: everything between a load and a
store. Bytes: 3 elements for each of R F forward, 5 backward and 6 with y. FLOPs: about 5 forward and 10 backward, and
one exponential. Deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, product_backward, product_forward, save, saved
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense

COLUMNS, ELEMENTS = 256, 2048
"""Maximum columns of a tile, and its elements: 16 for each thread."""


@triton.jit
def _offsets(R, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows [ROWS, 1], columns [1, COLUMNS] and the mask of the tile of this program; y is F wide."""
    num_f = tl.cdiv(F, COLUMNS)
    o_r = ((tl.program_id(0) // num_f) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    o_f = (tl.program_id(0) % num_f * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return o_r, o_f, (o_r < R) & (o_f < F)


@triton.jit
def _swiglu_fwd_kernel(x, y, R, units, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    F = units * UNIT
    o_r, o_f, m = _offsets(R, F, ROWS, COLUMNS)
    p_x = x + o_r * 2 * F + o_f
    b_gate = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_x + F, mask=m, other=0.0).to(tl.float32)
    b_y = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(y + o_r * F + o_f, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit
def _swiglu_bwd_kernel(x, dy, dx, y, R, units, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dx and, unless it is None, y."""
    F = units * UNIT
    o_r, o_f, m = _offsets(R, F, ROWS, COLUMNS)
    o_x = o_r * 2 * F + o_f
    b_gate = tl.load(x + o_x, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(x + o_x + F, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + o_r * F + o_f, mask=m, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_dgate = b_dy * b_up * b_sigmoid * (1.0 + b_gate * (1.0 - b_sigmoid))
    tl.store(dx + o_x, b_dgate.to(dx.dtype.element_ty), mask=m)
    tl.store(dx + o_x + F, (b_dy * b_gate * b_sigmoid).to(dx.dtype.element_ty), mask=m)
    if y is not None:
        tl.store(y + o_r * F + o_f, (b_gate * b_sigmoid * b_up).to(y.dtype.element_ty), mask=m)


def _tiles(x: Tensor) -> tuple[int, dict[str, Any]]:
    """The number of programs for x [..., 2 F], and the arguments that both kernels end with."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1] // 2
    columns = min(COLUMNS, power_of_2(width))
    tile_rows = ELEMENTS // columns
    programs = cdiv(rows, tile_rows) * cdiv(width, columns)
    # Triton knows of an argument only whether 16 divides it, and 8 elements are enough for the widest load
    unit = 8 if width % 8 == 0 else 1
    sizes = {"R": rows, "units": width // unit, "UNIT": unit, "ROWS": tile_rows, "COLUMNS": columns}
    return programs, {**sizes, "num_warps": 4}


def swiglu_fwd(x: Tensor) -> Tensor:
    """y [..., F] of x [..., 2 F], which is contiguous."""
    y = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    programs, rest = _tiles(x)
    launch(_swiglu_fwd_kernel, programs, x=x, y=y, **rest)
    return y


def swiglu_bwd(x: Tensor, dy: Tensor, y: Tensor | None = None) -> Tensor:
    """The gradient of x [..., 2 F], from that of the result, which is contiguous. The result is written to y."""
    dx = torch.empty_like(x)
    programs, rest = _tiles(x)
    launch(_swiglu_bwd_kernel, programs, x=x, dy=dy, dx=dx, y=y, **rest)
    return dx


class SwiGLU(OnceDifferentiable):
    """x [..., 2 F] to y [..., F]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        save(ctx, x)
        return swiglu_fwd(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        (x,) = saved(ctx)
        return (swiglu_bwd(x, dense(dy)),)


class SwiGLULinear(OnceDifferentiable):
    """(x [..., 2 F], weight [D, F]) to y weight^T [..., D]; y is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return product_forward(ctx, swiglu_fwd, x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return product_backward(ctx, swiglu_bwd, gradient)


def swiglu_triton(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """y [..., F], or y weight^T [..., D], in the dtype of x."""
    x = dense(x)
    if weight is None:
        return SwiGLU.apply(x) if needs_gradient(x) else swiglu_fwd(x)
    with torch.autocast(x.device.type, enabled=False):
        return SwiGLULinear.apply(x, weight) if needs_gradient(x, weight) else swiglu_fwd(x) @ weight.t()
