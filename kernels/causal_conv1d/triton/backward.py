"""The backward kernels: gradients of x, weight, bias and the initial state.

With g_t = dy_t act'(p_t), p recomputed, and g = 0 outside of 0 .. T - 1:

    dx_t = sum_i w_i g_{t+(W-1)-i}    (at t < 0: the gradient of the initial state), plus that of the final state
    dw_i = sum_t g_t x_{t-(W-1)+i},   db = sum_t g_t
"""

# a tuple of tiles that grows in a loop has no type that mypy knows
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.causal_conv1d.triton.plan import TUNING, Tuning, cover, empty_in_layout, is_channel_first
from subquad.kernels.causal_conv1d.triton.steps import (
    _input_gradient,
    _load_final,
    _load_steps,
    _load_taps,
    _pre_activation,
    _put_state,
    _sigmoid,
    _store_steps,
)
from subquad.kernels.launch import launch
from subquad.kernels.sums import parameter_gradients


@triton.jit(do_not_specialize=["num_tiles"])
def _conv_bwd_kernel(
    x, weight, bias, initial_state, dy, dfinal, dx, dinitial, partial,
    T, D, num_tiles,
    stride_b, stride_t, stride_d, dy_stride_b, dy_stride_t, dy_stride_d,
    W: tl.constexpr, SILU: tl.constexpr, X_FIRST: tl.constexpr, Y_FIRST: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The formulas of this module for num_tiles tiles of one batch row; dx is dense in the layout of x.

    X_FIRST, Y_FIRST: whether x, and dy, is channel-first.
    partial [programs in B and T, D (W + 1)]: dw [D, W], then db [D], summed over the steps of each program.
    """
    num_d, num_t = tl.cdiv(D, BLOCK_D), tl.cdiv(T, num_tiles * GROUPS * STEPS)
    i_d, i_bt = tl.program_id(0) % num_d, tl.program_id(0) // num_d
    i_b, i_t = (i_bt // num_t).to(tl.int64), i_bt % num_t
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    dx_stride_t = 1 if X_FIRST else D
    dx_stride_d = T if X_FIRST else 1
    o_wide = o_d.to(tl.int64)[:, None]
    p_x = x + i_b * stride_b + o_wide * stride_d
    p_dy = dy + i_b * dy_stride_b + o_wide * dy_stride_d
    p_dx = dx + i_b * T * D + o_wide * dx_stride_d
    o_s = (i_b * D + o_wide) * (W - 1)
    taps = _load_taps(weight, o_d, m_d, W)
    b_bias = 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)[:, None]
    # partial sums of dw_0 .. dw_{W-1} and db
    sums = ()
    for _ in tl.static_range(W + 1):
        sums += (tl.zeros([BLOCK_D, GROUPS], tl.float32),)

    for i in range(num_tiles):
        o_t = ((i_t * num_tiles + i) * GROUPS + tl.arange(0, GROUPS)) * STEPS
        steps = _load_steps(p_x, o_t, m_d, T, stride_t, STEPS, W - 1, W - 1, X_FIRST)
        gradients = _load_steps(p_dy, o_t, m_d, T, dy_stride_t, STEPS, 0, W - 1, Y_FIRST)
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
        _store_steps(p_dx, o_t, m_d, T, dx_stride_t, outputs, STEPS, X_FIRST)

        if dinitial is not None:
            m_s = m_d[:, None] & (o_t == 0)[None, :]
            for k in tl.static_range(W - 1):
                b_ds = _input_gradient(g, taps, k, W)
                # a sequence shorter than the state leaves part of it in the final state
                if dfinal is not None:
                    b_ds += _load_final(dfinal + o_s, o_t + k - T, m_d, W)
                tl.store(dinitial + o_s + (k + 0 * o_t)[None, :], b_ds.to(dinitial.dtype.element_ty), mask=m_s)

    p_partial = partial + i_bt.to(tl.int64) * D * (W + 1)
    for j in tl.static_range(W):
        tl.store(p_partial + o_d * W + j, tl.sum(sums[j], 1), mask=m_d)
    tl.store(p_partial + D * W + o_d, tl.sum(sums[W], 1), mask=m_d)


def conv_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    dy: Tensor,
    dfinal: Tensor | None,
    time_last: bool = False,
    tuning: Tuning = TUNING,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial state, given those of y and of the final state (or None).

    time_last: whether dy is channel-first; else it has the layout of x.
    """
    _, length, width = x.shape
    taps, x_first = weight.shape[1], is_channel_first(x)
    y_first = x_first or time_last
    tile = tuning.backward[x_first, y_first, x.element_size()]
    dx = empty_in_layout(x, x_first)
    dinitial = None if initial_state is None else torch.empty_like(initial_state)
    rows, programs, block_d, num_tiles = cover(x, tile)
    partial = torch.empty(rows, width * (taps + 1), dtype=torch.float32, device=x.device)
    stride_b, stride_t, stride_d = x.stride()
    dy_stride_b, dy_stride_t, dy_stride_d = dy.stride()
    launch(
        _conv_bwd_kernel, programs, x=x, weight=weight, bias=bias, initial_state=initial_state, dy=dy, dfinal=dfinal,
        dx=dx, dinitial=dinitial, partial=partial, T=length, D=width, num_tiles=num_tiles, stride_b=stride_b,
        stride_t=stride_t, stride_d=stride_d, dy_stride_b=dy_stride_b, dy_stride_t=dy_stride_t, dy_stride_d=dy_stride_d,
        W=taps, SILU=activation == "silu", X_FIRST=x_first, Y_FIRST=y_first, BLOCK_D=block_d, GROUPS=tile.groups,
        STEPS=tile.steps, **tile.options.keywords(),
    )  # fmt: skip
    dweight, dbias = parameter_gradients(partial, weight, bias)
    return dx, dweight, dbias, dinitial
