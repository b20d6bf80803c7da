"""One step for decoding."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_linear_attention.triton.plan import CHANNEL, HEAD, NONE
from kernels.launch import cdiv, launch, power_of_2


@triton.jit
def _step_kernel(
    q,
    k,
    v,
    g,
    state,
    o,
    new,
    scale,
    H,
    K,
    V,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    v_stride_b,
    v_stride_h,
    g_stride_b,
    g_stride_h,
    DECAY: tl.constexpr,
    ON_VALUE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """new = decay(state) + k^T v, o = scale q new: BLOCK_V columns of one head, which read and write the state once."""
    num_v = tl.cdiv(V, BLOCK_V)
    i_row = (tl.program_id(0) // num_v).to(tl.int64)
    i_b, i_h = i_row // H, i_row % H
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(0) % num_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K, o_v < V
    b_q = tl.load(q + i_b * q_stride_b + i_h * q_stride_h + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(k + i_b * k_stride_b + i_h * k_stride_h + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_b * v_stride_b + i_h * v_stride_h + o_v, mask=m_v, other=0.0).to(tl.float32)
    o_s = i_row * K * V + o_k[:, None] * V + o_v[None, :]
    m_s = m_k[:, None] & m_v[None, :]
    b_s = tl.load(state + o_s, mask=m_s, other=0.0).to(tl.float32)
    p_g = g
    if DECAY != 0:
        p_g += i_b * g_stride_b + i_h * g_stride_h
    if DECAY == 1:
        b_s *= tl.exp(tl.load(p_g).to(tl.float32))
    elif DECAY == 2 and ON_VALUE:
        b_s *= tl.exp(tl.load(p_g + o_v, mask=m_v, other=0.0).to(tl.float32))[None, :]
    elif DECAY == 2:
        b_s *= tl.exp(tl.load(p_g + o_k, mask=m_k, other=0.0).to(tl.float32))[:, None]
    b_s += b_k[:, None] * b_v[None, :]
    tl.store(new + o_s, b_s.to(new.dtype.element_ty), mask=m_s)
    b_o = scale * tl.sum(b_q[:, None] * b_s, 0)
    tl.store(o + i_row * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)


STEP_BLOCK = 4096
"""Numbers of the state that a program of a step takes."""


def gated_linear_attention_step_triton(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, *, decay_on: str, scale: float
) -> tuple[Tensor, Tensor]:
    """One step without gradients: o [B, H, V] in the dtype of v and the next state in that of the state."""
    batch, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    state = state.contiguous()
    kind, g_strides = NONE, (0, 0)
    if log_decay is not None:
        kind = CHANNEL if log_decay.dim() == 3 else HEAD
        if kind == CHANNEL and log_decay.stride(2) != 1:
            log_decay = log_decay.contiguous()
        g_strides = (0, log_decay.stride(0)) if log_decay.dim() == 1 else log_decay.stride()[:2]
    o, new = torch.empty((batch, heads, value_dim), dtype=v.dtype, device=v.device), torch.empty_like(state)
    block_k = power_of_2(key_dim)
    block_v = min(power_of_2(value_dim), max(4, STEP_BLOCK // block_k))
    launch(
        _step_kernel, batch * heads * cdiv(value_dim, block_v),
        q, k, v, log_decay, state, o, new, scale, heads, key_dim, value_dim,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g_strides,
        DECAY=kind, ON_VALUE=decay_on == "value", BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return o, new
