"""Autograd."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.gated_linear_attention.triton.passes import attend, backward
from kernels.gated_linear_attention.triton.plan import rows
from kernels.launch import save, saved


class GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        *options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        o, final, (common, *kept) = attend(q, k, v, g, initial_state, *options, keep=True)
        save(ctx, *kept)
        ctx.options = common, options[0], None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, states, *made = saved(ctx)
        common, on_value, initial_dtype = ctx.options
        do = torch.zeros_like(v) if do is None else rows(do)
        dfinal = None if dfinal is None else dfinal.contiguous()
        dinitial = None
        if initial_dtype is not None:
            shape = (common.num_sequences(q), *q.shape[2:], v.shape[3])
            dinitial = torch.empty(shape, dtype=initial_dtype, device=q.device)
        dtypes = q.dtype, k.dtype, v.dtype, g.dtype if ctx.needs_input_grad[3] else None
        dq, dk, dv, dg = backward(common, q, k, v, g, on_value, (dfinal, dinitial), do, states, tuple(made), dtypes)
        return dq, dk, dv, dg, dinitial, None, None, None, None


def recorded(*inputs: Tensor | None) -> bool:
    """Whether gradients may be asked for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def gated_linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    decay_on: str,
    scale: float | None,
    initial_state: Tensor | None,
    return_final_state: bool,
    packed: list[int] | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Arguments and results as in the public operator; `packed` is cu_seqlens."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay.expand(*q.shape[:3])
    inputs = q, k, v, log_decay, initial_state
    options = decay_on == "value", scale, return_final_state, packed
    if recorded(*inputs):
        o, state = GatedLinearAttention.apply(*inputs, *options)
    else:
        o, state, _ = attend(*inputs, *options, keep=False)
    return (o, state) if return_final_state else o
