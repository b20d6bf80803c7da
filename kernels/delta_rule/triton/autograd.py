"""The operator in Triton with its derivative."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.delta_rule.triton import hopper
from subquad.kernels.delta_rule.triton.back import delta_back
from subquad.kernels.delta_rule.triton.factors import delta_factors
from subquad.kernels.delta_rule.triton.grads import delta_grads
from subquad.kernels.delta_rule.triton.plan import PLANNER, SHORT_CHUNKS, ChunkFactors, Plan, Planner
from subquad.kernels.delta_rule.triton.row_grads import row_grads
from subquad.kernels.delta_rule.triton.segments import cut_time
from subquad.kernels.delta_rule.triton.walk import delta_walk
from subquad.kernels.device import float32_products, interpreted, is_hopper
from subquad.kernels.gated_linear_attention.reference import each_head
from subquad.kernels.gated_linear_attention.triton.plan import CHANNEL, EndStates, decay_kind
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.replay import Replayed


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
    the matrices of segments, which of them vanish, and the chunk factors, of whose chunks `_gradients` tells by their
    length which kernels made them."""


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
    write, plain = dense_channels(write), dense_channels(plain)
    # a plan of packed sequences has tables of its own
    call = _forward if options.sequence_ends is None else _forward.function
    tensors = q, k, v, beta, g, write, plain, dense(initial_state)
    o, final, plan, *kept = call(tensors, options, keep)
    own = None if plain is None else v
    return Result(o, final, plan, (q, k, beta, g, write, plain, own, *kept))


@Replayed
def _forward(tensors: tuple[Any, ...], options: Options, keep: bool) -> tuple[Any, ...]:
    """o, the final state, the plan, and of `Result.saved` what the kernels write."""
    q, k, v, beta, g, write, plain, initial_state = tensors
    plan = options.planner(options.scale, q, k, v, sequence_ends=options.sequence_ends)
    if plan.work == torch.float32:
        # one tf32 product has the accuracy of float16, of which the solutions of the triangular systems lose some
        plan = plan._replace(precision=float32_products(), mild=plan.tuning.mild_float32)
    has_states = initial_state is not None or options.return_final_state
    # another planner's tiles are to be seen
    is_usual = options.planner is (PLANNER if keep else SHORT_CHUNKS)
    by_hopper = is_usual and hopper.takes(plan, q, k, v, beta, g)
    # with a gradient, walks have chunks of half the length
    walks = SHORT_CHUNKS(options.scale, q, k, v) if by_hopper else plan
    segments = cut_time(walks, (*beta.shape, k.shape[-1]), v.shape[-1], decay_kind(g))
    if by_hopper and not has_states and segments.count == 1 and hopper.has_many(v):
        o, *kept, made = hopper.hopper_forward(plan, q=q, k=k, v=v, g=g, beta=beta, keep=keep)
        # neither transposes nor vanished, since there are no segments
        return o, None, plan, *kept, None, None, *(made or ())
    final = None
    if options.return_final_state:
        shape = plan.num_sequences(q.shape[0]), v.shape[2], q.shape[3], v.shape[3]
        final = q.new_empty(shape, dtype=torch.float32)
    pairs = keep and by_hopper
    factors = delta_factors(walks, q, k, beta, g, write, plain, keep=keep and not pairs, bounded=segments.count > 1)
    boundary = EndStates(initial_state, final)
    o, *kept = delta_walk(walks, q=q, k=k, v=v, factors=factors, boundary=boundary, keep=keep, pairs=pairs)
    return o, final, plan, *kept, *factors


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
        tensors = saved(ctx)
        q, k, beta, g, _, _, _, delta, *_ = tensors
        do = torch.zeros_like(delta, dtype=ctx.value_dtype) if do is None else dense_channels(do)
        call = _gradients if ctx.plan.table is None else _gradients.function
        gradients = call((*tensors, do, dense(dfinal)), ctx.plan, ctx.needs_input_grad[4], ctx.initial_dtype)
        dq, dk, dv, dbeta, dg, *others = gradients
        dq, dk = (dx if dx.shape == x.shape else _summed_heads(dx, x) for dx, x in ((dq, q), (dk, k)))
        dbeta, dg = (
            dx if dx is None or dx.dim() == x.dim() else dx.sum(-1).to(x.dtype) for dx, x in ((dbeta, beta), (dg, g))
        )
        return dq, dk, dv.to(ctx.value_dtype), dbeta, dg, *others, None


def _summed_heads(dx: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, whose heads are shared, from those of all heads of values."""
    return dx.unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype)


@Replayed
def _gradients(
    tensors: tuple[Any, ...], plan: Plan, needs_dg: bool, initial_dtype: torch.dtype | None
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, beta, g, write, plain and the initial state; see `row_grads` for sums that are left."""
    q, k, beta, g, write, plain, v, delta, states, transposes, vanished, *kept, do, dfinal = tensors
    factors = ChunkFactors(*kept)
    dinitial = None
    if initial_dtype is not None:
        shape = (plan.num_sequences(q.shape[0]), delta.shape[2], q.shape[3], delta.shape[3])
        dinitial = torch.empty(shape, dtype=initial_dtype, device=q.device)
    pairs = factors.inverse.shape[-1] < plan.chunk
    if pairs and not hopper.is_copied(do):
        do = do.clone(memory_format=torch.contiguous_format)
    walks = SHORT_CHUNKS(plan.scale, q, k, delta) if pairs else plan
    boundary = EndStates(dfinal, dinitial)
    dv, drest, dstates = delta_back(
        walks, q=q, k=k, do=do, factors=factors, transposes=transposes, vanished=vanished, boundary=boundary,
        pairs=pairs,
    )  # fmt: skip
    given = {"q": q, "k": k, "beta": beta, "g": g, "delta": delta, "do": do, "dv": drest}
    given |= {"states": states, "dstates": dstates, "needs_dg": needs_dg}
    dwrite = dplain = None
    if pairs:
        dq, dk, dbeta, dg = hopper.hopper_grads(plan, **given)
    elif factors.steep is None:
        dq, dk, dbeta, dg = row_grads(plan, factors=factors, **given)
    else:
        own = {"write": write, "plain": plain, "v": v, "steep": factors.steep}
        dq, dk, dbeta, dg, dwrite, dplain = delta_grads(plan, **given, **own)
    return dq, dk, dv, dbeta, dg, dwrite, dplain, dinitial


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
    keep = needs_gradient(q, k, v, beta, log_decay, write, plain, initial_state)
    is_cast = plain is not None or (keep and decay_kind(log_decay) == CHANNEL)
    if is_cast and log_decay is not None and log_decay.dtype == torch.bfloat16:
        # ptxas 12.8, which Triton 3.6 brings, made wrong code of gradients for log-decays in bfloat16
        log_decay = log_decay.float()
    inputs = q, k, v, beta, log_decay, write, plain, initial_state
    if planner is None:
        long = decay_kind(log_decay) == CHANNEL or (keep and (interpreted() or is_hopper()))
        planner = PLANNER if long else SHORT_CHUNKS
    options = Options(scale, return_final_state, sequence_ends, planner)
    if keep:
        o, final_state = DeltaRule.apply(*inputs, options)
        return o, final_state
    result = forward(*inputs, options, keep=False)
    return result.o, result.final_state
