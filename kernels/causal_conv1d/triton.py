"""The causal convolution in Triton: one kernel forward, one backward and one for its sums, one for a step.

    p_t = sum_{i < W} w_i x_{t-(W-1)+i} + b;   y_t = act(p_t)        source: package docstring

Layout: x [B, T, D] in memory of either order, channel-last (D contiguous) or channel-first (T contiguous); y and dx
take the order of x. A tile is [BLOCK_D, GROUPS] groups of STEPS consecutive steps, and a thread holds all steps of its
groups, so no value of x moves between threads: channel-last, step k of all groups is one load, 8 or 16 bytes of
channels a thread; channel-first, a group is one load of 16 bytes and is taken apart in registers. The W - 1 steps
beside a group are loaded once more, mostly from L1.

float32: products, sums, activation, partial sums of dweight and dbias. Deterministic: partial sums, no atomics.
Limits: W - 1 <= STEPS. Loads are that wide where strides and sizes are multiples of 16, else one number wide.
Bytes: forward 2, backward 3 numbers of B T D. FLOPs: 2 W forward, 6 W backward, each with one exponential.
"""

# a tuple of tiles that grows has no type of its own
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2, save, saved
from kernels.sums import COLUMNS, ROWS, column_sums


class Config(NamedTuple):
    """What a program computes: `tiles` tiles, one after another in time.

    block_d: channels of a tile.   groups: groups of consecutive steps in a tile.
    steps:   of a group: 4, 8 or 16; channel-first, as many as have 16 bytes.
    """

    block_d: int
    groups: int
    steps: int
    tiles: int
    num_warps: int


# by (channel-first, bytes of a number); with eight channels a thread the backward pass would run out of registers
FORWARD = {
    (False, 2): Config(128, 2, 16, 1, 2),
    (False, 4): Config(32, 16, 8, 1, 4),
    (True, 2): Config(1, 128, 8, 2, 2),
    (True, 4): Config(1, 256, 4, 1, 4),
}
BACKWARD = {
    (False, 2): Config(64, 4, 8, 8, 2),
    (False, 4): Config(32, 16, 8, 4, 4),
    (True, 2): Config(1, 128, 8, 8, 2),
    (True, 4): Config(1, 256, 4, 4, 4),
}
STEP_BLOCK_D = 256
MINUS_LOG2E = tl.constexpr(-1.4426950408889634)


@triton.jit
def _load_group(p_row, o_t, m_d, T, STEPS: tl.constexpr):
    """Channel-first: steps o_t .. o_t + STEPS - 1 from one load, then one tile a step."""
    D: tl.constexpr = p_row.shape[0]
    G: tl.constexpr = o_t.shape[0]
    o_k = o_t[None, :, None] + tl.arange(0, STEPS)[None, None, :]
    m_x = m_d[:, None, None] & (o_t >= 0)[None, :, None] & (o_k < T)
    b_x = tl.load(p_row[:, :, None] + o_k, mask=m_x, other=0.0).to(tl.float32)
    quads = (b_x,)
    if STEPS == 8:
        quads = tl.split(tl.permute(tl.reshape(b_x, [D, G, 2, 4]), [0, 1, 3, 2]))
    steps = ()
    for q in tl.static_range(STEPS // 4):
        even, odd = tl.split(tl.reshape(quads[q], [D, G, 2, 2]))
        b_0, b_2 = tl.split(even)
        b_1, b_3 = tl.split(odd)
        steps += (b_0, b_1, b_2, b_3)
    return steps


@triton.jit
def _load_steps(
    p_row,
    o_t,
    m_d,
    T,
    stride_t,
    STEPS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    CHANNEL_FIRST: tl.constexpr,
):
    """Steps -BEFORE .. STEPS + AFTER - 1 of every group, as float32 tiles; zero outside of 0 .. T - 1."""
    steps = ()
    if CHANNEL_FIRST:
        # whole groups on the sides too: loads at odd offsets would be two bytes wide
        if BEFORE > 0:
            steps += _load_group(p_row, o_t - STEPS, m_d, T, STEPS)[STEPS - BEFORE :]
        steps += _load_group(p_row, o_t, m_d, T, STEPS)
        if AFTER > 0:
            steps += _load_group(p_row, o_t + STEPS, m_d, T, STEPS)[:AFTER]
    else:
        p_x = p_row + (o_t.to(tl.int64) - BEFORE)[None, :] * stride_t
        for k in tl.static_range(STEPS + BEFORE + AFTER):
            o_k = o_t[None, :] + (k - BEFORE)
            m_x = m_d[:, None] & (o_k >= 0) & (o_k < T)
            steps += (tl.load(p_x, mask=m_x, other=0.0).to(tl.float32),)
            p_x += stride_t
    return steps


@triton.jit
def _store_steps(p_row, o_t, m_d, T, stride_t, steps, STEPS: tl.constexpr, CHANNEL_FIRST: tl.constexpr):
    """The inverse of `_load_steps` without steps on the sides."""
    if CHANNEL_FIRST:
        D: tl.constexpr = p_row.shape[0]
        G: tl.constexpr = o_t.shape[0]
        quads = ()
        for q in tl.static_range(STEPS // 4):
            even, odd = tl.join(steps[4 * q], steps[4 * q + 2]), tl.join(steps[4 * q + 1], steps[4 * q + 3])
            quads += (tl.reshape(tl.join(even, odd), [D, G, 4]),)
        b_x = quads[0]
        if STEPS == 8:
            b_x = tl.reshape(tl.permute(tl.join(quads[0], quads[1]), [0, 1, 3, 2]), [D, G, 8])
        o_k = o_t[None, :, None] + tl.arange(0, STEPS)[None, None, :]
        m_x = m_d[:, None, None] & (o_k < T)
        tl.store(p_row[:, :, None] + o_k, b_x.to(p_row.dtype.element_ty), mask=m_x)
    else:
        p_x = p_row + o_t.to(tl.int64)[None, :] * stride_t
        for k in tl.static_range(STEPS):
            m_x = m_d[:, None] & (o_t[None, :] + k < T)
            tl.store(p_x, steps[k].to(p_row.dtype.element_ty), mask=m_x)
            p_x += stride_t


@triton.jit
def _load_taps(p_w, o_d, m_d, W: tl.constexpr):
    """Tap i of every channel, as W tiles [BLOCK_D, 1]."""
    o_i = tl.arange(0, 4)[None, :]
    m_w = m_d[:, None] & (o_i < W)
    b_w = tl.load(p_w + o_d[:, None] * W + o_i, mask=m_w, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(b_w, [o_d.shape[0], 2, 2]))
    b_0, b_2 = tl.split(even)
    b_1, b_3 = tl.split(odd)
    return (b_0[:, None], b_1[:, None], b_2[:, None], b_3[:, None])[:W]


@triton.jit
def _put_state(steps, p_state, o_t, m_d, dtype: tl.constexpr, W: tl.constexpr):
    """The state in the place of the W - 1 steps before the first group, with which `steps` begin."""
    filled = ()
    for i in tl.static_range(W - 1):
        m_s = m_d[:, None] & (o_t == 0)[None, :]
        b_s = tl.load(p_state + (i + 0 * o_t)[None, :], mask=m_s, other=0.0)
        # rounded as x is
        filled += (steps[i] + b_s.to(dtype).to(tl.float32),)
    return filled + steps[W - 1 :]


@triton.jit
def _pre_activation(steps, taps, b_bias, k: tl.constexpr, W: tl.constexpr):
    b_p = b_bias + taps[0] * steps[k]
    for i in tl.static_range(1, W):
        b_p += taps[i] * steps[k + i]
    return b_p


@triton.jit
def _sigmoid(b_p):
    # one special function and one product each: exp and a division would bring the handling of subnormal numbers
    b_root = tl.rsqrt(1.0 + tl.exp2(b_p * MINUS_LOG2E))
    return b_root * b_root


@triton.jit
def _input_gradient(g, taps, k: tl.constexpr, W: tl.constexpr):
    """sum_i w_i g_{k-i} = dx_{k-(W-1)}; before a sequence there is no g."""
    b_dx = taps[0] * g[k]
    for i in tl.static_range(1, W):
        if i <= k:
            b_dx += taps[i] * g[k - i]
    return b_dx


@triton.jit
def _load_final(p_final, o_f, m_d, W: tl.constexpr):
    m_f = m_d[:, None] & (o_f >= 0)[None, :] & (o_f < W - 1)[None, :]
    return tl.load(p_final + o_f[None, :], mask=m_f, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_tiles"])
def _conv_fwd_kernel(
    x,
    weight,
    bias,
    initial_state,
    y,
    final_state,
    T,
    D,
    num_tiles,
    stride_b,
    stride_t,
    stride_d,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CHANNEL_FIRST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """p_t = sum_i w_i x_{t-(W-1)+i} + b, y_t = act(p_t) for num_tiles tiles of one batch row; y is dense in x's order.

    final_state [B, D, W - 1] or None: the last W - 1 of (initial state, x).
    """
    num_d, num_t = tl.cdiv(D, BLOCK_D), tl.cdiv(T, num_tiles * GROUPS * STEPS)
    # one grid axis, for the second and third end at 65535
    i_d, i_bt = tl.program_id(0) % num_d, tl.program_id(0) // num_d
    i_b, i_t = (i_bt // num_t).to(tl.int64), i_bt % num_t
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    y_stride_t = 1 if CHANNEL_FIRST else D
    y_stride_d = T if CHANNEL_FIRST else 1
    o_wide = o_d.to(tl.int64)[:, None]
    p_x = x + i_b * stride_b + o_wide * stride_d
    p_y = y + i_b * T * D + o_wide * y_stride_d
    taps = _load_taps(weight, o_d, m_d, W)
    b_bias = 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)[:, None]

    for i in range(num_tiles):
        o_t = ((i_t * num_tiles + i) * GROUPS + tl.arange(0, GROUPS)) * STEPS
        steps = _load_steps(p_x, o_t, m_d, T, stride_t, STEPS, W - 1, 0, CHANNEL_FIRST)
        if initial_state is not None:
            steps = _put_state(steps, initial_state + (i_b * D + o_wide) * (W - 1), o_t, m_d, x.dtype.element_ty, W)
        outputs = ()
        for k in tl.static_range(STEPS):
            b_p = _pre_activation(steps, taps, b_bias, k, W)
            outputs += (b_p * _sigmoid(b_p) if SILU else b_p,)
        _store_steps(p_y, o_t, m_d, T, y_stride_t, outputs, STEPS, CHANNEL_FIRST)

    # two conditions, for the first is decided when compiling
    if final_state is not None:  # noqa: SIM102
        if i_t == num_t - 1:
            o_s = (i_b * D + o_wide) * (W - 1)
            for j in tl.static_range(W - 1):
                o_last = T - (W - 1) + j + tl.zeros([BLOCK_D, 1], tl.int64)
                b_s = tl.load(p_x + o_last * stride_t, mask=m_d[:, None] & (o_last >= 0), other=0.0)
                if initial_state is not None:
                    m_s = m_d[:, None] & (o_last < 0)
                    b_before = tl.load(initial_state + o_s + o_last + (W - 1), mask=m_s, other=0.0)
                    b_s = tl.where(o_last < 0, b_before.to(b_s.dtype), b_s)
                tl.store(final_state + o_s + j, b_s, mask=m_d[:, None])


@triton.jit(do_not_specialize=["num_tiles"])
def _conv_bwd_kernel(
    x,
    weight,
    bias,
    initial_state,
    dy,
    dfinal,
    dx,
    dinitial,
    partial,
    T,
    D,
    num_tiles,
    stride_b,
    stride_t,
    stride_d,
    dy_stride_b,
    dy_stride_t,
    dy_stride_d,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CHANNEL_FIRST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """With g_t = dy_t act'(p_t), p recomputed, and g = 0 outside of 0 .. T - 1:

    dx_t = sum_i w_i g_{t+(W-1)-i} (at t < 0: the gradient of the initial state), plus that of the final state
    dw_i = sum_t g_t x_{t-(W-1)+i},   db = sum_t g_t, over the steps of this program, into its row of partial
    """
    num_d, num_t = tl.cdiv(D, BLOCK_D), tl.cdiv(T, num_tiles * GROUPS * STEPS)
    i_d, i_bt = tl.program_id(0) % num_d, tl.program_id(0) // num_d
    i_b, i_t = (i_bt // num_t).to(tl.int64), i_bt % num_t
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    dx_stride_t = 1 if CHANNEL_FIRST else D
    dx_stride_d = T if CHANNEL_FIRST else 1
    o_wide = o_d.to(tl.int64)[:, None]
    p_x = x + i_b * stride_b + o_wide * stride_d
    p_dy = dy + i_b * dy_stride_b + o_wide * dy_stride_d
    p_dx = dx + i_b * T * D + o_wide * dx_stride_d
    o_s = (i_b * D + o_wide) * (W - 1)
    taps = _load_taps(weight, o_d, m_d, W)
    b_bias = 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)[:, None]
    # dw_0 .. dw_{W-1}, db
    sums = ()
    for _ in tl.static_range(W + 1):
        sums += (tl.zeros([BLOCK_D, GROUPS], tl.float32),)

    for i in range(num_tiles):
        o_t = ((i_t * num_tiles + i) * GROUPS + tl.arange(0, GROUPS)) * STEPS
        steps = _load_steps(p_x, o_t, m_d, T, stride_t, STEPS, W - 1, W - 1, CHANNEL_FIRST)
        gradients = _load_steps(p_dy, o_t, m_d, T, dy_stride_t, STEPS, 0, W - 1, CHANNEL_FIRST)
        if initial_state is not None:
            steps = _put_state(steps, initial_state + o_s, o_t, m_d, x.dtype.element_ty, W)

        # g_0 .. g_{STEPS + W - 2} of every group
        g = ()
        for k in tl.static_range(STEPS + W - 1):
            b_g = gradients[k]
            if SILU:
                b_p = _pre_activation(steps, taps, b_bias, k, W)
                b_sigmoid = _sigmoid(b_p)
                b_g *= b_sigmoid * (1.0 + b_p * (1.0 - b_sigmoid))
            g += (b_g,)
        for k in tl.static_range(STEPS):
            added = ()
            for j in tl.static_range(W):
                added += (sums[j] + g[k] * steps[k + j],)
            added += (sums[W] + g[k],)
            sums = added

        outputs = ()
        for k in tl.static_range(STEPS):
            b_dx = _input_gradient(g, taps, k + W - 1, W)
            if dfinal is not None:
                b_dx += _load_final(dfinal + o_s, o_t + (k + W - 1) - T, m_d, W)
            outputs += (b_dx,)
        _store_steps(p_dx, o_t, m_d, T, dx_stride_t, outputs, STEPS, CHANNEL_FIRST)

        if dinitial is not None:
            m_s = m_d[:, None] & (o_t == 0)[None, :]
            for k in tl.static_range(W - 1):
                b_ds = _input_gradient(g, taps, k, W)
                # part of the state is left over at the end of a sequence shorter than it
                if dfinal is not None:
                    b_ds += _load_final(dfinal + o_s, o_t + k - T, m_d, W)
                tl.store(dinitial + o_s + (k + 0 * o_t)[None, :], b_ds.to(dinitial.dtype.element_ty), mask=m_s)

    p_partial = partial + i_bt.to(tl.int64) * D * (W + 1)
    for j in tl.static_range(W):
        tl.store(p_partial + o_d * W + j, tl.sum(sums[j], 1), mask=m_d)
    tl.store(p_partial + D * W + o_d, tl.sum(sums[W], 1), mask=m_d)


@triton.jit
def _add_rows_kernel(partial, dweight, dbias, rows, size, total, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of the columns of partial [rows, total]: the first `size` are dweight, the others dbias."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_sum = column_sums(partial, o, o < total, rows, total, ROWS)
    tl.store(dweight + o, b_sum.to(dweight.dtype.element_ty), mask=o < size)
    if dbias is not None:
        tl.store(dbias + o - size, b_sum.to(dbias.dtype.element_ty), mask=(o >= size) & (o < total))


@triton.jit
def _conv_step_kernel(
    x,
    weight,
    bias,
    state,
    y,
    D,
    stride_b,
    stride_d,
    state_stride_b,
    state_stride_d,
    state_stride_w,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y = act(sum_i w_i s_i + w_{W-1} x + b) and s = (s_1 .. s_{W-2}, x) in place, for one row and BLOCK_D channels."""
    num_d = tl.cdiv(D, BLOCK_D)
    i_b = (tl.program_id(0) // num_d).to(tl.int64)
    o_d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_wide = o_d.to(tl.int64)
    p_s = state + i_b * state_stride_b + o_wide * state_stride_d
    # the state may be wider or narrower than x, and what it keeps is what it computes with
    b_x = tl.load(x + i_b * stride_b + o_wide * stride_d, mask=m_d, other=0.0).to(state.dtype.element_ty)
    b_p = tl.zeros([BLOCK_D], tl.float32)
    if bias is not None:
        b_p += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    for i in tl.static_range(W):
        b_w = tl.load(weight + o_d * W + i, mask=m_d, other=0.0).to(tl.float32)
        b_s = b_x
        if i < W - 1:
            b_s = tl.load(p_s + i * state_stride_w, mask=m_d, other=0.0)
        if i > 0:
            tl.store(p_s + (i - 1) * state_stride_w, b_s, mask=m_d)
        b_p += b_w * b_s.to(tl.float32)
    b_y = b_p * _sigmoid(b_p) if SILU else b_p
    tl.store(y + i_b * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


def _is_channel_first(x: Tensor) -> bool:
    _, stride_t, stride_d = x.stride()
    return stride_t == 1 and (stride_d != 1 or x.shape[2] == 1)


def _dense(x: Tensor, channel_first: bool) -> Tensor:
    """Empty, of the shape and memory order of x."""
    batch, length, width = x.shape
    if channel_first:
        return torch.empty((batch, width, length), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty((batch, length, width), dtype=x.dtype, device=x.device)


def _plan(x: Tensor, config: Config) -> tuple[int, int, int, int]:
    """(rows of programs, programs, BLOCK_D, tiles of a program): no larger than a small x has use for."""
    batch, length, width = x.shape
    block_d = min(config.block_d, power_of_2(width))
    in_time = cdiv(length, config.groups * config.steps)
    tiles = min(config.tiles, in_time)
    rows = batch * cdiv(in_time, tiles)
    return rows, rows * cdiv(width, block_d), block_d, tiles


def conv_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    return_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    batch, length, width = x.shape
    taps, channel_first = weight.shape[1], _is_channel_first(x)
    config = FORWARD[channel_first, x.element_size()]
    y = _dense(x, channel_first)
    final_state = x.new_empty(batch, width, taps - 1) if return_final_state else None
    _, programs, block_d, num_tiles = _plan(x, config)
    launch(
        _conv_fwd_kernel,
        programs,
        x,
        weight,
        bias,
        initial_state,
        y,
        final_state,
        length,
        width,
        num_tiles,
        *x.stride(),
        W=taps,
        SILU=activation == "silu",
        CHANNEL_FIRST=channel_first,
        BLOCK_D=block_d,
        GROUPS=config.groups,
        STEPS=config.steps,
        num_warps=config.num_warps,
    )
    return y, final_state


def conv_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    dy: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial state."""
    _, length, width = x.shape
    taps, channel_first = weight.shape[1], _is_channel_first(x)
    config = BACKWARD[channel_first, x.element_size()]
    dx = _dense(x, channel_first)
    dinitial = None if initial_state is None else torch.empty_like(initial_state)
    rows, programs, block_d, num_tiles = _plan(x, config)
    # [D, W] of dweight, then [D] of dbias
    partial = torch.empty((rows, width * (taps + 1)), dtype=torch.float32, device=x.device)
    launch(
        _conv_bwd_kernel,
        programs,
        x,
        weight,
        bias,
        initial_state,
        dy,
        dfinal,
        dx,
        dinitial,
        partial,
        length,
        width,
        num_tiles,
        *x.stride(),
        *dy.stride(),
        W=taps,
        SILU=activation == "silu",
        CHANNEL_FIRST=channel_first,
        BLOCK_D=block_d,
        GROUPS=config.groups,
        STEPS=config.steps,
        num_warps=config.num_warps,
    )
    dweight = torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    launch(
        _add_rows_kernel, cdiv(width * (taps + 1), COLUMNS),
        partial, dweight, dbias, rows, width * taps, width * (taps + 1),
        ROWS=ROWS, BLOCK=COLUMNS, num_warps=4,
    )  # fmt: skip
    return dx, dweight, dbias, dinitial


class CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_state: Tensor | None,
        activation: str | None,
        return_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        initial_state = None if initial_state is None else initial_state.contiguous()
        save(ctx, x, weight, bias, initial_state)
        ctx.activation = activation
        ctx.set_materialize_grads(False)
        return conv_fwd(x, weight, bias, initial_state, activation, return_final_state)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, initial_state = saved(ctx)
        channel_first = _is_channel_first(x)
        if dy is None:
            dy = _dense(x, channel_first).zero_()
        elif dy.stride(1 if channel_first else 2) != 1:
            # one pass over dy, where reading it across its order would cost many
            dy = _dense(x, channel_first).copy_(dy)
        dfinal = None if dfinal is None else dfinal.contiguous()
        return *conv_bwd(x, weight, bias, initial_state, ctx.activation, dy, dfinal), None, None


def causal_conv1d_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    return_final_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """y [B, T, D], in the memory order of x, and on request the final state [B, D, W - 1], both in the dtype of x."""
    tensors = (x, weight, bias, initial_state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        y, state = CausalConv1d.apply(*tensors, activation, return_final_state)
    else:
        weight, bias, initial_state = (m if m is None else m.contiguous() for m in tensors[1:])
        y, state = conv_fwd(x, weight, bias, initial_state, activation, return_final_state)
    return (y, state) if return_final_state else y


def causal_conv1d_step_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None
) -> Tensor:
    """One step without gradients: x [B, D] to y [B, D]; state [B, D, W - 1] is updated in place."""
    batch, width = x.shape
    y = torch.empty((batch, width), dtype=x.dtype, device=x.device)
    launch(
        _conv_step_kernel,
        batch * cdiv(width, STEP_BLOCK_D),
        x,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        state,
        y,
        width,
        *x.stride(),
        *state.stride(),
        W=weight.shape[1],
        SILU=activation == "silu",
        BLOCK_D=STEP_BLOCK_D,
        num_warps=4,
    )
    return y
