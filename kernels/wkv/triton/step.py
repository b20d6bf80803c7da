"""One step of WKV, for decoding."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.device import speaks_ptx
from subquad.kernels.launch import cdiv, launch
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.wkv.triton.arithmetic import add, exp

BLOCK_D = 128


@triton.jit
def _wkv_step_kernel(
    k, v, w, u, state, y, D, k_stride_b, v_stride_b, s_stride_b, s_stride_i, s_stride_d,
    BLOCK_D: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """y [batch, D] for BLOCK_D channels of one batch row; the state [batch, 3, D] is updated in place."""
    num_d = tl.cdiv(D, BLOCK_D)
    i_b = (tl.program_id(0) // num_d).to(tl.int64)
    o_d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    p_state = state + i_b * s_stride_b + o_d.to(tl.int64) * s_stride_d
    b_a = tl.load(p_state, mask=m_d, other=0.0).to(tl.float32)
    b_b = tl.load(p_state + s_stride_i, mask=m_d, other=0.0).to(tl.float32)
    b_p = tl.load(p_state + 2 * s_stride_i, mask=m_d, other=0.0).to(tl.float32)
    b_k = tl.load(k + i_b * k_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_b * v_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_w = tl.load(w + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_u = tl.load(u + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_scale = tl.maximum(b_p, b_u + b_k)
    b_past, b_present = exp(b_p - b_scale, PTX), exp(b_u + b_k - b_scale, PTX)
    b_y = (b_past * b_a + b_present * b_v) / (b_past * b_b + b_present)
    tl.store(y + i_b * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)
    b_a, b_b, b_p = add((b_a, b_b, b_p), b_v, 1.0, b_k, b_w, PTX)
    tl.store(p_state, b_a.to(state.dtype.element_ty), mask=m_d)
    tl.store(p_state + s_stride_i, b_b.to(state.dtype.element_ty), mask=m_d)
    tl.store(p_state + 2 * s_stride_i, b_p.to(state.dtype.element_ty), mask=m_d)


def wkv_step_triton(k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor) -> Tensor:
    """`wkv_step` without gradients, for arguments whose shapes were checked; the state may have any strides."""
    batch, width = k.shape
    y = torch.empty(batch, width, dtype=v.dtype, device=v.device)
    k, v = dense_channels(k), dense_channels(v)
    s_stride_b, s_stride_i, s_stride_d = state.stride()
    launch(
        _wkv_step_kernel, batch * cdiv(width, BLOCK_D), k=k, v=v, w=dense(log_decay), u=dense(bonus), state=state, y=y,
        D=width, k_stride_b=k.stride(0), v_stride_b=v.stride(0), s_stride_b=s_stride_b, s_stride_i=s_stride_i,
        s_stride_d=s_stride_d, BLOCK_D=BLOCK_D, PTX=speaks_ptx(), num_warps=4,
    )  # fmt: skip
    return y
