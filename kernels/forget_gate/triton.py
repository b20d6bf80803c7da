"""Forget gates in Triton: log a and 1 - a in one pass, and all gradients in one more (letters: package docstring).

With s = sigmoid(x), y the gradient of log a, r that of 1 - a, and z = x + bias:

    damped    y' = y - r a,                dx = y' (1 - s) / damping
    rated     y' = y - r a,                dx = -e^c sigmoid(z) y',    dbias = sum dx,   dc = sum y' log a
    bounded   y' = (y / a - r) (1 - b),    dx = y' s (1 - s),          db = sum (y / a - r) (1 - s)

with c = log_rate and sums over all rows, that of dc over the channels of a head as well. The bound is b = sum over
1 <= i <= layer of softmax_i(logits); torch takes its derivative, which has no rows. Each program adds the terms of its
tiles, which are spread over all rows, and these partial sums are added in float64, always in the same order.

Layout:  x [R, D] with contiguous channels; logits [layers, D], results and gradients [R, D] dense; results float32.
float32: everything between a load and a store, but e^c, which is float64 before it is rounded.
Cost:    reads x once and writes both results; backward reads x and both gradients and writes dx. Every program reads
         the parameters of its channels. Deterministic.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.device import num_processors
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense, dense_rows
from subquad.kernels.positions import LARGEST_LOG

BLOCK, ELEMENTS = 128, 2048
"""Channels of a program at most, and elements of x."""
LARGEST = tl.constexpr(LARGEST_LOG)
"""Logarithms of rates are bounded, see `bounded_exp`."""
MAX_AXIS = 65535
"""Maximum size of the second and of the third axis of a grid."""
PROGRAMS = 8
"""Programs of the backward pass for each multiprocessor."""


# one kernel for all layers
@triton.jit(do_not_specialize=["layer"])
def _gate_kernel(
    x, logits, bias, log_rate, log_a, rest,
    R, D, K, x_stride_r, damping, layer,
    LAYERS: tl.constexpr, BLOCK_L: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS positions of BLOCK channels."""
    o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # two axes for the tiles of rows, because each ends at MAX_AXIS; neighbours in memory stay on the first
    i_r = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    o_r = (i_r * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    m = (o_r < R)[:, None] & (o_d < D)[None, :]
    b_x = tl.load(x + o_r[:, None] * x_stride_r + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    o_y = o_r[:, None] * D + o_d[None, :]
    if logits is None:
        b_bias, b_rate = _rated(bias, log_rate, o_d, D, K)
        b_log, _ = _log_gate(b_x, b_bias, b_rate, damping, bias is not None)
        if rest is not None:
            b_rest = -_expm1(b_log)
    else:
        b_bound, b_open = _bound(logits, o_d, D, layer, LAYERS, BLOCK_L)
        b_sigmoid, b_closed = _sigmoids(b_x)
        b_log = tl.log(b_bound[None, :] + b_open[None, :] * b_sigmoid)
        b_rest = b_open[None, :] * b_closed
    tl.store(log_a + o_y, b_log, mask=m)
    if rest is not None:
        tl.store(rest + o_y, b_rest, mask=m)


@triton.jit(do_not_specialize=["layer"])
def _gate_bwd_kernel(
    x, logits, bias, log_rate, dlog, drest, dx, partial,
    R, D, K, x_stride_r, damping, layer,
    LAYERS: tl.constexpr, BLOCK_L: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of every num_programs-th tile of ROWS positions.

    partial [programs along R, 2, D]: of a rated gate the sums for dbias and dc, of a bounded one that for db.
    """
    num_d = tl.cdiv(D, BLOCK)
    i_d, i_r = tl.program_id(0) % num_d, tl.program_id(0) // num_d
    o_d = i_d * BLOCK + tl.arange(0, BLOCK)
    if logits is not None:
        b_bound, b_open = _bound(logits, o_d, D, layer, LAYERS, BLOCK_L)
    b_bias, b_rate = _rated(bias, log_rate, o_d, D, K)
    b_first = tl.zeros([ROWS, BLOCK], tl.float32)
    b_second = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in range(i_r, tl.cdiv(R, ROWS), tl.num_programs(0) // num_d):
        o_r = (i * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        m = (o_r < R)[:, None] & (o_d < D)[None, :]
        o_y = o_r[:, None] * D + o_d[None, :]
        b_x = tl.load(x + o_r[:, None] * x_stride_r + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_y = tl.load(dlog + o_y, mask=m, other=0.0)
        if drest is not None:
            b_r = tl.load(drest + o_y, mask=m, other=0.0)
        if logits is None:
            b_log, b_slope = _log_gate(b_x, b_bias, b_rate, damping, bias is not None)
            if drest is not None:
                b_y -= b_r * tl.exp(b_log)
            b_dx = b_slope * b_y
            if bias is not None:
                b_first += b_dx
                b_second += b_log * b_y
        else:
            b_sigmoid, b_closed = _sigmoids(b_x)
            b_y /= b_bound[None, :] + b_open[None, :] * b_sigmoid
            if drest is not None:
                b_y -= b_r
            b_first += b_y * b_closed
            b_dx = b_y * b_open[None, :] * b_sigmoid * b_closed
        tl.store(dx + o_y, b_dx.to(dx.dtype.element_ty), mask=m)
    if partial is not None:
        p_partial = partial + i_r.to(tl.int64) * 2 * D + o_d
        tl.store(p_partial, tl.sum(b_first, 0), mask=o_d < D)
        tl.store(p_partial + D, tl.sum(b_second, 0), mask=o_d < D)


@triton.jit
def _sigmoids(b_x):
    """sigmoid(x) and sigmoid(-x), of which none is computed from the other."""
    # exp of a number that is not positive: neither branch overflows
    b_e = tl.exp(-tl.abs(b_x))
    b_small, b_large = b_e / (1.0 + b_e), 1.0 / (1.0 + b_e)
    return tl.where(b_x < 0, b_small, b_large), tl.where(b_x < 0, b_large, b_small)


@triton.jit
def _rated(bias, log_rate, o_d, D, K):
    """The bias and the rate of the channels o_d, zeros where there are none."""
    b_bias, b_rate = tl.zeros_like(o_d).to(tl.float32), tl.zeros_like(o_d).to(tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        b_log = tl.load(log_rate + o_d // K, mask=o_d < D, other=0.0).to(tl.float64)
        b_rate = tl.exp(tl.minimum(b_log, LARGEST, propagate_nan=tl.PropagateNan.ALL)).to(tl.float32)
    return b_bias, b_rate


@triton.jit
def _log_gate(b_x, b_bias, b_rate, damping, RATED: tl.constexpr):
    """log a and its derivative in x, of a rated or a damped gate."""
    if RATED:
        b_x += b_bias[None, :]
    b_sigmoid, b_closed = _sigmoids(b_x)
    b_soft = _log1p(tl.exp(-tl.abs(b_x)))
    if RATED:
        b_log = -b_rate[None, :] * (b_soft + tl.maximum(b_x, 0.0))
        b_slope = -b_rate[None, :] * b_sigmoid
    else:
        b_log = (tl.minimum(b_x, 0.0) - b_soft) / damping
        b_slope = b_closed / damping
    return b_log, b_slope


@triton.jit
def _rate_gradients_kernel(
    partial, log_rate, dbias, dlog_rate, num_partial, D, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """dbias and dc of one head from partial [num_partial, 2, D], added in float64. dc is zero where c is bounded."""
    i_h, o_r = tl.program_id(0), tl.arange(0, ROWS)
    b_rate = tl.zeros([BLOCK], tl.float64)
    for first in range(0, K, BLOCK):
        o_k = first + tl.arange(0, BLOCK)
        b_first = tl.zeros([ROWS, BLOCK], tl.float64)
        b_second = tl.zeros([ROWS, BLOCK], tl.float64)
        for i in range(0, num_partial, ROWS):
            p = partial + (i + o_r).to(tl.int64)[:, None] * 2 * D + (i_h * K + o_k)[None, :]
            m = (i + o_r < num_partial)[:, None] & (o_k < K)[None, :]
            b_first += tl.load(p, mask=m, other=0.0).to(tl.float64)
            b_second += tl.load(p + D, mask=m, other=0.0).to(tl.float64)
        tl.store(dbias + i_h * K + o_k, tl.sum(b_first, 0).to(dbias.dtype.element_ty), mask=o_k < K)
        b_rate += tl.sum(b_second, 0)
    b_sum = tl.where(tl.load(log_rate + i_h).to(tl.float32) <= LARGEST, tl.sum(b_rate, 0), 0.0)
    tl.store(dlog_rate + i_h, b_sum.to(dlog_rate.dtype.element_ty))


@triton.jit
def _bound(logits, o_d, D, layer, LAYERS: tl.constexpr, BLOCK_L: tl.constexpr):
    """b and 1 - b of the channels o_d."""
    o_l = tl.arange(0, BLOCK_L)
    m_l = (o_l < LAYERS)[:, None] & (o_d < D)[None, :]
    b_l = tl.load(logits + o_l[:, None] * D + o_d[None, :], mask=m_l, other=0.0).to(tl.float32)
    b_l = tl.where((o_l < LAYERS)[:, None], b_l, float("-inf"))
    b_w = tl.exp(b_l - tl.max(b_l, 0)[None, :])
    b_total = tl.sum(b_w, 0)
    m_bound = (o_l >= 1) & (o_l <= layer)
    b_bound = tl.sum(tl.where(m_bound[:, None], b_w, 0.0), 0) / b_total
    return b_bound, tl.sum(tl.where(m_bound[:, None], 0.0, b_w), 0) / b_total


@triton.jit
def _log1p(b_p):
    """log(1 + p) for 0 <= p <= 1, by the series of log((1 + s) / (1 - s)) with s = p / (2 + p) <= 1/3."""
    b_s = b_p / (2.0 + b_p)
    b_q = b_s * b_s
    b_y = 0.0
    for i in tl.static_range(17, 0, -2):
        b_y = b_y * b_q + 1.0 / i
    return 2.0 * b_s * b_y


@triton.jit
def _expm1(b_p):
    """exp(p) - 1 for p <= 0: its series where p is small, which exp(p) - 1 would round away."""
    b_y = 0.0 * b_p
    for i in tl.static_range(9, 0, -1):
        b_y = (b_y + 1.0) * b_p * (1.0 / i)
    return tl.where(b_p > -0.5, b_y, tl.exp(b_p) - 1.0)


def _sizes(x: Tensor, logits: Tensor | None, log_rate: Tensor | None) -> tuple[Tensor, int, dict[str, Any]]:
    """x as rows [R, D], the number of their tiles, and the arguments of both kernels behind the tensors but damping
    and layer."""
    width = x.shape[-1]
    rows = dense_rows(x)
    layers = 0 if logits is None else len(logits)
    block = min(BLOCK, power_of_2(width))
    tile_rows = min(power_of_2(len(rows)), ELEMENTS // block)
    tiles = {"LAYERS": layers, "BLOCK_L": power_of_2(max(1, layers)), "ROWS": tile_rows, "BLOCK": block}
    heads = {"K": 1 if log_rate is None else width // len(log_rate), "x_stride_r": rows.stride(0)}
    return rows, cdiv(len(rows), tile_rows), {"R": len(rows), "D": width, **heads, **tiles}


def forget_gate_fwd(
    x: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    log_rate: Tensor | None,
    layer: int,
    damping: float,
    complement: bool,
) -> tuple[Tensor, Tensor | None]:
    """log a and, with `complement`, 1 - a; the parameters are contiguous."""
    rows, tiles, sizes = _sizes(x, logits, log_rate)
    log_a = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rest = torch.empty_like(log_a) if complement else None
    slabs = cdiv(tiles, MAX_AXIS)
    constants = {name: sizes.pop(name) for name in ("LAYERS", "BLOCK_L", "ROWS", "BLOCK")}
    launch(
        _gate_kernel, (cdiv(x.shape[-1], constants["BLOCK"]), cdiv(tiles, slabs), slabs), x=rows, logits=logits,
        bias=bias, log_rate=log_rate, log_a=log_a, rest=rest, **sizes, damping=float(damping), layer=layer, **constants,
        num_warps=4,
    )  # fmt: skip
    return log_a, rest


class ForgetGate(OnceDifferentiable):
    """(x, logits, bias, log_rate) and options to (log a, 1 - a or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        logits: Tensor | None,
        bias: Tensor | None,
        log_rate: Tensor | None,
        layer: int,
        damping: float,
        complement: bool,
    ) -> tuple[Tensor, Tensor | None]:
        save(ctx, x, logits, bias, log_rate)
        ctx.layer, ctx.damping = layer, damping
        return forget_gate_fwd(x, logits, bias, log_rate, layer, damping, complement)

    @staticmethod
    def backward(ctx: Any, dlog: Tensor, drest: Tensor | None) -> tuple[Tensor | None, ...]:
        x, logits, bias, log_rate = saved(ctx)
        rows, tiles, sizes = _sizes(x, logits, log_rate)
        width = sizes["D"]
        num_d = cdiv(width, sizes["BLOCK"])
        programs = min(tiles, max(1, PROGRAMS * num_processors(x.device) // num_d))
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial = None
        if logits is not None or bias is not None:
            partial = torch.empty(programs, 2, width, dtype=torch.float32, device=x.device)
        constants = {name: sizes.pop(name) for name in ("LAYERS", "BLOCK_L", "ROWS", "BLOCK")}
        launch(
            _gate_bwd_kernel, programs * num_d, x=rows, logits=logits, bias=bias, log_rate=log_rate, dlog=dense(dlog),
            drest=dense(drest), dx=dx, partial=partial, **sizes, damping=float(ctx.damping), layer=ctx.layer,
            **constants, num_warps=4,
        )  # fmt: skip
        options = None, None, None
        if partial is None:
            return dx, None, None, None, *options
        if bias is not None and log_rate is not None:
            dbias, dlog_rate = torch.empty_like(bias), torch.empty_like(log_rate)
            channels = width // len(log_rate)
            block = min(BLOCK, power_of_2(channels))
            launch(
                _rate_gradients_kernel, len(log_rate), partial=partial, log_rate=log_rate, dbias=dbias,
                dlog_rate=dlog_rate, num_partial=len(partial), D=width, K=channels, ROWS=min(64, 4096 // block),
                BLOCK=block, num_warps=8,
            )  # fmt: skip
            return dx, None, dbias, dlog_rate, *options
        first = partial[:, 0].sum(0, dtype=torch.float64)
        weights = logits.double().softmax(0)
        own = torch.zeros_like(weights)
        own[1 : ctx.layer + 1] = first
        return dx, (weights * (own - (weights * own).sum(0))).to(logits.dtype), None, None, *options


def forget_gate_triton(
    x: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    log_rate: Tensor | None,
    layer: int,
    damping: float,
    complement: bool,
) -> tuple[Tensor, Tensor | None]:
    """`forget_gate` for arguments that were checked."""
    tensors = x, dense(logits), dense(bias), dense(log_rate)
    run = ForgetGate.apply if needs_gradient(*tensors) else forget_gate_fwd
    log_a, rest = run(*tensors, layer, damping, complement)
    return log_a, rest
