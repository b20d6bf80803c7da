"""The backward kernels: one goes back through time, one forward for the gradient of the decay."""

# Triton lets a name change its type while it traces
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.wkv.triton.arithmetic import (
    add,
    empty,
    exp,
    fold,
    load_state,
    load_steps,
    locate,
    settle,
    store_state,
)


@triton.jit
def _behind(
    dfinal, final, ends, i_b, i_s, D, o_d, m_d, b_w, T, segment, splits, BLOCK_D: tl.constexpr, PTX: tl.constexpr
):
    """g, h and r behind a segment, from the gradient of the final state [batch, 3, D] or None."""
    state = empty(BLOCK_D)
    if dfinal is not None:
        b_g, b_h, _ = load_state(dfinal + i_b * 3 * D, D, o_d, m_d)
        _, _, b_p = load_state(final + i_b * 3 * D, D, o_d, m_d)
        state = b_g, b_h, -b_p
    if ends is not None:
        state = fold(state, ends + i_b * splits * 3 * D, D, o_d, m_d, b_w, T, segment, splits, i_s, True, PTX)
    return state


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "k_stride_b", "k_stride_t", "v_stride_b", "v_stride_t", "dy_stride_b", "dy_stride_t",
    ]
)  # fmt: skip
def _wkv_bwd_kernel(
    k, v, w, u, initial, final, y, z, dy, dfinal, ends, dk, dv, du, dinitial,
    T, D, segment, splits, k_stride_b, k_stride_t, v_stride_b, v_stride_t, dy_stride_b, dy_stride_t,
    BLOCK_D: tl.constexpr, STEPS: tl.constexpr, PTX: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Gradients of keys, values, bonus and initial state over one segment, for BLOCK_D channels of one batch row.

    y, z:       [batch, T, D], float32, as forward has kept them.
    dy, dfinal: gradients of y [batch, T, D] with contiguous channels and of the final state, or None.
    ends:       [batch, splits, 3, D], what each segment adds to g, h and r; None with one segment.
    FOLD:       False for the first launch over segments, which writes `ends` only.
    dk, dv:     [batch, T, D].   du: [batch, splits, D], sums over a segment.   dinitial: [batch, 3, D] or None.
    """
    i_s, i_b, o_d, m_d = locate(D, splits, BLOCK_D)
    b_w = tl.load(w + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_u = tl.load(u + o_d, mask=m_d, other=0.0).to(tl.float32)
    state = empty(BLOCK_D)
    if FOLD:
        state = _behind(dfinal, final, ends, i_b, i_s, D, o_d, m_d, b_w, T, segment, splits, BLOCK_D, PTX)
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    b_du = tl.zeros([BLOCK_D], tl.float32)
    num_groups = tl.cdiv(t_last - t_first, STEPS)
    for i_g in range(num_groups):
        t = t_first + (num_groups - 1 - i_g) * STEPS
        steps_y = load_steps(y + i_b * T * D, D, t, t_last, o_d, m_d, STEPS, 0.0)
        steps_z = load_steps(z + i_b * T * D, D, t, t_last, o_d, m_d, STEPS, 1e38)
        steps_dy = load_steps(dy + i_b * dy_stride_b, dy_stride_t, t, t_last, o_d, m_d, STEPS, 0.0)
        if FOLD:
            steps_k = load_steps(k + i_b * k_stride_b, k_stride_t, t, t_last, o_d, m_d, STEPS, -1e38)
            steps_v = load_steps(v + i_b * v_stride_b, v_stride_t, t, t_last, o_d, m_d, STEPS, 0.0)
        # -z is the larger one at every step where u is at most -w, so that the scale cannot move away (see `settle`)
        for j in tl.static_range(STEPS - 1, -1, -1):
            b_y, b_z, b_dy = steps_y[j], steps_z[j], steps_dy[j]
            m_t = t + j + 0 * o_d < t_last
            if FOLD:
                b_k, b_v = steps_k[j], steps_v[j]
                b_past = exp(b_k + state[2], PTX)
                b_present = exp(b_u + b_k - b_z, PTX) * b_dy
                b_direct = tl.where(m_t, b_present * (b_v - b_y), 0.0)
                b_du += b_direct
                o_t = (i_b * T + t + j) * D + o_d
                b_dk = b_past * (state[0] * b_v + state[1]) + b_direct
                tl.store(dk + o_t, b_dk.to(dk.dtype.element_ty), mask=m_d & m_t)
                tl.store(dv + o_t, (b_past * state[0] + b_present).to(dv.dtype.element_ty), mask=m_d & m_t)
            new = add(state, b_dy, -b_dy * b_y, -b_z, b_w, PTX)
            state = (
                tl.where(m_t, new[0], state[0]), tl.where(m_t, new[1], state[1]), tl.where(m_t, new[2], state[2]),
            )  # fmt: skip
    if not FOLD:
        store_state(ends + (i_b * splits + i_s) * 3 * D, state, D, o_d, m_d)
    else:
        tl.store(du + (i_b * splits + i_s) * D + o_d, b_du, mask=m_d)
        if dinitial is not None:
            _, _, b_p = load_state(initial + i_b * 3 * D, D, o_d, m_d)
            b_size = exp(b_p + state[2], PTX)
            m_first = m_d & (i_s + 0 * o_d == 0)
            store_state(dinitial + i_b * 3 * D, (b_size * state[0], b_size * state[1], 0.0 * b_size), D, o_d, m_first)


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "k_stride_b", "k_stride_t", "v_stride_b", "v_stride_t", "dy_stride_b", "dy_stride_t",
    ]
)  # fmt: skip
def _wkv_decay_kernel(
    k, v, w, initial, final, y, z, dy, dfinal, ends, after, dw,
    T, D, segment, splits, k_stride_b, k_stride_t, v_stride_b, v_stride_t, dy_stride_b, dy_stride_t,
    BLOCK_D: tl.constexpr, STEPS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The gradient of the logarithm of the decay, [batch, splits, D], sums over a segment.

    ends, after: [batch, splits, 3, D], the ends of the segments forward, and of the gradients in reverse; None with one
                 segment.
    """
    i_s, i_b, o_d, m_d = locate(D, splits, BLOCK_D)
    b_w = tl.load(w + o_d, mask=m_d, other=0.0).to(tl.float32)
    state = empty(BLOCK_D)
    if initial is not None:
        state = load_state(initial + i_b * 3 * D, D, o_d, m_d)
    if ends is not None:
        state = fold(state, ends + i_b * splits * 3 * D, D, o_d, m_d, b_w, T, segment, splits, i_s, False, PTX)
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    b_dw = tl.zeros([BLOCK_D], tl.float32)
    # derivatives of a exp(p) and b exp(p) by w, over exp(p)
    b_da, b_db = b_dw, b_dw
    for t in range(t_first, t_last, STEPS):
        steps_k = load_steps(k + i_b * k_stride_b, k_stride_t, t, t_last, o_d, m_d, STEPS, -1e38)
        steps_v = load_steps(v + i_b * v_stride_b, v_stride_t, t, t_last, o_d, m_d, STEPS, 0.0)
        steps_y = load_steps(y + i_b * T * D, D, t, t_last, o_d, m_d, STEPS, 0.0)
        steps_z = load_steps(z + i_b * T * D, D, t, t_last, o_d, m_d, STEPS, 1e38)
        steps_dy = load_steps(dy + i_b * dy_stride_b, dy_stride_t, t, t_last, o_d, m_d, STEPS, 0.0)
        b_first = state[2]
        for j in tl.static_range(STEPS):
            m_t = t + j + 0 * o_d < t_last
            a, b, p = state
            b_size = exp(p - steps_z[j], PTX)
            b_dw += tl.where(m_t, b_size * steps_dy[j] * (b_da - steps_y[j] * b_db), 0.0)
            b_past = exp(p + b_w - tl.maximum(p + b_w, steps_k[j]), PTX)
            new = add(state, steps_v[j], 1.0, steps_k[j], b_w, PTX)
            b_da = tl.where(m_t, b_past * (b_da + a), b_da)
            b_db = tl.where(m_t, b_past * (b_db + b), b_db)
            state = tl.where(m_t, new[0], a), tl.where(m_t, new[1], b), tl.where(m_t, new[2], p)
        state = settle(state, b_first, b_w, STEPS)
    b_g, b_h, b_r = _behind(dfinal, final, after, i_b, i_s, D, o_d, m_d, b_w, T, segment, splits, BLOCK_D, PTX)
    b_dw += exp(state[2] + b_r, PTX) * (b_g * b_da + b_h * b_db)
    tl.store(dw + (i_b * splits + i_s) * D + o_d, b_dw, mask=m_d)
