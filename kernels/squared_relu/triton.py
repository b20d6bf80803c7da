"""The squared rectified linear unit in Triton: one pass over memory in each direction.

    y = max(x, 0)^2,   dx = 2 max(x, 0) dy

In front of a linear map the backward pass also writes y, which the gradient of the weight reads; only x is kept.

Layout: x and y are [N] dense, where N counts all axes. float32: everything between a load and a store.
Bytes:  2 elements for each of N forward, 3 backward and 4 with y. FLOPs: 2 forward, 3 backward. Deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, product_backward, product_forward, save, saved
from subquad.kernels.launch import cdiv, launch
from subquad.kernels.layout import dense

BLOCK = 2048
"""Elements of a tile: 16 for each thread."""


@triton.jit
def _positive(b_x):
    """max(x, 0) in float32, where NaN stays NaN."""
    return tl.maximum(b_x.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _squared_relu_fwd_kernel(x, y, N, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_r = _positive(tl.load(x + o, mask=o < N, other=0.0))
    tl.store(y + o, (b_r * b_r).to(y.dtype.element_ty), mask=o < N)


@triton.jit
def _squared_relu_bwd_kernel(x, dy, dx, y, N, BLOCK: tl.constexpr):
    """dx and, unless it is None, y."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_r = _positive(tl.load(x + o, mask=o < N, other=0.0))
    b_dy = tl.load(dy + o, mask=o < N, other=0.0).to(tl.float32)
    tl.store(dx + o, (2.0 * b_r * b_dy).to(dx.dtype.element_ty), mask=o < N)
    if y is not None:
        tl.store(y + o, (b_r * b_r).to(y.dtype.element_ty), mask=o < N)


def squared_relu_fwd(x: Tensor) -> Tensor:
    """y of x, which is contiguous."""
    y = torch.empty_like(x)
    launch(_squared_relu_fwd_kernel, cdiv(x.numel(), BLOCK), x=x, y=y, N=x.numel(), BLOCK=BLOCK, num_warps=4)
    return y


def squared_relu_bwd(x: Tensor, dy: Tensor, y: Tensor | None = None) -> Tensor:
    """The gradient of x, from that of the result, which is contiguous. The result is written to y."""
    dx = torch.empty_like(x)
    sizes = {"N": x.numel(), "BLOCK": BLOCK, "num_warps": 4}
    launch(_squared_relu_bwd_kernel, cdiv(x.numel(), BLOCK), x=x, dy=dy, dx=dx, y=y, **sizes)
    return dx


class SquaredReLU(OnceDifferentiable):
    """x to y, both [..., F]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        save(ctx, x)
        return squared_relu_fwd(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        (x,) = saved(ctx)
        return (squared_relu_bwd(x, dense(dy)),)


class SquaredReLULinear(OnceDifferentiable):
    """(x [..., F], weight [D, F]) to y weight^T [..., D]; y is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return product_forward(ctx, squared_relu_fwd, x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return product_backward(ctx, squared_relu_bwd, gradient)


def squared_relu_triton(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """y [..., F], or y weight^T [..., D], in the dtype of x."""
    x = dense(x)
    if weight is None:
        return SquaredReLU.apply(x) if needs_gradient(x) else squared_relu_fwd(x)
    with torch.autocast(x.device.type, enabled=False):
        recorded = needs_gradient(x, weight)
        return SquaredReLULinear.apply(x, weight) if recorded else squared_relu_fwd(x) @ weight.t()
