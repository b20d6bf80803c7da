"""The forward kernel: y and the final state.

p_t = sum_{i < W} w_i x_{t-(W-1)+i} + b,    y_t = act(p_t),    and for heads of length one y_t / sqrt(|y_t|^2 + eps)
"""

# a tuple of tiles that grows in a loop has no type that mypy knows
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.causal_conv1d.triton.plan import TUNING, Tuning, cover, empty_in_layout, is_channel_first
from subquad.kernels.causal_conv1d.triton.steps import (
    _channels,
    _load_steps,
    _load_taps,
    _pre_activation,
    _put_state,
    _sigmoid,
    _store_steps,
)
from subquad.kernels.launch import launch


@triton.jit(do_not_specialize=["num_tiles"])
def _conv_fwd_kernel(
    x, weight, bias, initial_state, y, final_state,
    T, D, num_tiles,
    stride_b, stride_t, stride_d, eps,
    W: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, X_FIRST: tl.constexpr, Y_FIRST: tl.constexpr,
    BLOCK_D: tl.constexpr, GROUPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """y for num_tiles tiles of one batch row, dense in its layout. X_FIRST, Y_FIRST: whether it is channel-first.

    UNIT: channels of a head of length one, each of which has a program of its own; 0 leaves y as it is.

    final_state [B, D, W - 1] or None: the last W - 1 steps of (initial state, x).
    """
    num_d, num_t = tl.cdiv(D, UNIT if UNIT else BLOCK_D), tl.cdiv(T, num_tiles * GROUPS * STEPS)
    # one grid axis, because the second and third end at 65535
    i_d, i_bt = tl.program_id(0) % num_d, tl.program_id(0) // num_d
    i_b, i_t = (i_bt // num_t).to(tl.int64), i_bt % num_t
    o_d, m_d = _channels(i_d, D, UNIT, BLOCK_D)
    y_stride_t = 1 if Y_FIRST else D
    y_stride_d = T if Y_FIRST else 1
    o_wide = o_d.to(tl.int64)[:, None]
    p_x = x + i_b * stride_b + o_wide * stride_d
    p_y = y + i_b * T * D + o_wide * y_stride_d
    taps = _load_taps(weight, o_d, m_d, W)
    b_bias = 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)[:, None]

    for i in range(num_tiles):
        o_t = ((i_t * num_tiles + i) * GROUPS + tl.arange(0, GROUPS)) * STEPS
        steps = _load_steps(p_x, o_t, m_d, T, stride_t, STEPS, W - 1, 0, X_FIRST)
        if initial_state is not None:
            steps = _put_state(steps, initial_state + (i_b * D + o_wide) * (W - 1), o_t, m_d, x.dtype.element_ty, W)
        outputs = ()
        for k in tl.static_range(STEPS):
            b_p = _pre_activation(steps, taps, b_bias, k, W)
            b_y = b_p * _sigmoid(b_p) if SILU else b_p
            if UNIT:
                b_y *= tl.rsqrt(tl.sum(b_y * b_y, 0) + eps)[None, :]
            outputs += (b_y,)
        _store_steps(p_y, o_t, m_d, T, y_stride_t, outputs, STEPS, Y_FIRST)

    # two conditions, because the first is decided at compile time
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


def conv_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    return_final_state: bool,
    time_last: bool = False,
    tuning: Tuning = TUNING,
    unit: int = 0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] and, on request, the final state [B, D, W - 1]. Parameters are contiguous.

    time_last: whether y is channel-first; else it has the layout of x.
    unit:      channels of every head of y, whose lengths are made one; 0 leaves y as it is.
    """
    _, length, width = x.shape
    taps, x_first = weight.shape[1], is_channel_first(x)
    y_first = x_first or time_last
    tile = tuning.forward[x_first, y_first, x.element_size()]
    tile = tile.for_heads(unit) if unit else tile
    y = empty_in_layout(x, y_first)
    final_state = x.new_empty(x.shape[0], width, taps - 1) if return_final_state else None
    _, programs, block_d, num_tiles = cover(x, tile, unit)
    stride_b, stride_t, stride_d = x.stride()
    launch(
        _conv_fwd_kernel, programs, x=x, weight=weight, bias=bias, initial_state=initial_state, y=y,
        final_state=final_state, T=length, D=width, num_tiles=num_tiles, stride_b=stride_b, stride_t=stride_t,
        stride_d=stride_d, eps=eps, W=taps, SILU=activation == "silu", UNIT=unit, X_FIRST=x_first, Y_FIRST=y_first,
        BLOCK_D=block_d, GROUPS=tile.groups, STEPS=tile.steps, **tile.options.keywords(),
    )  # fmt: skip
    return y, final_state
