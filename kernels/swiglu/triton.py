"""The gated linear unit in Triton: one pass over memory in each direction.

With g, u the halves of x and σ the logistic function:

    y = g σ(g) u,   dg = dy u σ(g) (1 + g (1 - σ(g))),   du = dy g σ(g)

Without u it is the gradient of silu, which `SiluParts` takes for the parts of one tensor.

In front of a linear map the backward pass also writes y, which the gradient of the weight reads; only x is kept.

Layout: x [R, 2 F] and y [R, F], dense, where R counts all axes but the last; a gate and an up [R, F] may have rows at
any distance. float32: everything between a load and a store. Bytes: 3 elements for each of R F forward, 5 backward and
6 with y. FLOPs: about 5 forward and 10 backward, and one exponential. Deterministic.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense, dense_rows
from subquad.kernels.layout import strides as strides_of

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
def _swiglu_fwd_kernel(
    gate, up, y, R, gate_stride, up_stride, units, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    F = units * UNIT
    o_r, o_f, m = _offsets(R, F, ROWS, COLUMNS)
    b_gate = tl.load(gate + o_r * gate_stride + o_f, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(up + o_r * up_stride + o_f, mask=m, other=0.0).to(tl.float32)
    b_y = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(y + o_r * F + o_f, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit
def _swiglu_bwd_kernel(
    gate, up, dy, dgate, dup, y, R, gate_stride, up_stride, d_stride, units,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dgate and dup, which have rows of one stride, and, unless it is None, y. Without `up` it is one."""
    F = units * UNIT
    o_r, o_f, m = _offsets(R, F, ROWS, COLUMNS)
    b_gate = tl.load(gate + o_r * gate_stride + o_f, mask=m, other=0.0).to(tl.float32)
    b_up = 1.0
    if up is not None:
        b_up = tl.load(up + o_r * up_stride + o_f, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + o_r * F + o_f, mask=m, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_dgate = b_dy * b_up * b_sigmoid * (1.0 + b_gate * (1.0 - b_sigmoid))
    o_d = o_r * d_stride + o_f
    tl.store(dgate + o_d, b_dgate.to(dgate.dtype.element_ty), mask=m)
    if up is not None:
        tl.store(dup + o_d, (b_dy * b_gate * b_sigmoid).to(dup.dtype.element_ty), mask=m)
    if y is not None:
        tl.store(y + o_r * F + o_f, (b_gate * b_sigmoid * b_up).to(y.dtype.element_ty), mask=m)


def _tiles(rows: int, width: int) -> tuple[int, dict[str, Any]]:
    """The number of programs for R rows of F columns, and the arguments that both kernels end with."""
    columns = min(COLUMNS, power_of_2(width))
    tile_rows = ELEMENTS // columns
    programs = cdiv(rows, tile_rows) * cdiv(width, columns)
    # Triton knows of an argument only whether 16 divides it, and 8 elements are enough for the widest load
    unit = 8 if width % 8 == 0 else 1
    return programs, {"units": width // unit, "UNIT": unit, "ROWS": tile_rows, "COLUMNS": columns, "num_warps": 4}


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    """y [R, F], dense, from [R, F]."""
    programs, rest = _tiles(*gate.shape)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    strides = {"gate_stride": gate.stride(0), "up_stride": up.stride(0)}
    launch(_swiglu_fwd_kernel, programs, gate=gate, up=up, y=y, R=len(gate), **strides, **rest)
    return y


def _backward(gate: Tensor, up: Tensor | None, dy: Tensor, dgate: Tensor, dup: Tensor | None, y: Tensor | None) -> None:
    """Writes dgate, dup and, unless it is None, y, all [R, F] and, but for gate, up and their gradients, dense."""
    programs, rest = _tiles(*gate.shape)
    strides = {"gate_stride": gate.stride(0), "up_stride": strides_of(up, 0)[0], "d_stride": dgate.stride(0)}
    tensors = {"gate": gate, "up": up, "dy": dy, "dgate": dgate, "dup": dup, "y": y}
    launch(_swiglu_bwd_kernel, programs, **tensors, R=len(gate), **strides, **rest)


def swiglu_fwd(x: Tensor) -> Tensor:
    """y [..., F] of x [..., 2 F], which is contiguous."""
    return _forward(*dense_rows(x).chunk(2, dim=-1)).view(*x.shape[:-1], -1)


def swiglu_bwd(x: Tensor, dy: Tensor, y: Tensor | None = None) -> Tensor:
    """The gradient of x [..., 2 F], from that of the result, which is contiguous. The result is written to y."""
    dx = torch.empty_like(x)
    (gate, up), (dgate, dup) = (dense_rows(z).chunk(2, dim=-1) for z in (x, dx))
    _backward(gate, up, dy, dgate, dup, y)
    return dx


def _mapped(y: Tensor, weight: Tensor | None) -> Tensor:
    """y, or y weight^T where a linear map is behind it."""
    return y if weight is None else y @ weight.t()


class SwiGLU(OnceDifferentiable):
    """(x [..., 2 F], weight [D, F] or None) to y [..., F], or to y weight^T [..., D] without y being kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        save(ctx, x, weight)
        return _mapped(swiglu_fwd(x), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = saved(ctx)
        if weight is None:
            return swiglu_bwd(x, dense(gradient)), None
        rows = gradient.reshape(-1, len(weight))
        dy = rows @ weight
        y = torch.empty_like(dy)
        return swiglu_bwd(x, dy, y), rows.t() @ y


class Gated(OnceDifferentiable):
    """(gate [R, F], up [R, F], weight [D, F] or None) to y [R, F], or to y weight^T [R, D] without y being kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
        save(ctx, gate, up, weight)
        return _mapped(_forward(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = saved(ctx)
        dy = dense(gradient if weight is None else gradient @ weight)
        dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        y = None if weight is None else torch.empty_like(dy)
        _backward(gate, up, dy, dgate, dup, y)
        return dgate, dup, None if y is None else gradient.t() @ y


class SiluParts(OnceDifferentiable):
    """(x [..., N F], N) to N parts of silu(x) along the last axis; their gradients are written into one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_parts: int) -> tuple[Tensor, ...]:
        save(ctx, x)
        return F.silu(x).chunk(num_parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = saved(ctx)
        dx = torch.empty_like(x)
        parts = (dense_rows(z).chunk(len(gradients), dim=-1) for z in (x, dx))
        for dy, part, dpart in zip(gradients, *parts, strict=True):
            _backward(part, None, dense(dy), dpart, None, None)
        return dx, None


def swiglu_triton(x: Tensor, weight: Tensor | None = None, up: Tensor | None = None) -> Tensor:
    """y [..., F], or y weight^T [..., D], in the dtype of x."""
    # a context takes the host as long as a short kernel
    with nullcontext() if weight is None else torch.autocast(x.device.type, enabled=False):
        if up is not None:
            return Gated.apply(dense_rows(x), dense_rows(up), weight).view(*x.shape[:-1], -1)
        x = dense(x)
        return SwiGLU.apply(x, weight) if needs_gradient(x, weight) else _mapped(swiglu_fwd(x), weight)
