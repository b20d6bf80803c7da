"""One step of the short causal convolution, for decoding; without gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subquad.kernels.causal_conv1d.triton.steps import _sigmoid
from subquad.kernels.launch import cdiv, launch, overlap_options

BLOCK_D = 256
"""Channels of a program."""


@triton.jit
def _conv_step_kernel(
    x, weight, bias, state, y,
    D,
    stride_b, stride_d, state_stride_b, state_stride_d, state_stride_w,
    W: tl.constexpr, SILU: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y = act(sum_i w_i s_i + w_{W-1} x + b), and the state s becomes (s_1 .. s_{W-2}, x) in place.

    A program takes one batch row and BLOCK_D channels.
    """
    num_d = tl.cdiv(D, BLOCK_D)
    i_b = (tl.program_id(0) // num_d).to(tl.int64)
    o_d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_wide = o_d.to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    p_s = state + i_b * state_stride_b + o_wide * state_stride_d
    stride_w = tl.cast(state_stride_w, tl.int64)
    # x is rounded to the dtype of the state, so that the product is the one that later steps see
    b_x = tl.load(x + i_b * stride_b + o_wide * stride_d, mask=m_d, other=0.0).to(state.dtype.element_ty)
    b_p = tl.zeros([BLOCK_D], tl.float32)
    if bias is not None:
        b_p += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    for i in tl.static_range(W):
        b_w = tl.load(weight + o_d * W + i, mask=m_d, other=0.0).to(tl.float32)
        b_s = b_x
        if i < W - 1:
            b_s = tl.load(p_s + i * stride_w, mask=m_d, other=0.0)
        if i > 0:
            tl.store(p_s + (i - 1) * stride_w, b_s, mask=m_d)
        b_p += b_w * b_s.to(tl.float32)
    b_y = b_p * _sigmoid(b_p) if SILU else b_p
    tl.store(y + i_b * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


def conv_step(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None) -> Tensor:
    """x [B, D] to y [B, D]; state [B, D, W - 1] is updated in place. weight and bias are contiguous."""
    batch, width = x.shape
    y = torch.empty(batch, width, dtype=x.dtype, device=x.device)
    stride_b, stride_d = x.stride()
    state_stride_b, state_stride_d, state_stride_w = state.stride()
    launch(
        _conv_step_kernel, batch * cdiv(width, BLOCK_D), x=x, weight=weight, bias=bias, state=state, y=y, D=width,
        stride_b=stride_b, stride_d=stride_d, state_stride_b=state_stride_b, state_stride_d=state_stride_d,
        state_stride_w=state_stride_w, W=weight.shape[1], SILU=activation == "silu", BLOCK_D=BLOCK_D,
        **overlap_options(batch), num_warps=4,
    )  # fmt: skip
    return y
