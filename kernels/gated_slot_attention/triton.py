"""Gated slot attention in Triton: two passes of gated linear attention joined by a softmax, forward and backward.

    logits = GLA(q, k, slots; decay on values)   p = softmax(logits)   o = GLA(p, slots, v; decay on keys)

The passes are those of `kernels/gated_linear_attention/triton/`, where layout, precision and cost stand. Both decay
along the slots, so that slots exp(R) and exp(P_C) of a chunk are made once. Gradients: dp from the second pass,

    dlogits = p (dp - <p, dp>),

which is the cotangent of the first; slots and log-decays take part in both passes and have the sum of the two.

float32: logits, dp and the two parts that are summed. p and dlogits have the dtype of operands of products.
Kept for backward besides the inputs: p, the states before each chunk of both passes, M (K + V) / C numbers a position,
and with a decay 2 M + C more.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_linear_attention.triton.autograd import recorded
from kernels.gated_linear_attention.triton.passes import backward, forward
from kernels.gated_linear_attention.triton.plan import Plan, make_plan, rows
from kernels.gated_slot_attention.reference import State
from kernels.launch import cdiv, launch, power_of_2, save, saved

BLOCK = 4096
"""Numbers of a program that takes a softmax."""


@triton.jit
def _softmax_kernel(x, p, out, num_rows, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr):
    """Rows [num_rows, M]: out = softmax(x); with p, a softmax, out = p (x - <p, x>), the gradient behind x of p."""
    o_r = (tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    o_m = tl.arange(0, BM)[None, :]
    m_x = (o_r < num_rows) & (o_m < M)
    b_x = tl.load(x + o_r * M + o_m, mask=m_x, other=0.0).to(tl.float32)
    if p is None:
        b_x = tl.where(o_m < M, b_x, float("-inf"))
        b_x = tl.exp(b_x - tl.max(b_x, 1)[:, None])
        b_out = b_x / tl.sum(b_x, 1)[:, None]
    else:
        b_p = tl.load(p + o_r * M + o_m, mask=m_x, other=0.0).to(tl.float32)
        b_out = b_p * (b_x - tl.sum(b_p * b_x, 1)[:, None])
    tl.store(out + o_r * M + o_m, b_out.to(out.dtype.element_ty), mask=m_x)


def gsa_softmax(x: Tensor, p: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Over the last axis, see `_softmax_kernel`; x and p are dense."""
    out = x.new_empty(x.shape, dtype=dtype)
    num_slots = x.shape[-1]
    num_rows = x.numel() // num_slots
    block_m = power_of_2(num_slots)
    block_r = max(1, BLOCK // block_m)
    launch(_softmax_kernel, cdiv(num_rows, block_r), x, p, out, num_rows, M=num_slots, BM=block_m, BR=block_r)
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    g: Tensor | None,
    keys: Tensor | None,
    values: Tensor | None,
    scale: float,
    return_final_state: bool,
    packed: list[int] | None,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Any, ...]]:
    """o, the final states, and what backward needs if it is to be kept."""
    q, k, v, slots = rows(q), rows(k), rows(v), rows(slots)
    g = None if g is None else rows(g)
    forms = q, k, v, slots, g, keys, values
    first = make_plan(scale, *forms, ends=packed)
    # the last None makes it one of its own
    second = make_plan(1.0, *forms, None) if packed is None else first._replace(scale=1.0)
    initial = [None if x is None else x.contiguous() for x in (keys, values)]
    final: list[Tensor | None] = [None, None]
    if return_final_state:
        final = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in state_shapes(first, q, v, slots)]
    logits, states_1, made = forward(first, q, k, slots, g, True, (initial[0], final[0]), torch.float32, keep)
    p = gsa_softmax(logits, None, first.work)
    outgoing = None if g is None else (made[0], made[1])
    o, states_2, made = forward(second, p, slots, v, g, False, (initial[1], final[1]), v.dtype, keep, outgoing)
    return o, final[0], final[1], (first, second, q, k, v, slots, g, p, states_1, states_2, *made)


def state_shapes(plan: Plan, q: Tensor, v: Tensor, slots: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    batch, heads, num_slots = plan.num_sequences(q), q.shape[2], slots.shape[-1]
    return (batch, heads, q.shape[-1], num_slots), (batch, heads, num_slots, v.shape[-1])


class GatedSlotAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        g: Tensor | None,
        keys: Tensor | None,
        values: Tensor | None,
        *options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        o, final_1, final_2, (first, second, *kept) = attend(q, k, v, slots, g, keys, values, *options, keep=True)
        save(ctx, *kept)
        ctx.options = first, second, [None if x is None else x.dtype for x in (keys, values)]
        ctx.set_materialize_grads(False)
        return o, final_1, final_2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, do: Tensor | None, dkeys: Tensor | None, dvalues: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, slots, g, p, states_1, states_2, *made = saved(ctx)
        first, second, initial_dtypes = ctx.options
        do = torch.zeros_like(v) if do is None else rows(do)
        dinitial = [
            None if dtype is None else torch.empty(shape, dtype=dtype, device=q.device)
            for shape, dtype in zip(state_shapes(first, q, v, slots), initial_dtypes, strict=True)
        ]
        dfinal = [None if x is None else x.contiguous() for x in (dkeys, dvalues)]
        ends = tuple(zip(dfinal, dinitial, strict=True))

        wide = torch.float32
        dg_dtype = wide if g is not None and ctx.needs_input_grad[4] else None
        of_values = wide, wide, v.dtype, dg_dtype
        dp, dslots, dv, dg = backward(second, p, slots, v, g, False, ends[1], do, states_2, tuple(made), of_values)
        dlogits = gsa_softmax(dp, p, first.work)
        ends_1, kept = ends[0], tuple(made[:2])
        if g is None:
            dtypes = q.dtype, k.dtype, wide, None
            dq, dk, other, _ = backward(first, q, k, slots, None, True, ends_1, dlogits, states_1, kept, dtypes)
            dslots = dslots.add_(other).to(slots.dtype)
        else:
            dtypes, more = (q.dtype, k.dtype, slots.dtype, g.dtype if dg_dtype else None), (dslots, dg)
            dq, dk, dslots, dg = backward(first, q, k, slots, g, True, ends_1, dlogits, states_1, kept, dtypes, more)
        return dq, dk, dv, dslots, dg, dinitial[0], dinitial[1], None, None, None


def gated_slot_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    log_decay: Tensor | None,
    *,
    scale: float | None,
    initial_state: State | None,
    return_final_state: bool,
    packed: list[int] | None,
) -> Tensor | tuple[Tensor, State]:
    """Arguments and results as in the public operator; `packed` is cu_seqlens."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if log_decay is None and q.dtype == k.dtype == v.dtype == torch.bfloat16:
        # with a decay they are rounded where it is applied
        slots = slots.to(q.dtype)
    keys, values = (None, None) if initial_state is None else initial_state
    inputs, options = (q, k, v, slots, log_decay, keys, values), (scale, return_final_state, packed)
    if recorded(*inputs):
        o, keys, values = GatedSlotAttention.apply(*inputs, *options)
    else:
        o, keys, values, _ = attend(*inputs, *options, keep=False)
    if not return_final_state:
        return o
    assert keys is not None
    assert values is not None
    return o, (keys, values)
