"""Forward and backward pass."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.gated_linear_attention.triton.grads import gla_grads
from kernels.gated_linear_attention.triton.plan import CHANNEL, Ends, Plan, decay_kind, make_plan, rows
from kernels.gated_linear_attention.triton.read import gla_read
from kernels.gated_linear_attention.triton.scores import gla_scores
from kernels.gated_linear_attention.triton.states import gla_states
from kernels.gated_linear_attention.triton.walk import can_walk, gla_walk


def forward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    on_value: bool,
    ends: Ends,
    dtype: torch.dtype,
    keep: bool,
    outgoing: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """o in `dtype`, and what `backward` needs if it is to be kept: the states and what `gla_scores` gives.

    With decays on values, v and k take the parts of k and v, and do and q those of q and do (module docstring).
    `outgoing`: what the last result starts with, of the same k, g and chunks, if known.
    """
    kind = decay_kind(g)
    if g is not None and on_value and kind == CHANNEL:
        v_out, decay = gla_scores(plan, None, v, g) if outgoing is None else outgoing
        states = gla_states(plan, v_out, k, decay, kind, *_transposed(ends), False)
        dtypes: dict[str, Any] = {"dq_dtype": dtype, "dk_dtype": None, "dg_dtype": None}
        o, _, _ = gla_grads(plan, None, v, k, g, q, states, None, **dtypes)
        return o, states, (v_out, decay)
    made: tuple[Tensor, ...] = ()
    x, y, decay, scores = q, k, None, None
    if g is not None:
        made = gla_scores(plan, q, k, g, outgoing)
        y, decay, x, scores = made
    if not keep and can_walk(plan, q.shape[-1]):
        return gla_walk(plan, x, y, v, decay, scores, kind, *ends, dtype), None, made
    states = gla_states(plan, y, v, decay, kind, *ends, False)
    return gla_read(plan, x, y if scores is None else scores, v, states, kind, dtype, False), states, made


def backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    on_value: bool,
    ends: Ends,
    do: Tensor,
    states: Tensor,
    made: tuple[Tensor, ...],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None],
    more: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, g in `dtypes` (None: not wanted); `ends` are those of the final and the initial state.

    `more`, for decays on values, is added to the gradients of v and g.
    """
    kind = decay_kind(g)
    dq_dtype, dk_dtype, dv_dtype, dg_dtype = dtypes
    if g is None:
        dstates = gla_states(plan, q, do, None, kind, *ends, True)
        dv = gla_read(plan, k, q, do, dstates, kind, dv_dtype, True)
    elif on_value and kind == CHANNEL:
        v_out, decay, do_in, da = gla_scores(plan, do, v, g, (made[0], made[1]))
        dstates = gla_states(plan, do_in, q, decay, kind, *_transposed(ends), True)
        dq = gla_read(plan, do_in, da, k, states, kind, dq_dtype, False)
        dk = gla_read(plan, v_out, da, q, dstates, kind, dk_dtype, True)
        of_values: dict[str, Any] = {"dq_dtype": None, "dk_dtype": dv_dtype, "dg_dtype": dg_dtype}
        _, dv, dg = gla_grads(plan, do, v, k, g, q, states, dstates, **of_values, more=more)
        return dq, dk, dv, dg
    else:
        k_out, decay, q_in, scores = made
        dstates = gla_states(plan, q_in, do, decay, kind, *ends, True)
        dv = gla_read(plan, k_out, scores, do, dstates, kind, dv_dtype, True)
    of_keys: dict[str, Any] = {"dq_dtype": dq_dtype, "dk_dtype": dk_dtype, "dg_dtype": dg_dtype}
    dq, dk, dg = gla_grads(plan, q, k, v, g, do, states, dstates, **of_keys)
    return dq, dk, dv, dg


def _transposed(ends: Ends) -> Ends:
    first, last = (None if end is None else end.transpose(-1, -2) for end in ends)
    return first, last


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    on_value: bool,
    scale: float,
    return_final_state: bool,
    packed: list[int] | None,
    keep: bool,
) -> tuple[Tensor, Tensor | None, tuple[Any, ...]]:
    """o, the final state, and what backward needs if it is to be kept: the plan, the inputs as rows and `forward`'s."""
    q, k, v = rows(q), rows(k), rows(v)
    if g is not None and g.dim() == 4:
        g = rows(g)
    common = make_plan(scale, q, k, v, g, initial_state, ends=packed)
    first, final = None if initial_state is None else initial_state.contiguous(), None
    if return_final_state:
        shape = (common.num_sequences(q), *q.shape[2:], v.shape[3])
        final = q.new_empty(shape, dtype=torch.float32)
    o, states, made = forward(common, q, k, v, g, on_value, (first, final), v.dtype, keep)
    return o, final, (common, q, k, v, g, states, *made)
