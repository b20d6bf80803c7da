"""The delta rule: linear attention that replaces what its state holds for a key, with or without decays.

    S_t = S_{t-1} diag(a_t) (I - b_t k_t k_t^T) + b_t v_t k_t^T,     o_t = scale S_t q_t,     a_t = exp(log_decay_t)

What is written may have another key than what is read (`write`), and values may be added under keys that are not read
at all (`plain`), which RWKV-7 needs (`generalised.py`).

Source: DeltaNet (Yang et al. 2024a, arXiv 2406.06484; no decay), Gated DeltaNet (Yang et al. 2024b, arXiv 2412.06464;
one decay a head), Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692; one decay a key channel).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import Allowed, check_heads, check_number, check_shapes
from subquad.kernels.delta_rule.chunked import delta_rule_chunked
from subquad.kernels.delta_rule.reference import delta_rule_reference, step
from subquad.kernels.gated_linear_attention.packed import filled, one_by_one, sequence_ends, states_of_all
from subquad.kernels.operations import counted, with_state

__all__ = ["delta_rule", "delta_rule_reference", "delta_rule_step", "obstacle"]

MAX_KEYS_BFLOAT16, MAX_KEYS = 256, 128
"""Maximum number of key channels of the Triton kernels where q, k and v are bfloat16, and in other dtypes."""


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    write: Tensor | None,
    plain: Tensor | None,
    scale: float | None,
) -> None:
    """Checks what a sequence and a step share, which is everything but the states."""
    check_heads(op, q, v, is_step=op.endswith("_step"), grouped=True)
    check_number(op, "scale", scale)
    leading = tuple(v.shape[:-1])
    shape = (*leading, q.shape[-1])
    wanted: dict[str, tuple[Tensor | None, Allowed]] = {
        "k": (k, tuple(q.shape)),
        "write": (write, shape),
        "plain": (plain, shape),
    }
    wanted |= {"beta": (beta, leading), "log_decay": (log_decay, [shape, leading])}
    check_shapes(op, wanted, to_go_with="q and v")


def obstacle(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, write: Tensor | None, plain: Tensor | None = None
) -> str | None:
    """Why the kernels cannot take the inputs. A program keeps the state of all keys in registers."""
    for name, x in (("write", write), ("plain", plain)):
        if x is not None and (log_decay is None or log_decay.dim() == 3):
            return f"takes `{name}` only with a decay of key channels"
    products = [x for x in (q, k, v, write, plain) if x is not None]
    half = all(x.dtype == torch.bfloat16 for x in products)
    most = MAX_KEYS_BFLOAT16 if half else MAX_KEYS
    if products[0].shape[-1] <= most:
        return None
    return f"takes at most K={most} {'in bfloat16' if half else 'unless q, k and v are bfloat16'}"


def _empty_results(inputs: Mapping[str, Any]) -> Any:
    """Results of `delta_rule` without values."""
    v = inputs["v"]
    return with_state(torch.empty_like(v), inputs, v.shape[0], v.shape[2], inputs["q"].shape[-1], v.shape[-1])


@counted("delta_rule", results=_empty_results)
def delta_rule(
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
    cu_seqlens: Tensor | None = None,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns o [B, T, H, V] in the dtype of v, or (o, final state [B, H, K, V]) with `return_final_state`.

    q, k:          [B, T, G, K]; v: [B, T, H, V]. T is at least 1; K and V may differ. G divides H: with r = H / G, the
                   heads h r to h r + r - 1 of v share head h of q and k, as if that head had been repeated r times.
                   With b_t |k_t|^2 between 0 and 2 the state cannot grow by itself. The operator does not normalise
                   keys.
    beta:          [B, T, H], the b_t: 0 writes nothing, 1 with a unit key replaces all that is held for the key.
    log_decay:     at most 0; [B, T, H, K], [B, T, H], or None for no decay. The state decays before it is read and
                   written.
    write:         [B, T, H, K], the keys w_t under which is written what the k_t read, or None for k itself:
                   S_t = S_{t-1} diag(a_t) (I - b_t k_t w_t^T) + b_t v_t w_t^T.
    plain:         [B, T, H, K], keys e_t under which v_t is added whatever the state holds, or None. Then the value
                   that is written under w_t is zero: S_t = S_{t-1} diag(a_t) (I - b_t k_t w_t^T) + v_t e_t^T.
                   Log-decays below -50 count as -50 then, so that keys k_t may be divided by a_t.
    scale:         factor of the output; None stands for K^-0.5.
    initial_state: [B, H, K, V], the transpose of S; None stands for zeros. States are float32 (float64 for float64
                   inputs).
    cu_seqlens:    [N + 1] integers, 0 and where each of N sequences ends, for sequences packed along time with B = 1.
                   States are then [N, H, K, V]. Sequences may be empty: their final state is their initial state.
                   The values are read on the host.
    backend:       "auto" uses the Triton kernels on a GPU (K up to 256 in bfloat16, up to 128 in float32 and float16;
                   `write` and `plain` with a decay of key channels only) and plain PyTorch elsewhere.

    Raises ValueError for shapes or options that do not fit.
    """
    _check("delta_rule", q, k, v, beta, log_decay, write, plain, scale)
    ends = sequence_ends("delta_rule", cu_seqlens, q.shape[0], q.shape[1])
    state_shape = (q.shape[0] if ends is None else len(ends) - 1, v.shape[2], q.shape[3], v.shape[3])
    check_shapes("delta_rule", {"initial_state": (initial_state, state_shape)}, to_go_with="q and v")
    inputs: dict[str, Any] = {
        "q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "write": write, "plain": plain,
    }  # fmt: skip
    filled_ends, start = filled(ends, initial_state)
    reason = obstacle(q, k, v, log_decay, write, plain)
    if use_triton("delta_rule", backend, *inputs.values(), initial_state, obstacle=reason):
        from subquad.kernels.delta_rule.triton import delta_rule_triton

        states: dict[str, Any] = {"initial_state": start, "return_final_state": return_final_state}
        with on_device_of(q):
            o, final = delta_rule_triton(**inputs, **states, scale=scale, sequence_ends=filled_ends)
    else:
        run = partial(delta_rule_chunked, scale=scale, return_final_state=True)
        o, final = one_by_one(run, inputs, {"initial_state": start}, filled_ends)
    return (o, states_of_all(final, initial_state, ends)) if return_final_state else o


@counted("delta_rule_step")
def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    write: Tensor | None = None,
    scale: float | None = None,
    in_place: bool = False,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> tuple[Tensor, Tensor]:
    """One position, for decoding: returns o [B, H, V] in the dtype of v and the next state in the dtype of `state`.

    q, k: [B, G, K], G a divisor of H; v: [B, H, V]; beta: [B, H]; log_decay: [B, H, K], [B, H] or None; state:
    [B, H, K, V]; write: [B, H, K] or None, as in `delta_rule`.
    in_place: the Triton kernel may overwrite the state. It has no gradient: "auto" uses PyTorch where a gradient is
    recorded, and "triton" raises ValueError. So do shapes that do not fit.
    """
    _check("delta_rule_step", q, k, v, beta, log_decay, write, None, scale)
    check_shapes("delta_rule_step", {"state": (state, (*v.shape[:2], q.shape[2], v.shape[2]))}, to_go_with="q and v")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = (q, k, v, beta, log_decay, write, state)
    reason = NO_GRADIENT if needs_gradient(*tensors) else None
    if use_triton("delta_rule_step", backend, *tensors, obstacle=reason):
        from subquad.kernels.delta_rule.triton import delta_rule_step_triton

        with on_device_of(q):
            return delta_rule_step_triton(q, k, v, beta, log_decay, state, scale=scale, write=write, in_place=in_place)
    dtype = state.dtype
    decay, write = (None if x is None else x.to(dtype) for x in (log_decay, write))
    with torch.autocast(q.device.type, enabled=False):
        q, k, beta = q.to(dtype), k.to(dtype), beta.to(dtype)
        o, state = step(q, k, v.to(dtype), beta, decay, state, scale=scale, write=write)
    return o.to(v.dtype), state
