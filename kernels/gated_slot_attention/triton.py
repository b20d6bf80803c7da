"""Gated slot attention in Triton: two passes of gated linear attention joined by a softmax, forward and backward.

    logits = GLA(q, k, slots; decay on values)   p = softmax(logits)   o = GLA(p, slots, v; decay on keys)

The passes are those of `kernels/gated_linear_attention/triton/`, whose docstring describes layout, precision and cost.
Both decay along the slots, so slots exp(R) and exp(P_C) of every chunk are computed once for both. Gradients: the
second pass gives dp, and

    dlogits = p (dp - <p, dp>)

is the output gradient of the first pass. Slots and log-decays take part in both passes; their gradients are sums.

float32: logits, dp, and the two gradients that are summed. p and dlogits have the dtype of operands of matrix products.
Saved for backward besides the inputs: p and the states before every chunk of both passes, M (K + V) / C elements for
each position, and with a decay 2 M + C more.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.gated_linear_attention.triton.passes import GradDtypes, backward, forward
from subquad.kernels.gated_linear_attention.triton.plan import PLANNER, EndStates, Plan, Planner
from subquad.kernels.gated_linear_attention.triton.scores import ChunkFactors
from subquad.kernels.gated_slot_attention.reference import State
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.replay import Replayed

SOFTMAX_ELEMENTS = 4096
"""Number of elements that one program of `_softmax_kernel` works on."""


@triton.jit
def _softmax_kernel(x, p, out, num_rows, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr):
    """Rows [num_rows, M]: out = softmax(x) without p; with p, the softmax, out = p (x - <p, x> / <p, 1>).

    The latter is the gradient of the logits where x is the gradient of p. A rounded p does not sum to 1; without the
    quotient the results would not sum to 0, and what the slots have in common would not cancel in the gradient of q.
    """
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
        # rows beyond the last one are zeros
        b_mean = tl.sum(b_p * b_x, 1) / tl.maximum(tl.sum(b_p, 1), 0.5)
        b_out = b_p * (b_x - b_mean[:, None])
    tl.store(out + o_r * M + o_m, b_out.to(out.dtype.element_ty), mask=m_x)


def gsa_softmax(x: Tensor, p: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Along the last axis in `dtype`, see `_softmax_kernel`; x and p are contiguous."""
    out = x.new_empty(x.shape, dtype=dtype)
    num_slots = x.shape[-1]
    num_rows = x.numel() // num_slots
    block_m = power_of_2(num_slots)
    block_r = max(1, SOFTMAX_ELEMENTS // block_m)
    launch(
        _softmax_kernel,
        cdiv(num_rows, block_r),
        x=x,
        p=p,
        out=out,
        num_rows=num_rows,
        M=num_slots,
        BM=block_m,
        BR=block_r,
    )
    return out


class Options(NamedTuple):
    """Arguments of the operator that are not tensors."""

    scale: float
    return_final_state: bool
    sequence_ends: list[int] | None
    """0 and the end of each packed sequence, or None."""
    planner: Planner


class Result(NamedTuple):
    """Results of one call, and the tensors that its backward pass needs."""

    o: Tensor
    final_keys: Tensor | None
    final_values: Tensor | None
    plans: tuple[Plan, Plan]
    """The plans of the first and of the second pass."""
    saved: tuple[Tensor | None, ...]
    """q, k, v, slots, g, p, the states before every chunk of both passes, and the chunk factors of the second."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    g: Tensor | None,
    keys: Tensor | None,
    values: Tensor | None,
    options: Options,
    *,
    keep: bool,
) -> Result:
    """The operator without autograd; `keep` says whether a backward pass follows."""
    q, k, v, slots = dense_channels(q), dense_channels(k), dense_channels(v), dense_channels(slots)
    g = dense_channels(g)
    # plans of packed sequences have tables of their own
    call = _attend if options.sequence_ends is None else _attend.function
    tensors = q, k, v, slots, g, dense(keys), dense(values)
    o, final_keys, final_values, plans, *kept = call(tensors, options, keep)
    return Result(o, final_keys, final_values, plans, (q, k, v, slots, g, *kept))


@Replayed
def _attend(tensors: tuple[Any, ...], options: Options, keep: bool) -> tuple[Any, ...]:
    """`Result` in one tuple, without the inputs that are saved."""
    q, k, v, slots, g, keys, values = tensors
    first = options.planner(options.scale, q, k, v, sequence_ends=options.sequence_ends)
    second = first._replace(scale=1.0)
    final_keys = final_values = None
    if options.return_final_state:
        final_keys, final_values = (
            torch.empty(shape, dtype=torch.float32, device=q.device) for shape in state_shapes(first, q, v, slots)
        )
    logits, states_1, factors = forward(
        first,
        q,
        k,
        slots,
        g,
        on_value=True,
        boundary=EndStates(keys, final_keys),
        dtype=torch.float32,
        keep=keep,
    )
    p = gsa_softmax(logits, None, first.work)
    o, states_2, factors = forward(
        second,
        p,
        slots,
        v,
        g,
        on_value=False,
        boundary=EndStates(values, final_values),
        dtype=v.dtype,
        keep=keep,
        known=factors,
    )
    return o, final_keys, final_values, (first, second), p, states_1, states_2, *factors


def state_shapes(plan: Plan, q: Tensor, v: Tensor, slots: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the memories of keys [B, H, K, M] and of values [B, H, M, V]."""
    batch, heads, num_slots = plan.num_sequences(q.shape[0]), q.shape[2], slots.shape[-1]
    return (batch, heads, q.shape[-1], num_slots), (batch, heads, num_slots, v.shape[-1])


class GatedSlotAttention(OnceDifferentiable):
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
        options: Options,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        result = attend(q, k, v, slots, g, keys, values, options, keep=True)
        save(ctx, *result.saved)
        ctx.plans = result.plans
        ctx.initial_dtypes = [None if x is None else x.dtype for x in (keys, values)]
        ctx.set_materialize_grads(False)
        return result.o, result.final_keys, result.final_values

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dkeys: Tensor | None, dvalues: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, slots, g, p, states_1, states_2, *rest = saved(ctx)
        factors = ChunkFactors(*rest)
        first, second = ctx.plans
        do = torch.zeros_like(v) if do is None else dense_channels(do)
        dinitial_keys, dinitial_values = (
            None if dtype is None else torch.empty(shape, dtype=dtype, device=q.device)
            for shape, dtype in zip(state_shapes(first, q, v, slots), ctx.initial_dtypes, strict=True)
        )
        wants_dg = g is not None and ctx.needs_input_grad[4]
        wide = torch.float32
        dp, dslots, dv, dg = backward(
            second,
            p,
            slots,
            v,
            g,
            do,
            states=states_2,
            factors=factors,
            on_value=False,
            boundary=EndStates(dense(dvalues), dinitial_values),
            dtypes=GradDtypes(wide, wide, v.dtype, wide if wants_dg else None),
        )
        dlogits = gsa_softmax(dp, p, first.work)
        # with a decay the last kernel of the first pass adds the gradients of the second to its own
        dq, dk, dslots_1, dg_1 = backward(
            first,
            q,
            k,
            slots,
            g,
            dlogits,
            states=states_1,
            factors=ChunkFactors(factors.k_out, factors.decay),
            on_value=True,
            boundary=EndStates(dense(dkeys), dinitial_keys),
            dtypes=GradDtypes(q.dtype, k.dtype, wide if g is None else slots.dtype, g.dtype if wants_dg else None),
            more=(None, None) if g is None else (dslots, dg),
        )
        if g is None:
            dslots_1 = dslots.add_(dslots_1).to(slots.dtype)
        return dq, dk, dv, dslots_1, dg_1, dinitial_keys, dinitial_values, None


def gated_slot_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    return_final_state: bool = False,
    sequence_ends: list[int] | None = None,
    planner: Planner = PLANNER,
) -> tuple[Tensor, State | None]:
    """Arguments as in the public operator; o, and the final state or None.

    sequence_ends: 0 and where each packed sequence ends; none of them is empty.
    planner:       holds the tuning.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if log_decay is None and q.dtype == k.dtype == v.dtype == torch.bfloat16:
        # with a decay, the kernel that applies it rounds the slots instead
        slots = slots.to(q.dtype)
    keys, values = (None, None) if initial_state is None else initial_state
    inputs = q, k, v, slots, log_decay, keys, values
    options = Options(scale, return_final_state, sequence_ends, planner)
    if needs_gradient(*inputs):
        o, keys, values = GatedSlotAttention.apply(*inputs, options)
    else:
        result = attend(*inputs, options, keep=False)
        o, keys, values = result.o, result.final_keys, result.final_values
    return o, None if keys is None or values is None or not return_final_state else (keys, values)
