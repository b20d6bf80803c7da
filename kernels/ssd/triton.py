"""`ssd` on the kernels of gated linear attention for heads that share queries and keys, with weights.

Derivation and cost: `gated_linear_attention.triton.group_reads` and `groups`, and the README.

Layout:  q, k, v with contiguous channels and any other strides; weights with any strides.
float32: sums, decays, weights and the states while they are updated. Operands of products have the dtype of the inputs
         where all are bfloat16, else float32.
Limits:  none; half precision whose K or V is above 16 and no multiple of it is padded, at the cost of a copy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.gated_linear_attention.triton.autograd import padding
from subquad.kernels.gated_linear_attention.triton.group_reads import Weights
from subquad.kernels.gated_linear_attention.triton.passes import GradDtypes, group_backward, group_forward, group_states
from subquad.kernels.gated_linear_attention.triton.plan import PLANNER, EndStates, Plan
from subquad.kernels.gated_linear_attention.triton.scores import ChunkFactors
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.replay import Replayed


@Replayed
def _forward(tensors: tuple[Any, ...], plan: Plan, return_final_state: bool) -> tuple[Any, ...]:
    """y, the final state or None, and what the backward pass needs: the states before every chunk and its factors.

    tensors: q, k, v, log_decay, write, own, skip and the initial state.
    """
    q, k, v, log_decay, *weights, initial = tensors
    final = None
    if return_final_state:
        final = v.new_empty((v.shape[0], v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)
    boundary = EndStates(initial, final)
    y, states, factors = group_forward(
        plan, q, k, v, log_decay, boundary=boundary, dtype=v.dtype, weights=Weights(*weights)
    )
    return y, final, states, *factors


class SSD(OnceDifferentiable):
    """(recompute, return_final_state, initial state or None, inputs) to y, and the final state or None."""

    @staticmethod
    def forward(
        ctx: Any, recompute: bool, return_final_state: bool, initial: Tensor | None, *inputs: Any
    ) -> tuple[Tensor, Tensor | None]:
        ctx.plan = PLANNER(1.0, *inputs[:3])
        y, final, *kept = _forward((*inputs, initial), ctx.plan, return_final_state)
        save(ctx, initial, *inputs, *(() if recompute else kept))
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        initial, *tensors = saved(ctx)
        q, k, v, log_decay, write, own, skip, *kept = tensors
        weights = Weights(write, own, skip)
        if kept:
            states, factors = kept[0], ChunkFactors(*kept[1:])
        else:
            boundary = EndStates(initial, None)
            states, factors = group_states(ctx.plan, q, k, v, log_decay, boundary=boundary, write=write)
        dinitial = None if initial is None else torch.empty_like(initial)
        dq, dk, dv, dg, dweights = group_backward(
            ctx.plan,
            q,
            k,
            v,
            torch.zeros_like(v) if dy is None else dense_channels(dy),
            states=states,
            factors=factors,
            boundary=EndStates(dense(dfinal), dinitial),
            dtypes=GradDtypes(q.dtype, k.dtype, v.dtype, log_decay.dtype if ctx.needs_input_grad[6] else None),
            weights=weights,
        )
        of_weights = (None if d is None or w is None else d.to(w.dtype) for d, w in zip(dweights, weights, strict=True))
        return None, None, dinitial, dq, dk, dv, dg, *of_weights


def ssd_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor,
    own: Tensor | None,
    skip: Tensor | None,
    initial_state: Tensor | None,
    return_final_state: bool,
    recompute: bool,
) -> tuple[Tensor, Tensor | None]:
    """`ssd` for arguments that were checked: y, and the final state or None."""
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    more_keys, more_values = padding(q), padding(v)
    if more_keys or more_values:
        q, k, v = F.pad(q, (0, more_keys)), F.pad(k, (0, more_keys)), F.pad(v, (0, more_values))
        if initial_state is not None:
            initial_state = F.pad(initial_state, (0, more_values, 0, more_keys))
    inputs = dense_channels(q), dense_channels(k), dense_channels(v), log_decay, write, own, dense(skip)
    initial_state = dense(initial_state)
    if needs_gradient(initial_state, *inputs):
        y, state = SSD.apply(recompute, return_final_state, initial_state, *inputs)
    else:
        y, state, *_ = _forward((*inputs, initial_state), PLANNER(1.0, *inputs[:3]), return_final_state)
    if more_keys or more_values:
        y = y[..., :value_dim]
        state = None if state is None else state[..., :key_dim, :value_dim].contiguous()
    return y, state
