"""Groups of consecutive steps in registers: loads, stores and the arithmetic that both directions need.

    p_t = sum_{i < W} w_i x_{t-(W-1)+i} + b

Steps of a group are a tuple of float32 tiles [BLOCK_D, GROUPS], one a step.
"""

# a tuple of tiles that grows in a loop has no type that mypy knows
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

MINUS_LOG2E = tl.constexpr(-1.4426950408889634)


@triton.jit
def _channels(i_d, D, UNIT: tl.constexpr, BLOCK_D: tl.constexpr):
    """The channels of program i_d, of a head of UNIT channels where that is not 0, and their mask."""
    o_c = tl.arange(0, BLOCK_D)
    o_d = i_d * (UNIT if UNIT else BLOCK_D) + o_c
    m_d = o_d < D
    if UNIT:
        m_d = m_d & (o_c < UNIT)
    return o_d, m_d


@triton.jit
def _load_group(p_row, o_t, m_d, T, STEPS: tl.constexpr):
    """Channel-first: steps o_t .. o_t + STEPS - 1 of every group by one load, taken apart into one tile a step."""
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
    p_row, o_t, m_d, T, stride_t,
    STEPS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, CHANNEL_FIRST: tl.constexpr,
):  # fmt: skip
    """Steps -BEFORE .. STEPS + AFTER - 1 of every group; zeros outside of 0 .. T - 1."""
    steps = ()
    if CHANNEL_FIRST:
        # whole groups on both sides: loads at odd offsets would be two bytes wide
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
    """Stores the STEPS steps of every group, the inverse of `_load_steps` without steps on the sides."""
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
    """The taps of every channel as W tiles [BLOCK_D, 1]."""
    o_i = tl.arange(0, 4)[None, :]
    m_w = m_d[:, None] & (o_i < W)
    b_w = tl.load(p_w + o_d[:, None] * W + o_i, mask=m_w, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(b_w, [o_d.shape[0], 2, 2]))
    b_0, b_2 = tl.split(even)
    b_1, b_3 = tl.split(odd)
    return (b_0[:, None], b_1[:, None], b_2[:, None], b_3[:, None])[:W]


@triton.jit
def _put_state(steps, p_state, o_t, m_d, dtype: tl.constexpr, W: tl.constexpr):
    """Adds the initial state to the W - 1 steps before the first group, which are zeros; `steps` begin with them."""
    filled = ()
    for i in tl.static_range(W - 1):
        m_s = m_d[:, None] & (o_t == 0)[None, :]
        b_s = tl.load(p_state + (i + 0 * o_t)[None, :], mask=m_s, other=0.0)
        # rounded to the dtype of x
        filled += (steps[i] + b_s.to(dtype).to(tl.float32),)
    return filled + steps[W - 1 :]


@triton.jit
def _pre_activation(steps, taps, b_bias, k: tl.constexpr, W: tl.constexpr):
    """p_t at step k of every group, where `steps` begin W - 1 steps earlier."""
    b_p = b_bias + taps[0] * steps[k]
    for i in tl.static_range(1, W):
        b_p += taps[i] * steps[k + i]
    return b_p


@triton.jit
def _sigmoid(b_p):
    # exp and a division would add instructions that handle subnormal numbers
    b_root = tl.rsqrt(1.0 + tl.exp2(b_p * MINUS_LOG2E))
    return b_root * b_root


@triton.jit
def _input_gradient(g, taps, k: tl.constexpr, W: tl.constexpr):
    """sum_i w_i g_{k-i} = dx_{k-(W-1)}, where g_j is zero for j < 0."""
    b_dx = taps[0] * g[k]
    for i in tl.static_range(1, W):
        if i <= k:
            b_dx += taps[i] * g[k - i]
    return b_dx


@triton.jit
def _load_final(p_final, o_f, m_d, W: tl.constexpr):
    """The gradient of the final state at the steps that it consists of, zeros elsewhere."""
    m_f = m_d[:, None] & (o_f >= 0)[None, :] & (o_f < W - 1)[None, :]
    return tl.load(p_final + o_f[None, :], mask=m_f, other=0.0).to(tl.float32)
