"""`_step_kernel`: one position for decoding, without a gradient."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.gated_linear_attention.triton.decays import CHANNEL_DECAY, HEAD_DECAY, NO_DECAY
from subquad.kernels.gated_linear_attention.triton.plan import CHANNEL, HEAD, NONE, group_size
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense, dense_channels


@triton.jit
def _step_kernel(
    q, k, v, g, state, o, new,
    scale, H, K, V,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h, g_stride_b, g_stride_h,
    GROUP: tl.constexpr, DECAY: tl.constexpr, ON_VALUE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """new = diag(exp(g)) state + k^T v and o = scale q new: BLOCK_V columns of one head.

    GROUP heads share q and k. Each element of the state is read once and written once.
    """
    num_v = tl.cdiv(V, BLOCK_V)
    i_row = (tl.program_id(0) // num_v).to(tl.int64)
    i_b, i_h = i_row // H, i_row % H
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(0) % num_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K, o_v < V
    b_q = tl.load(q + i_b * q_stride_b + i_h // GROUP * q_stride_h + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(k + i_b * k_stride_b + i_h // GROUP * k_stride_h + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_b * v_stride_b + i_h * v_stride_h + o_v, mask=m_v, other=0.0).to(tl.float32)
    o_state = i_row * K * V + o_k[:, None] * V + o_v[None, :]
    m_state = m_k[:, None] & m_v[None, :]
    b_state = tl.load(state + o_state, mask=m_state, other=0.0).to(tl.float32)
    p_g = g
    if DECAY != NO_DECAY:
        p_g += i_b * g_stride_b + i_h * g_stride_h
    if DECAY == HEAD_DECAY:
        b_state *= tl.exp(tl.load(p_g).to(tl.float32))
    elif DECAY == CHANNEL_DECAY and ON_VALUE:
        b_state *= tl.exp(tl.load(p_g + o_v, mask=m_v, other=0.0).to(tl.float32))[None, :]
    elif DECAY == CHANNEL_DECAY:
        b_state *= tl.exp(tl.load(p_g + o_k, mask=m_k, other=0.0).to(tl.float32))[:, None]
    b_state += b_k[:, None] * b_v[None, :]
    tl.store(new + o_state, b_state.to(new.dtype.element_ty), mask=m_state)
    b_o = scale * tl.sum(b_q[:, None] * b_state, 0)
    tl.store(o + i_row * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)


STEP_ELEMENTS = 4096
"""Elements of the state that a program updates."""


def gated_linear_attention_step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    decay_on: str,
    scale: float,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """o [B, H, V] in the dtype of v and the next state [B, H, K, V] in that of the state; see the public operator."""
    (batch, heads, value_dim), (_, groups, key_dim) = v.shape, q.shape
    q, k, v, state = dense_channels(q), dense_channels(k), dense_channels(v), dense(state)
    kind, g_stride_b, g_stride_h = NONE, 0, 0
    if log_decay is not None:
        kind = CHANNEL if log_decay.dim() == 3 else HEAD
        if kind == CHANNEL:
            log_decay = dense_channels(log_decay)
        # a decay [H] is the same for the whole batch
        g_stride_b, g_stride_h = (0, log_decay.stride(0)) if log_decay.dim() == 1 else log_decay.stride()[:2]
    o = torch.empty(batch, heads, value_dim, dtype=v.dtype, device=v.device)
    new = state if in_place else torch.empty_like(state)
    block_k = power_of_2(key_dim)
    block_v = min(power_of_2(value_dim), max(4, STEP_ELEMENTS // block_k))
    launch(
        _step_kernel, batch * heads * cdiv(value_dim, block_v), q=q, k=k, v=v, g=log_decay, state=state, o=o, new=new,
        scale=scale, H=heads, K=key_dim, V=value_dim, q_stride_b=q.stride(0), q_stride_h=q.stride(1),
        k_stride_b=k.stride(0), k_stride_h=k.stride(1), v_stride_b=v.stride(0), v_stride_h=v.stride(1),
        g_stride_b=g_stride_b, g_stride_h=g_stride_h, GROUP=group_size(heads, groups), DECAY=kind,
        ON_VALUE=decay_on == "value", BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return o, new
