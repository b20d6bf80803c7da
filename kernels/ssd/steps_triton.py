"""`ssd_steps` in Triton: one pass in each direction over tiles of positions with all heads.

With s = sigmoid(share), m = max(softplus(rate), least) or the rate of the head, and the gradients of dt, log_decay, w
and n given as a, b, u and v:

    ddt_t = a_t - b_t m_t + (u_t + v_t) s_t + u_{t-1} (1 - s_t),   dx_t = ddt_t sigmoid(x_t + bias)
    dshare_t = (u_t + v_t - u_{t-1}) dt_t s_t (1 - s_t)
    drate_t = -b_t dt_t sigmoid(rate_t) where softplus(rate_t) is at least `least`
    euler: ddt_t = a_t - b_t rate;   drate = -sum of b_t dt_t;   always dbias = sum of dx_t

Layout:  x, rate and share [R, H] with rows at any distance, R = B T; everything else dense.
float32: everything between a load and a store.
Cost:    H (2 or 6 + 8 or 16) bytes a position in half precision, twice in the backward pass.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.device import speaks_ptx
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense, dense_rows
from subquad.kernels.selective_scan.triton.arithmetic import sigmoid, softplus
from subquad.kernels.sums import row_sums

ELEMENTS = 2048
"""Elements of a tile."""


@triton.jit
def _load(p, o, m):
    return tl.load(p + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _at_least(b_x, least):
    """The larger one of both; NaN stays."""
    return tl.maximum(b_x, least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _steps_fwd_kernel(
    x, bias, rate, share, dt, log_decay, write, own,
    R, T, H, x_stride, rate_stride, share_stride, least,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    o_h = tl.arange(0, BLOCK_H)[None, :]
    o_r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    m = (o_r < R) & (o_h < H)
    b_bias = _load(bias, o_h, o_h < H)
    b_dt = softplus(_load(x, o_r * x_stride + o_h, m) + b_bias, PRECISE)
    o_y = o_r * H + o_h
    tl.store(dt + o_y, b_dt, mask=m)
    if share is None:
        b_rate = _load(rate, o_h, o_h < H)
    else:
        b_rate = _at_least(softplus(_load(rate, o_r * rate_stride + o_h, m), PRECISE), least)
        b_own = sigmoid(_load(share, o_r * share_stride + o_h, m), PRECISE) * b_dt
        m_next = m & (o_r % T + 1 < T)
        b_next = softplus(_load(x, (o_r + 1) * x_stride + o_h, m_next) + b_bias, PRECISE)
        # sigmoid(-s) is 1 - sigmoid(s)
        b_later = sigmoid(-_load(share, (o_r + 1) * share_stride + o_h, m_next), PRECISE) * b_next
        tl.store(own + o_y, b_own, mask=m)
        tl.store(write + o_y, b_own + tl.where(m_next, b_later, 0.0), mask=m)
    tl.store(log_decay + o_y, -b_dt * b_rate, mask=m)


@triton.jit
def _steps_bwd_kernel(
    x, bias, rate, share, ddt, dlog_decay, dwrite, down, dx, drate, dshare, partial,
    R, T, H, x_stride, rate_stride, share_stride, least,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """partial [programs, H or 2 H] has the sums over a tile of dx and, without a share, of -dlog_decay dt."""
    o_h = tl.arange(0, BLOCK_H)[None, :]
    i = tl.program_id(0).to(tl.int64)
    o_r = (i * ROWS + tl.arange(0, ROWS))[:, None]
    m = (o_r < R) & (o_h < H)
    o_y = o_r * H + o_h
    b_x = _load(x, o_r * x_stride + o_h, m) + _load(bias, o_h, o_h < H)
    b_dt = softplus(b_x, PRECISE)
    b_ddt, b_dlog = _load(ddt, o_y, m), _load(dlog_decay, o_y, m)
    o_sum = tl.arange(0, BLOCK_H)
    if share is None:
        b_ddt -= b_dlog * _load(rate, o_h, o_h < H)
        tl.store(partial + (2 * i + 1) * H + o_sum, -tl.sum(b_dlog * b_dt, 0), mask=o_sum < H)
        p_bias = partial + 2 * i * H
    else:
        b_rate = _load(rate, o_r * rate_stride + o_h, m)
        b_size = softplus(b_rate, PRECISE)
        b_drate = tl.where(b_size < least, 0.0, -b_dlog * b_dt * sigmoid(b_rate, PRECISE))
        b_now = sigmoid(_load(share, o_r * share_stride + o_h, m), PRECISE)
        b_both = _load(dwrite, o_y, m) + _load(down, o_y, m)
        b_before = _load(dwrite, o_y - H, m & (o_r % T > 0))
        b_ddt += b_both * b_now + b_before * (1.0 - b_now) - b_dlog * _at_least(b_size, least)
        b_dshare = (b_both - b_before) * b_dt * b_now * (1.0 - b_now)
        tl.store(drate + o_y, b_drate.to(drate.dtype.element_ty), mask=m)
        tl.store(dshare + o_y, b_dshare.to(dshare.dtype.element_ty), mask=m)
        p_bias = partial + i * H
    b_dx = b_ddt * sigmoid(b_x, PRECISE)
    tl.store(dx + o_y, b_dx.to(dx.dtype.element_ty), mask=m)
    tl.store(p_bias + o_sum, tl.sum(tl.where(m, b_dx, 0.0), 0), mask=o_sum < H)


def _sizes(x: Tensor, rate: Tensor, share: Tensor | None, length: int, least: float) -> tuple[int, dict[str, Any]]:
    """The number of programs, and the arguments behind the tensors, for x [R, H]."""
    rows, heads = x.shape
    block = power_of_2(heads)
    tile = min(max(1, ELEMENTS // block), power_of_2(rows))
    strides = {"x_stride": x.stride(0), "rate_stride": rate.stride(0), "share_stride": 0}
    if share is not None:
        strides["share_stride"] = share.stride(0)
    numbers = {"R": rows, "T": length, "H": heads, **strides, "least": float(least)}
    # precise exponentials cost nothing beside the memory
    return cdiv(rows, tile), {**numbers, "ROWS": tile, "BLOCK_H": block, "PRECISE": speaks_ptx(), "num_warps": 4}


class Steps(OnceDifferentiable):
    """(length, least, x [R, H], bias, rate, share) to dt and log_decay and, with a share, w and n, all [R, H]."""

    @staticmethod
    def forward(
        ctx: Any, length: int, least: float, x: Tensor, bias: Tensor, rate: Tensor, share: Tensor | None
    ) -> tuple[Tensor, ...]:
        save(ctx, x, bias, rate, share)
        ctx.length, ctx.least = length, least
        return _forward(length, least, x, bias, rate, share)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, rate, share = saved(ctx)
        programs, rest = _sizes(x, rate, share, ctx.length, ctx.least)
        ddt, dlog_decay, dwrite, down = (*map(dense, gradients), None, None)[:4]
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        drate = dshare = None
        if share is not None:
            drate, dshare = (torch.empty(x.shape, dtype=z.dtype, device=x.device) for z in (rate, share))
        heads = x.shape[1]
        partial = torch.empty(programs, heads * (2 if share is None else 1), dtype=torch.float32, device=x.device)
        launch(
            _steps_bwd_kernel,
            programs,
            x=x,
            bias=bias,
            rate=rate,
            share=share,
            ddt=ddt,
            dlog_decay=dlog_decay,
            dwrite=dwrite,
            down=down,
            dx=dx,
            drate=drate,
            dshare=dshare,
            partial=partial,
            **rest,
        )
        sums = row_sums(partial)
        if share is None:
            drate = sums[heads:].to(rate.dtype)
        return None, None, dx, sums[:heads].to(bias.dtype), drate, dshare


def _forward(
    length: int, least: float, x: Tensor, bias: Tensor, rate: Tensor, share: Tensor | None
) -> tuple[Tensor, ...]:
    programs, rest = _sizes(x, rate, share, length, least)
    made = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for _ in range(2 if share is None else 4)]
    dt, log_decay, write, own = (*made, None, None)[:4]
    launch(
        _steps_fwd_kernel,
        programs,
        x=x,
        bias=bias,
        rate=rate,
        share=share,
        dt=dt,
        log_decay=log_decay,
        write=write,
        own=own,
        **rest,
    )
    return tuple(made)


def ssd_steps_triton(x: Tensor, bias: Tensor, rate: Tensor, share: Tensor | None, least: float) -> tuple[Tensor, ...]:
    """`ssd_steps` for arguments that were checked."""
    shape = x.shape
    shares = None if share is None else dense_rows(share)
    tensors = dense_rows(x), dense(bias), dense(rate) if share is None else dense_rows(rate), shares
    run = Steps.apply if needs_gradient(*tensors) else _forward
    return tuple(y.view(shape) for y in run(shape[-2], least, *tensors))
