"""Gated linear attention: linear attention whose state decays, by channel or by head.

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t,     o_t = scale q_t S_t

Source: GSA paper (Zhang et al. 2024), section 2.3; Yang et al. 2023. Linear attention (no decay), RetNet (one decay for
each head), GLA and HGRN2 (one for each key channel) are this operator; gated slot attention is two passes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import Allowed, check_choice, check_heads, check_number, check_shapes
from subquad.kernels.gated_linear_attention.chunked import gated_linear_attention_chunked
from subquad.kernels.gated_linear_attention.packed import filled, one_by_one, sequence_ends, states_of_all
from subquad.kernels.gated_linear_attention.reference import gated_linear_attention_reference, step
from subquad.kernels.operations import counted, with_state

__all__ = ["gated_linear_attention", "gated_linear_attention_reference", "gated_linear_attention_step"]


def _check(
    op: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, decay_on: str, scale: float | None
) -> None:
    """Checks what a sequence and a step share, which is everything but the states."""
    check_choice(op, "decay_on", decay_on, ("key", "value"))
    check_heads(op, q, v, is_step=op.endswith("_step"), grouped=True)
    check_number(op, "scale", scale)
    leading = tuple(v.shape[:-1])
    channels = q.shape[-1] if decay_on == "key" else v.shape[-1]
    wanted: dict[str, tuple[Tensor | None, Allowed]] = {"k": (k, tuple(q.shape))}
    wanted["log_decay"] = log_decay, [(*leading, channels), leading, leading[-1:]]
    check_shapes(op, wanted, to_go_with=f"q and v, with decay_on={decay_on!r}")


def _empty_results(inputs: Mapping[str, Any]) -> Any:
    """Results of `gated_linear_attention` without values."""
    v = inputs["v"]
    return with_state(torch.empty_like(v), inputs, v.shape[0], v.shape[2], inputs["q"].shape[-1], v.shape[-1])


@counted("gated_linear_attention", results=_empty_results)
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    decay_on: Literal["key", "value"] = "key",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns o [B, T, H, V] in the dtype of v, or (o, final state [B, H, K, V]) with `return_final_state`.

    q, k:          [B, T, G, K]; v: [B, T, H, V]. T is at least 1; K and V may differ. G divides H: with r = H / G, the
                   heads h r to h r + r - 1 of v share head h of q and k, as if that head had been repeated r times.
    log_decay:     at most 0; [B, T, H, K] (with decay_on="value" [B, T, H, V]), [B, T, H], [H], or None for no decay.
    scale:         factor of the output; None stands for K^-0.5.
    initial_state: [B, H, K, V]; None stands for zeros. States are float32 (float64 for float64 inputs).
    cu_seqlens:    [N + 1] integers, 0 and where each of N sequences ends, for sequences packed along time with B = 1.
                   States are then [N, H, K, V]. Sequences may be empty: their final state is their initial state.
                   The values are read on the host.
    backend:       "auto" uses the Triton kernels on a GPU and plain PyTorch elsewhere.

    Raises ValueError for shapes or options that do not fit.
    """
    _check("gated_linear_attention", q, k, v, log_decay, decay_on, scale)
    ends = sequence_ends("gated_linear_attention", cu_seqlens, q.shape[0], q.shape[1])
    state_shape = (q.shape[0] if ends is None else len(ends) - 1, v.shape[2], q.shape[3], v.shape[3])
    check_shapes("gated_linear_attention", {"initial_state": (initial_state, state_shape)}, to_go_with="q and v")
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    options: dict[str, Any] = {"decay_on": decay_on, "scale": scale}
    filled_ends, start = filled(ends, initial_state)
    if use_triton("gated_linear_attention", backend, q, k, v, log_decay, initial_state):
        from subquad.kernels.gated_linear_attention.triton import gated_linear_attention_triton

        options |= {"initial_state": start, "return_final_state": return_final_state, "sequence_ends": filled_ends}
        with on_device_of(q):
            o, final = gated_linear_attention_triton(**inputs, **options)
    else:
        run = partial(gated_linear_attention_chunked, **options, return_final_state=True)
        o, final = one_by_one(run, inputs, {"initial_state": start}, filled_ends)
    return (o, states_of_all(final, initial_state, ends)) if return_final_state else o


@counted("gated_linear_attention_step")
def gated_linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    decay_on: Literal["key", "value"] = "key",
    scale: float | None = None,
    in_place: bool = False,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> tuple[Tensor, Tensor]:
    """One position, for decoding: returns o [B, H, V] in the dtype of v and the next state in the dtype of `state`.

    q, k: [B, G, K], G a divisor of H; v: [B, H, V]; log_decay: [B, H, K] (with decay_on="value" [B, H, V]), [B, H],
    [H] or None; state: [B, H, K, V]. in_place: the Triton kernel may overwrite the state. It has no gradient: "auto"
    uses PyTorch where a gradient is recorded, and "triton" raises ValueError. So do shapes and options that do not fit.
    """
    _check("gated_linear_attention_step", q, k, v, log_decay, decay_on, scale)
    check_shapes(
        "gated_linear_attention_step", {"state": (state, (*v.shape[:2], q.shape[2], v.shape[2]))}, to_go_with="q and v"
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = (q, k, v, log_decay, state)
    obstacle = NO_GRADIENT if needs_gradient(*tensors) else None
    if use_triton("gated_linear_attention_step", backend, *tensors, obstacle=obstacle):
        from subquad.kernels.gated_linear_attention.triton import gated_linear_attention_step_triton

        with on_device_of(q):
            return gated_linear_attention_step_triton(
                q, k, v, log_decay, state, decay_on=decay_on, scale=scale, in_place=in_place
            )
    dtype = state.dtype
    decay = None if log_decay is None else log_decay.to(dtype)
    o, state = step(q.to(dtype), k.to(dtype), v.to(dtype), decay, state, decay_on=decay_on, scale=scale)
    return o.to(v.dtype), state
