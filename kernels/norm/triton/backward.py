"""The backward kernels: all gradients in one pass over the rows.

With n = uhat weight + bias + skip_scale skip, uhat = (u - m) scale, y = n h(gate), dn = dy h(gate), and h silu, sigmoid
or the identity:

    dgate = dy n h'(gate),   dweight = sum over rows of dn uhat,   dbias = sum over rows of dn
    dskip = skip_scale dn,   dskip_scale = sum over channels of dn skip
    du = scale (w - uhat mean(uhat w) - mean(w)),  w = dn weight     (the last term for the kind layer only; for the
                                                                      kind l2, the sum in place of the mean)
    ds = du act'(s) + the gradient of the sum s,   dx = dresidual = ds

Where the gate comes first, u = act(s) h(gate), dn = dy, dgate = du act(s) h'(gate), and ds has du h(gate) for du.

Where weight and bias are [H, D], each of their rows is summed over the rows of x that belong to its head. In front of a
linear map y is written as well, which the gradient of the map's weight reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.launch import launch
from subquad.kernels.norm.triton.forward import Statistics, gate_rows, num_heads, weight_rows
from subquad.kernels.norm.triton.plan import Factors, Options, backward_plan
from subquad.kernels.sums import parameter_gradients

SUM_ROWS = 128
"""Rows of partial sums that are loaded at once."""


@triton.jit
def _store_sums(partial, b_rows, i_h, o_d, m_d, D, BLOCK_H: tl.constexpr):
    """partial [heads, D] gets the sums over the rows of a tile, of which every BLOCK_H-th belongs to the same head."""
    if BLOCK_H == 1:
        tl.store(partial + i_h * D + o_d, tl.sum(b_rows, 0), mask=m_d)
    else:
        TOKENS: tl.constexpr = b_rows.shape[0] // BLOCK_H
        b_sums = tl.sum(tl.reshape(b_rows, [TOKENS, BLOCK_H, b_rows.shape[1]]), 0)
        o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
        tl.store(partial + o_h[:, None] * D + o_d[None, :], b_sums, mask=m_d[None, :])


@triton.jit
def _add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _norm_bwd_kernel(
    total, weight, bias, gate, skip, skip_scale, mean, scale, dy, dtotal, dx, dresidual, dgate, dskip, dskip_scale, y,
    partial,
    R, D, gate_outer, gate_inner,
    HEADS: tl.constexpr, GATE_HEADS: tl.constexpr, SIGMOID: tl.constexpr, PLAIN_GATE: tl.constexpr, LAYER: tl.constexpr,
    L2: tl.constexpr, SILU: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The formulas of this module for every num_programs-th tile of BLOCK_H heads of ROWS / BLOCK_H tokens.

    A token is HEADS rows, which have the rows of the weight. A program keeps its heads, and the rows of its tiles keep
    theirs, so that sums over tokens are sums over tiles.

    partial [programs, HEADS D or 2 HEADS D]: dweight and, where there is a bias, dbias, summed over the rows of all
    programs with the same i_p; None without a weight.
    """
    NUM_H: tl.constexpr = HEADS // BLOCK_H
    TOKENS: tl.constexpr = ROWS // BLOCK_H
    i_h, i_p = tl.program_id(0) % NUM_H, tl.program_id(0) // NUM_H
    num_programs = tl.num_programs(0) // NUM_H
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_row = tl.arange(0, ROWS)
    b_weight = 1.0
    if weight is not None:
        b_weight = weight_rows(weight + i_h * BLOCK_H * D, o_row % BLOCK_H, o_d, m_d, D, BLOCK_H)
    b_bias = 0.0
    if bias is not None:
        b_bias = weight_rows(bias + i_h * BLOCK_H * D, o_row % BLOCK_H, o_d, m_d, D, BLOCK_H)
    b_dweight = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_dbias = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in range(i_p, tl.cdiv(R // HEADS, TOKENS), num_programs):
        o_token = (i * TOKENS + o_row // BLOCK_H).to(tl.int64)
        o_r = o_token * HEADS + i_h * BLOCK_H + o_row % BLOCK_H
        m_r = o_r < R
        m = m_r[:, None] & m_d[None, :]
        o = o_r[:, None] * D + o_d[None, :]
        b_s = tl.load(total + o, mask=m, other=0.0).to(tl.float32)
        b_dn = tl.load(dy + o, mask=m, other=0.0).to(tl.float32)
        b_scale = tl.load(scale + o_r, mask=m_r, other=0.0)[:, None]
        if dtotal is not None:
            # with the other inputs, because behind the reductions the program would wait for memory once more
            b_dtotal = tl.load(dtotal + o, mask=m, other=0.0).to(tl.float32)
        b_hat = b_s
        if SILU:
            b_sigmoid = tl.sigmoid(b_s)
            b_hat = b_s * b_sigmoid
        if gate is not None:
            o_g = (o_r // GATE_HEADS) * gate_outer + (o_r % GATE_HEADS) * gate_inner
            b_g = tl.load(gate + o_g[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
            b_slope = 1.0
            if not PLAIN_GATE:
                b_open = tl.sigmoid(b_g)
                b_slope = b_open * (1.0 - b_open if SIGMOID else 1.0 + b_g * (1.0 - b_open))
                b_g = b_open if SIGMOID else b_g * b_open
            if FIRST:
                b_slope *= b_hat
                b_hat *= b_g
        if LAYER:
            b_hat -= tl.load(mean + o_r, mask=m_r, other=0.0)[:, None]
        b_hat *= b_scale
        b_skip, b_skip_scale = 0.0, 0.0
        if skip is not None:
            b_skip = tl.load(skip + o, mask=m, other=0.0).to(tl.float32)
            b_skip_scale = tl.load(skip_scale + o_r, mask=m_r, other=0.0).to(tl.float32)[:, None]
        b_n = b_hat * b_weight + b_bias + b_skip * b_skip_scale
        if gate is not None and not FIRST:
            tl.store(dgate + o, (b_dn * b_n * b_slope).to(dgate.dtype.element_ty), mask=m)
            b_dn *= b_g
            b_n *= b_g
        if y is not None:
            tl.store(y + o, b_n.to(y.dtype.element_ty), mask=m)
        if skip is not None:
            tl.store(dskip + o, (b_dn * b_skip_scale).to(dskip.dtype.element_ty), mask=m)
            b_along = tl.sum(b_dn * b_skip, 1)
            tl.store(dskip_scale + o_r, b_along.to(dskip_scale.dtype.element_ty), mask=m_r)
        if weight is not None:
            b_dweight += b_dn * b_hat
        if bias is not None:
            b_dbias += b_dn
        b_w = b_dn * b_weight
        if LAYER:
            b_along, b_mean = tl.reduce((b_hat * b_w, b_w), 1, _add_pairs)
        else:
            b_along = tl.sum(b_hat * b_w, 1)
        if not L2:
            b_along /= D
        b_ds = b_w - b_hat * b_along[:, None]
        if LAYER:
            b_ds -= (b_mean / D)[:, None]
        b_ds *= b_scale
        if gate is not None and FIRST:
            tl.store(dgate + o, (b_ds * b_slope).to(dgate.dtype.element_ty), mask=m)
            b_ds *= b_g
        if SILU:
            b_ds *= b_sigmoid * (1.0 + b_s * (1.0 - b_sigmoid))
        if dtotal is not None:
            b_ds += b_dtotal
        tl.store(dx + o, b_ds.to(dx.dtype.element_ty), mask=m)
        if dresidual is not None:
            tl.store(dresidual + o, b_ds.to(dresidual.dtype.element_ty), mask=m)
    if weight is not None:
        columns = HEADS * D
        p_partial = partial + i_p.to(tl.int64) * (columns if bias is None else 2 * columns)
        _store_sums(p_partial, b_dweight, i_h, o_d, m_d, D, BLOCK_H)
        if bias is not None:
            _store_sums(p_partial + columns, b_dbias, i_h, o_d, m_d, D, BLOCK_H)


def norm_bwd(
    saved: Statistics,
    factors: Factors,
    options: Options,
    dy: Tensor,
    dtotal: Tensor | None,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    y: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, residual, weight, bias, gate, skip and skip_scale, from those of y and of the sum (or None).

    The gradients given are contiguous. residual_dtype: None where there was no residual. y: memory for the result of
    the forward pass, or None.
    """
    weight, bias, gate, skip, skip_scale = factors
    total, width = saved.total, saved.total.shape[-1]
    rows = total.numel() // width
    dx = torch.empty(total.shape, dtype=x_dtype, device=total.device)
    dresidual = None
    if residual_dtype is not None:
        # one tensor for both where they have one dtype: the gradient of a sum is that of its terms
        dresidual = dx if residual_dtype == x_dtype else torch.empty_like(total, dtype=residual_dtype)
    dgate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dskip = None if skip is None else torch.empty_like(skip)
    dskip_scale = None if skip_scale is None else torch.empty_like(skip_scale)
    _, place = gate_rows(gate)
    heads = num_heads(weight)
    plan = backward_plan(rows, width, heads, total.device, options.tuning)
    columns = heads * width if bias is None else 2 * heads * width
    num_partial = plan.programs * plan.block_h // heads
    partial = None
    if weight is not None:
        partial = torch.empty(num_partial, columns, dtype=torch.float32, device=total.device)
    launch(
        _norm_bwd_kernel, plan.programs, total=total, **factors._asdict(), mean=saved.mean, scale=saved.scale, dy=dy,
        dtotal=dtotal, dx=dx, dresidual=None if dresidual is dx else dresidual, dgate=dgate, dskip=dskip,
        dskip_scale=dskip_scale, y=y, partial=partial, R=rows, D=width, gate_outer=place.outer, gate_inner=place.inner,
        HEADS=heads, GATE_HEADS=place.heads, **options.constants(), ROWS=plan.rows, BLOCK_H=plan.block_h,
        BLOCK_D=plan.block_d, **plan.options.keywords(),
    )  # fmt: skip
    if weight is None or partial is None:
        return dx, dresidual, None, None, dgate, dskip, dskip_scale
    dweight, dbias = parameter_gradients(partial, weight, bias, rows=SUM_ROWS)
    return dx, dresidual, dweight, dbias, dgate, dskip, dskip_scale
