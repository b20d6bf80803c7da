"""The forward kernel."""

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


@triton.jit(do_not_specialize=["T", "segment", "splits", "k_stride_b", "k_stride_t", "v_stride_b", "v_stride_t"])
def _wkv_fwd_kernel(
    k, v, w, u, initial, ends, y, exact, z, final,
    T, D, segment, splits, k_stride_b, k_stride_t, v_stride_b, v_stride_t,
    BLOCK_D: tl.constexpr, STEPS: tl.constexpr, PTX: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """WKV over one segment of time, for BLOCK_D channels of one batch row.

    k, v, y: [batch, T, D] with contiguous channels; y, exact, z and final may be None.   w, u: [D].
    initial: [batch, 3, D] or None.   ends: [batch, splits, 3, D], or None with one segment.
    FOLD:    False for the first launch over segments, which writes `ends`; True reads them and writes the results.
    exact:   [batch, T, D], float32: y before it is rounded.   z: the same, the logarithm of the denominator.
    final: [batch, 3, D].
    """
    i_s, i_b, o_d, m_d = locate(D, splits, BLOCK_D)
    b_w = tl.load(w + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_u = tl.load(u + o_d, mask=m_d, other=0.0).to(tl.float32)
    state = empty(BLOCK_D)
    if FOLD:
        if initial is not None:
            state = load_state(initial + i_b * 3 * D, D, o_d, m_d)
        if ends is not None:
            state = fold(state, ends + i_b * splits * 3 * D, D, o_d, m_d, b_w, T, segment, splits, i_s, False, PTX)
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    for t in range(t_first, t_last, STEPS):
        steps_k = load_steps(k + i_b * k_stride_b, k_stride_t, t, t_last, o_d, m_d, STEPS, 0.0)
        steps_v = load_steps(v + i_b * v_stride_b, v_stride_t, t, t_last, o_d, m_d, STEPS, 0.0)
        b_first = state[2]
        for j in tl.static_range(STEPS):
            b_k, b_v = steps_k[j], steps_v[j]
            m_t = t + j + 0 * o_d < t_last
            if y is not None:
                b_scale = tl.maximum(state[2], b_u + b_k)
                b_past, b_present = exp(state[2] - b_scale, PTX), exp(b_u + b_k - b_scale, PTX)
                b_total = b_past * state[1] + b_present
                b_y = (b_past * state[0] + b_present * b_v) / b_total
                o_t = (i_b * T + t + j) * D + o_d
                tl.store(y + o_t, b_y.to(y.dtype.element_ty), mask=m_d & m_t)
                if exact is not None:
                    tl.store(exact + o_t, b_y, mask=m_d & m_t)
                if z is not None:
                    tl.store(z + o_t, b_scale + tl.log(b_total), mask=m_d & m_t)
            new = add(state, b_v, 1.0, b_k, b_w, PTX)
            state = (
                tl.where(m_t, new[0], state[0]), tl.where(m_t, new[1], state[1]), tl.where(m_t, new[2], state[2]),
            )  # fmt: skip
        state = settle(state, b_first, b_w, STEPS)
    if not FOLD:
        store_state(ends + (i_b * splits + i_s) * 3 * D, state, D, o_d, m_d)
    elif final is not None:
        store_state(final + i_b * 3 * D, state, D, o_d, m_d & (i_s + 0 * o_d == splits - 1))
