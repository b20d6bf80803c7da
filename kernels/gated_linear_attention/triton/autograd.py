"""The operator in Triton with its derivative."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.gated_linear_attention.reference import each_head
from subquad.kernels.gated_linear_attention.triton.passes import GradDtypes, Options, attend, backward
from subquad.kernels.gated_linear_attention.triton.plan import PLANNER, EndStates, Planner
from subquad.kernels.gated_linear_attention.triton.scores import ChunkFactors
from subquad.kernels.layout import dense, dense_channels


class GatedLinearAttention(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor | None]:
        result = attend(q, k, v, g, initial_state, options, keep=True)
        save(ctx, *result.saved)
        ctx.plan, ctx.on_value = result.plan, options.on_value
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return result.o, result.final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, states, *factors = saved(ctx)
        do = torch.zeros_like(v) if do is None else dense_channels(do)
        dinitial = None
        if ctx.initial_dtype is not None:
            shape = (ctx.plan.num_sequences(q.shape[0]), v.shape[2], q.shape[3], v.shape[3])
            dinitial = torch.empty(shape, dtype=ctx.initial_dtype, device=q.device)
        dq, dk, dv, dg = backward(
            ctx.plan,
            q,
            k,
            v,
            g,
            do,
            states=states,
            factors=ChunkFactors(*factors),
            on_value=ctx.on_value,
            boundary=EndStates(dense(dfinal), dinitial),
            dtypes=GradDtypes(q.dtype, k.dtype, v.dtype, g.dtype if ctx.needs_input_grad[3] else None),
        )
        return dq, dk, dv, dg, dinitial, None


def gated_linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    decay_on: str = "key",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    sequence_ends: list[int] | None = None,
    planner: Planner = PLANNER,
) -> tuple[Tensor, Tensor | None]:
    """Arguments as in the public operator; o, and the final state or None.

    sequence_ends: 0 and where each packed sequence ends; none of them is empty.
    planner:       holds the tuning.
    """
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    scale = key_dim**-0.5 if scale is None else scale
    if log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay.expand(*v.shape[:3])
    if log_decay is None or log_decay.dim() == 4:
        # a channel's decays are those of a head, and so are its queries and keys once they hold them; without a decay
        # no model shares them, so there are no kernels for it
        q, k = each_head(q, v.shape[2]), each_head(k, v.shape[2])
    on_value = decay_on == "value"
    more_keys, more_values = (padding(x) for x in (q, v))
    if more_keys or more_values:
        # keys and values of zero add nothing to what is kept
        q, k, v = F.pad(q, (0, more_keys)), F.pad(k, (0, more_keys)), F.pad(v, (0, more_values))
        if log_decay is not None and log_decay.dim() == 4:
            log_decay = F.pad(log_decay, (0, more_values if on_value else more_keys))
        if initial_state is not None:
            initial_state = F.pad(initial_state, (0, more_values, 0, more_keys))
    inputs = q, k, v, log_decay, initial_state
    options = Options(on_value, scale, return_final_state, sequence_ends, planner)
    if needs_gradient(*inputs):
        o, final_state = GatedLinearAttention.apply(*inputs, options)
    else:
        result = attend(*inputs, options, keep=False)
        o, final_state = result.o, result.final_state
    if more_keys or more_values:
        o = o[..., :value_dim]
        if final_state is not None:
            final_state = final_state[..., :key_dim, :value_dim].contiguous()
    return o, final_state


def padding(x: Tensor) -> int:
    """The channels that x lacks to a multiple of 16, where it is of half precision and has more than 16.

    Rows of half precision that do not begin at multiples of 16 elements are read by two bytes at a time and not ahead
    of their use, and the addresses of single elements fill the registers.
    """
    return -x.shape[-1] % 16 if x.dtype.itemsize == 2 and x.shape[-1] > 16 else 0
