"""The forward and the backward pass as sequences of kernels, shared with gated slot attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.gated_linear_attention.triton.grads import gla_grads
from subquad.kernels.gated_linear_attention.triton.group_reads import (
    NO_WEIGHTS,
    Weights,
    gla_group_read,
    gla_group_values,
)
from subquad.kernels.gated_linear_attention.triton.groups import gla_group_grads, gla_group_scores
from subquad.kernels.gated_linear_attention.triton.plan import (
    CHANNEL,
    HEAD,
    EndStates,
    Plan,
    Planner,
    decay_kind,
)
from subquad.kernels.gated_linear_attention.triton.read import gla_read
from subquad.kernels.gated_linear_attention.triton.scores import NO_FACTORS, ChunkFactors, gla_scores
from subquad.kernels.gated_linear_attention.triton.states import gla_states
from subquad.kernels.gated_linear_attention.triton.walk import gla_walk
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.replay import Replayed


class GradDtypes(NamedTuple):
    """The dtypes of gradients; None for that of the log-decays where it is not wanted."""

    q: torch.dtype
    k: torch.dtype
    v: torch.dtype
    g: torch.dtype | None


def forward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    on_value: bool,
    boundary: EndStates,
    dtype: torch.dtype,
    keep: bool,
    known: ChunkFactors = NO_FACTORS,
) -> tuple[Tensor, Tensor | None, ChunkFactors]:
    """o in `dtype`, and what `backward` needs: the states before every chunk and the factors of the chunks.

    q and k may have fewer heads than v where the decay is that of a head. With decays on values, v and k take the
    places of k and v, and do and q those of q and do (see the README).

    boundary: the initial state, and memory for the final state.
    keep:     whether a backward pass follows. Without one the states may stay in registers and are None.
    known:    k_out and decay of the same k, g and chunks, if they were computed before.
    """
    kind = decay_kind(g)
    if g is not None and q.shape[2] != v.shape[2]:
        return group_forward(plan, q, k, v, g, boundary=boundary, dtype=dtype)
    if g is not None and on_value and kind == CHANNEL:
        factors = gla_scores(plan, None, v, g) if known.k_out is None else known
        assert factors.k_out is not None
        states = gla_states(
            plan, kind, x=factors.k_out, y=k, decay=factors.decay, boundary=boundary.transposed(), reverse=False
        )
        o, _, _ = gla_grads(plan, q=None, k=v, v=k, g=g, do=q, states=states, dstates=None, dq_dtype=dtype)
        return o, states, factors
    factors = NO_FACTORS if g is None else gla_scores(plan, q, k, g, known)
    x = q if factors.q_in is None else factors.q_in
    y = k if factors.k_out is None else factors.k_out
    decay, scores = factors.decay, factors.scores
    if not keep and q.shape[-1] <= plan.max_walk:
        o = gla_walk(plan, kind, x=x, y=y, v=v, decay=decay, scores=scores, boundary=boundary, dtype=dtype)
        return o, None, factors
    states = gla_states(plan, kind, x=y, y=v, decay=decay, boundary=boundary, reverse=False)
    y = k if scores is None else scores
    o = gla_read(plan, kind, x=x, y=y, z=v, states=states, dtype=dtype, transposed=False)
    return o, states, factors


def group_states(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, boundary: EndStates, write: Tensor | None = None
) -> tuple[Tensor, ChunkFactors]:
    """The states before every chunk and the factors of the chunks, which `group_backward` reads again."""
    factors = gla_group_scores(plan, q, k, g, write)
    rows, decay = factors.k_out, factors.decay
    return gla_states(plan, HEAD, x=k, y=v, rows=rows, decay=decay, boundary=boundary, reverse=False), factors


def group_forward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    boundary: EndStates,
    dtype: torch.dtype,
    weights: Weights = NO_WEIGHTS,
) -> tuple[Tensor, Tensor, ChunkFactors]:
    """`forward` for q and k [B, T, G, K] with a decay of a head. weights: those of `group_reads`."""
    states, factors = group_states(plan, q, k, v, g, boundary=boundary, write=weights.write)
    o = gla_group_read(plan, q=q, v=v, factors=factors, states=states, dtype=dtype, weights=weights)
    return o, states, factors


def _like_in_one(q: Tensor, k: Tensor, v: Tensor, dtypes: GradDtypes) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of q, k and v, parts of one tensor where these are; see `group_backward`."""
    (batch, length, heads, value_dim), (*_, groups, key_dim) = v.shape, q.shape
    values, keys = heads * value_dim, groups * key_dim
    width, start = values + 2 * keys, int(v.storage_offset())
    places = [(x.untyped_storage().data_ptr(), x.storage_offset(), x.stride()[:3]) for x in (v, k, q)]
    memory, rows = places[0][0], (length * width, width)
    wanted = [
        (memory, start, (*rows, value_dim)),
        (memory, start + values, (*rows, key_dim)),
        (memory, start + values + keys, (*rows, key_dim)),
    ]
    if places != wanted or not dtypes.q == dtypes.k == dtypes.v:
        dq, dk = (q.new_empty(q.shape, dtype=dtype) for dtype in (dtypes.q, dtypes.k))
        return dq, dk, v.new_empty(v.shape, dtype=dtypes.v)
    dv, dk, dq = v.new_empty((batch, length, width), dtype=dtypes.v).split((values, keys, keys), dim=-1)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def group_backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    states: Tensor,
    factors: ChunkFactors,
    boundary: EndStates,
    dtypes: GradDtypes,
    weights: Weights = NO_WEIGHTS,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Weights]:
    """`backward` of `group_forward`, and the gradients of the weights.

    Where v, k and q are all of the rows of one tensor, in this order, so are their gradients.
    """
    dstates = gla_states(plan, HEAD, x=q, y=do, rows=factors.q_in, decay=factors.decay, boundary=boundary, reverse=True)
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "do": do, "states": states, "dstates": dstates}
    tensors |= {"factors": factors, "weights": weights}
    dq, dk, dv = _like_in_one(q, k, v, dtypes)
    of_heads = gla_group_grads(plan, **tensors, dq=dq, dk=dk, of_states=dtypes.g is not None)
    dg, dweights = gla_group_values(plan, **tensors, dv=dv, dg_dtype=dtypes.g, of_heads=of_heads)
    return dq, dk, dv, dg, dweights


def backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    *,
    states: Tensor,
    factors: ChunkFactors,
    on_value: bool,
    boundary: EndStates,
    dtypes: GradDtypes,
    more: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and g.

    boundary: the gradient of the final state, and memory for that of the initial state.
    more:     float32 tensors that are added to the gradients of v and g; only for decays on values.
    """
    if g is not None and q.shape[2] != v.shape[2]:
        dq, dk, dv, dg, _ = group_backward(
            plan, q, k, v, do, states=states, factors=factors, boundary=boundary, dtypes=dtypes
        )
        return dq, dk, dv, dg
    # a plan of packed sequences has tables of its own
    call = _backward if plan.table is None else _backward.function
    dq, dk, dv, dg = call((q, k, v, g, do, states, *factors, *boundary, *more), plan, on_value, dtypes)
    if dg is not None and g is not None and dg.dim() > g.dim():
        dg = dg.sum(-1).to(dtypes.g)
    return dq, dk, dv, dg


@Replayed
def _backward(tensors: tuple[Any, ...], plan: Plan, on_value: bool, dtypes: GradDtypes) -> tuple[Tensor | None, ...]:
    """`backward` without groups; the gradient of a decay of a head is not yet summed (`gla_grads`).

    tensors: q, k, v, g, do, the states, the chunk factors, the states of the boundary and `more`.
    """
    q, k, v, g, do, states, *rest, first, last, v_more, g_more = tensors
    factors, boundary, kind = ChunkFactors(*rest), EndStates(first, last), decay_kind(g)
    if g is not None and on_value and kind == CHANNEL:
        factors = gla_scores(plan, do, v, g, factors)
        do_in, v_out, scores = factors.q_in, factors.k_out, factors.scores
        assert do_in is not None
        assert v_out is not None
        assert scores is not None
        dstates = gla_states(
            plan, kind, x=do_in, y=q, decay=factors.decay, boundary=boundary.transposed(), reverse=True
        )
        dq = gla_read(plan, kind, x=do_in, y=scores, z=k, states=states, dtype=dtypes.q, transposed=False)
        dk = gla_read(plan, kind, x=v_out, y=scores, z=q, states=dstates, dtype=dtypes.k, transposed=True)
        _, dv, dg = gla_grads(
            plan,
            q=do,
            k=v,
            v=k,
            g=g,
            do=q,
            states=states,
            dstates=dstates,
            dk_dtype=dtypes.v,
            dg_dtype=dtypes.g,
            more=(v_more, g_more),
        )
        return dq, dk, dv, dg
    x = q if factors.q_in is None else factors.q_in
    y = k if factors.k_out is None else factors.k_out
    scores = q if factors.scores is None else factors.scores
    dstates = gla_states(plan, kind, x=x, y=do, decay=factors.decay, boundary=boundary, reverse=True)
    dv = gla_read(plan, kind, x=y, y=scores, z=do, states=dstates, dtype=dtypes.v, transposed=True)
    dq, dk, dg = gla_grads(
        plan,
        q=q,
        k=k,
        v=v,
        g=g,
        do=do,
        states=states,
        dstates=dstates,
        dq_dtype=dtypes.q,
        dk_dtype=dtypes.k,
        dg_dtype=dtypes.g,
    )
    return dq, dk, dv, dg


class Options(NamedTuple):
    """Arguments of the operator that are not tensors."""

    on_value: bool
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
    """q, k, v, g, the states before every chunk (None where they were not written) and the chunk factors."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None, options: Options, *, keep: bool
) -> Result:
    """The operator without autograd; `keep` says whether a backward pass follows."""
    q, k, v = dense_channels(q), dense_channels(k), dense_channels(v)
    if g is not None and g.dim() == 4:
        g = dense_channels(g)
    # a plan of packed sequences has tables of its own
    call = _attend if options.sequence_ends is None else _attend.function
    o, final, plan, *kept = call((q, k, v, g, dense(initial_state)), options, keep)
    return Result(o, final, plan, (q, k, v, g, *kept))


@Replayed
def _attend(tensors: tuple[Any, ...], options: Options, keep: bool) -> tuple[Any, ...]:
    """o, the final state, the plan, the states before every chunk and the chunk factors, of which some are None."""
    q, k, v, g, initial_state = tensors
    plan = options.planner(options.scale, q, k, v, sequence_ends=options.sequence_ends)
    final = None
    if options.return_final_state:
        shape = (plan.num_sequences(q.shape[0]), v.shape[2], q.shape[3], v.shape[3])
        final = q.new_empty(shape, dtype=torch.float32)
    boundary = EndStates(initial_state, final)
    o, states, factors = forward(
        plan, q, k, v, g, on_value=options.on_value, boundary=boundary, dtype=v.dtype, keep=keep
    )
    return o, final, plan, states, *factors
