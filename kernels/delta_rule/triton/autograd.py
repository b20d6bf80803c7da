"""The operator in Triton with its derivative."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.delta_rule.triton.back import delta_back
from subquad.kernels.delta_rule.triton.factors import delta_factors
from subquad.kernels.delta_rule.triton.grads import delta_grads
from subquad.kernels.delta_rule.triton.plan import PLANNER, SHORT_CHUNKS, ChunkFactors, Plan, Planner
from subquad.kernels.delta_rule.triton.row_grads import row_grads
from subquad.kernels.delta_rule.triton.segments import cut_time
from subquad.kernels.delta_rule.triton.walk import delta_walk
from subquad.kernels.device import float32_products, interpreted, is_hopper
from subquad.kernels.gated_linear_attention.reference import each_head
from subquad.kernels.gated_linear_attention.triton.plan import CHANNEL, EndStates, decay_kind, dense_channels
from subquad.kernels.layout import dense


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
    final_state: Tensor | None
    plan: Plan
    saved: tuple[Tensor | None, ...]
    """q, k, beta, g, write, plain, v where plain is given, delta, the states before every chunk, the transposes of
    the matrices of segments, which of them vanish, and the chunk factors."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    write: Tensor | None,
    plain: Tensor | None,
    initial_state: Tensor | None,
    options: Options,
    *,
    keep: bool,
) -> Result:
    """The operator without autograd; `keep` says whether a backward pass follows."""
    q, k, v = dense_channels(q), dense_channels(k), dense_channels(v)
    if g is not None and g.dim() == 4:
        g = dense_channels(g)
    if write is not None:
        write = dense_channels(write)
    if plain is not None:
        plain = dense_channels(plain)
    plan = options.planner(options.scale, q, k, v, sequence_ends=options.sequence_ends)
    if plan.work == torch.float32:
        # one tf32 product has the accuracy of float16, of which the solutions of the triangular systems lose some
        plan = plan._replace(precision=float32_products(), mild=plan.tuning.mild_float32)
    final = None
    if options.return_final_state:
        shape = plan.num_sequences(q.shape[0]), v.shape[2], q.shape[3], v.shape[3]
        final = q.new_empty(shape, dtype=torch.float32)
    segments = cut_time(plan, (*beta.shape, k.shape[-1]), v.shape[-1], decay_kind(g))
    factors = delta_factors(plan, q, k, beta, g, write, plain, keep=keep, bounded=segments.count > 1)
    boundary = EndStates(dense(initial_state), final)
    o, *kept = delta_walk(plan, q=q, k=k, v=v, factors=factors, boundary=boundary, keep=keep)
    own = None if plain is None else v
    return Result(o, final, plan, (q, k, beta, g, write, plain, own, *kept, *factors))


class DeltaRule(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        write: Tensor | None,
        plain: Tensor | None,
        initial_state: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor | None]:
        result = forward(q, k, v, beta, g, write, plain, initial_state, options, keep=True)
        save(ctx, *result.saved)
        ctx.plan, ctx.value_dtype = result.plan, v.dtype
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return result.o, result.final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, beta, g, write, plain, v, delta, states, transposes, vanished, *kept = saved(ctx)
        factors = ChunkFactors(*kept)
        do = torch.zeros_like(delta, dtype=ctx.value_dtype) if do is None else dense_channels(do)
        dinitial = None
        if ctx.initial_dtype is not None:
            shape = (ctx.plan.num_sequences(q.shape[0]), delta.shape[2], q.shape[3], delta.shape[3])
            dinitial = torch.empty(shape, dtype=ctx.initial_dtype, device=q.device)
        boundary = EndStates(dense(dfinal), dinitial)
        dv, drest, dstates = delta_back(
            ctx.plan,
            q=q,
            k=k,
            do=do,
            factors=factors,
            transposes=transposes,
            vanished=vanished,
            boundary=boundary,
        )
        given = {"q": q, "k": k, "beta": beta, "g": g, "delta": delta, "do": do, "dv": drest}
        given |= {"states": states, "dstates": dstates, "needs_dg": ctx.needs_input_grad[4]}
        dwrite = dplain = None
        if factors.steep is None:
            dq, dk, dbeta, dg = row_grads(ctx.plan, factors=factors, **given)
        else:
            own = {"write": write, "plain": plain, "v": v, "steep": factors.steep}
            dq, dk, dbeta, dg, dwrite, dplain = delta_grads(ctx.plan, **given, **own)
        return dq, dk, dv.to(ctx.value_dtype), dbeta, dg, dwrite, dplain, dinitial, None


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    write: Tensor | None = None,
    plain: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    sequence_ends: list[int] | None = None,
    planner: Planner | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Arguments as in the public operator; o, and the final state or None.

    sequence_ends: 0 and where each packed sequence ends; none of them is empty.
    planner:       holds the tuning; by default the faster one of `PLANNER` and `SHORT_CHUNKS`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if decay_kind(log_decay) == CHANNEL:
        # the kernels read keys that hold the decays of channels, which are those of a head
        q, k = each_head(q, v.shape[2]), each_head(k, v.shape[2])
    if plain is not None and log_decay is not None and log_decay.dtype == torch.bfloat16:
        # ptxas 12.8, which Triton 3.6 brings, makes wrong code of `_plain_grads_kernel` for log-decays in bfloat16
        log_decay = log_decay.float()
    inputs = q, k, v, beta, log_decay, write, plain, initial_state
    keep = needs_gradient(*inputs)
    if planner is None:
        long = decay_kind(log_decay) == CHANNEL or (keep and (interpreted() or is_hopper()))
        planner = PLANNER if long else SHORT_CHUNKS
    options = Options(scale, return_final_state, sequence_ends, planner)
    if keep:
        o, final_state = DeltaRule.apply(*inputs, options)
        return o, final_state
    result = forward(*inputs, options, keep=False)
    return result.o, result.final_state
