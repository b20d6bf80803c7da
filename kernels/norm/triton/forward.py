"""The forward kernel: y, the sum and the statistics, by the equation of the package."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.launch import launch
from subquad.kernels.layout import dense_channels
from subquad.kernels.norm.triton.plan import Factors, Options, forward_plan


class GateRows(NamedTuple):
    """Layout of a gate [..., D]: its row r begins at element (r // heads) outer + (r % heads) inner."""

    heads: int
    outer: int
    inner: int


def gate_rows(gate: Tensor | None) -> tuple[Tensor | None, GateRows]:
    """The gate, copied if its rows lie otherwise than `GateRows` can say, and where they lie."""
    if gate is None:
        return None, GateRows(1, 0, 0)
    gate = dense_channels(gate)
    width = gate.shape[-1]
    if gate.is_contiguous() or gate.ndim == 1:
        return gate, GateRows(1, width, 0)
    if gate.ndim >= 3 and _is_one_axis(gate.shape[:-2], gate.stride()[:-2]):
        return gate, GateRows(gate.shape[-2], gate.stride(-3), gate.stride(-2))
    if _is_one_axis(gate.shape[:-1], gate.stride()[:-1]):
        return gate, GateRows(1, gate.stride(-2), 0)
    return gate.contiguous(), GateRows(1, width, 0)


def num_heads(weight: Tensor | None) -> int:
    """Rows of a weight [H, V]; 1 for a weight that all rows of x share."""
    return 1 if weight is None or weight.ndim == 1 else weight.shape[0]


def _is_one_axis(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether these axes have the memory of a single one."""
    pairs = zip(shape[1:], strides[1:], strides[:-1], strict=True)
    return all(outer == size * stride for size, stride, outer in pairs)


@triton.jit
def _silu(b_x):
    return b_x * tl.sigmoid(b_x)


@triton.jit
def weight_rows(weight, o_h, o_d, m_d, D, HEADS: tl.constexpr):
    """Rows o_h of a weight or bias [HEADS, D] in float32; [1, BLOCK_D] where it has only one."""
    if HEADS == 1:
        b_weight = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    else:
        o = o_h[:, None] * D + o_d[None, :]
        b_weight = tl.load(weight + o, mask=m_d[None, :], other=0.0).to(tl.float32)
    return b_weight


@triton.jit
def _norm_fwd_kernel(
    x, residual, weight, bias, gate, skip, skip_scale, y, total, mean, scale,
    R, D, gate_outer, gate_inner, eps,
    HEADS: tl.constexpr, GATE_HEADS: tl.constexpr, SIGMOID: tl.constexpr, PLAIN_GATE: tl.constexpr, LAYER: tl.constexpr,
    L2: tl.constexpr, SILU: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y and total [R, D], mean (LAYER only) and scale = 1 / sqrt(v + eps), both [R]."""
    o_r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_r, m_d = o_r < R, o_d < D
    m = m_r[:, None] & m_d[None, :]
    o = o_r[:, None] * D + o_d[None, :]
    b_u = tl.load(x + o, mask=m, other=0.0).to(tl.float32)
    if residual is not None:
        b_u += tl.load(residual + o, mask=m, other=0.0).to(tl.float32)
        b_total = b_u.to(total.dtype.element_ty)
        tl.store(total + o, b_total, mask=m)
        # the backward pass knows the rounded sum
        b_u = b_total.to(tl.float32)
    if SILU:
        b_u = _silu(b_u)
    if gate is not None:
        o_g = (o_r // GATE_HEADS) * gate_outer + (o_r % GATE_HEADS) * gate_inner
        b_g = tl.load(gate + o_g[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        if not PLAIN_GATE:
            b_g = tl.sigmoid(b_g) if SIGMOID else _silu(b_g)
        if FIRST:
            b_u *= b_g
    if LAYER:
        b_mean = tl.sum(b_u, 1) / D
        tl.store(mean + o_r, b_mean, mask=m_r)
        b_u = tl.where(m_d[None, :], b_u - b_mean[:, None], 0.0)
    b_v = tl.sum(b_u * b_u, 1)
    if not L2:
        b_v /= D
    b_scale = 1.0 / tl.sqrt(b_v + eps)
    tl.store(scale + o_r, b_scale, mask=m_r)
    b_y = b_u * b_scale[:, None]
    if weight is not None:
        b_y *= weight_rows(weight, o_r % HEADS, o_d, m_d, D, HEADS)
    if bias is not None:
        b_y += weight_rows(bias, o_r % HEADS, o_d, m_d, D, HEADS)
    if skip is not None:
        b_skip = tl.load(skip + o, mask=m, other=0.0).to(tl.float32)
        b_y += b_skip * tl.load(skip_scale + o_r, mask=m_r, other=0.0).to(tl.float32)[:, None]
    if gate is not None and not FIRST:
        b_y *= b_g
    tl.store(y + o, b_y.to(y.dtype.element_ty), mask=m)


class Statistics(NamedTuple):
    """Results of the forward pass that the backward pass reads."""

    total: Tensor
    """x + residual, or x itself."""
    mean: Tensor | None
    scale: Tensor


def norm_fwd(x: Tensor, residual: Tensor | None, factors: Factors, options: Options) -> tuple[Tensor, Statistics]:
    """y and the statistics. All tensors are contiguous, but the gate is as `gate_rows` gives it."""
    width = x.shape[-1]
    rows = x.numel() // width
    y = torch.empty(x.shape, dtype=options.out_dtype, device=x.device)
    total = x
    if residual is not None:
        total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device) if options.kind == "layer" else None
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    _, place = gate_rows(factors.gate)
    plan = forward_plan(rows, width, options.tuning)
    launch(
        _norm_fwd_kernel, plan.programs, x=x, residual=residual, **factors._asdict(), y=y,
        total=None if residual is None else total, mean=mean, scale=scale, R=rows, D=width, gate_outer=place.outer,
        gate_inner=place.inner, eps=float(options.eps), HEADS=num_heads(factors.weight), GATE_HEADS=place.heads,
        **options.constants(), ROWS=plan.rows, BLOCK_D=plan.block_d, **plan.options.keywords(),
    )  # fmt: skip
    return y, Statistics(total, mean, scale)
