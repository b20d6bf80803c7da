"""State space duality: linear attention with a decay, a weight of what it writes and a weight of what it reads at once.

    S_t = exp(log_decay_t) S_{t-1} + w_t k_t^T v_t
    y_t = q_t (exp(log_decay_t) S_{t-1} + n_t k_t^T v_t) + d v_t                    for each head

Mamba-2 has w = n, the step sizes (Dao & Gu 2024, arXiv 2405.21060, section 7). Mamba-3 has a trapezoidal rule: position
t writes k_t^T v_t with n_t at once and with another weight when t + 1 is read, so w_t is the sum of both (Lahoti et al.
2026, arXiv 2603.15569; models/mamba3.py). Several heads of v may share a head of q and k, and d is one number a head.

It is `gated_linear_attention` on values w v, with a term for each position. As one operator it keeps neither values
times weights nor outputs without d v, and its kernels apply w, n and d where they read v.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import Allowed, check_heads, check_shapes
from subquad.kernels.gated_linear_attention import gated_linear_attention
from subquad.kernels.gated_linear_attention.reference import each_head
from subquad.kernels.operations import counted
from subquad.kernels.positions import at_least_float32
from subquad.kernels.ssd.steps import ssd_steps as ssd_steps

__all__ = ["ssd", "ssd_steps"]


@counted("ssd")
def ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor,
    own: Tensor | None = None,
    skip: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    recompute: bool = False,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns y [B, T, H, V] in the dtype of v, or (y, S_T [B, H, K, V]) with `return_final_state`, S in float32.

    q, k:      [B, T, G, K], T at least 1, G a divisor of H: with r = H / G, heads h r to h r + r - 1 of v share head
               h of q and k.
    v:         [B, T, H, V].
    log_decay: [B, T, H], at most 0.
    write:     w [B, T, H].
    own:       n [B, T, H]; None stands for w.
    skip:      d [H]; None stands for zeros.
    initial_state: S_0 [B, H, K, V]; None stands for zeros.
    recompute: whether the backward pass of the Triton kernels computes states and scores again. They take K V / 64
               elements a position and head, and 64 a position and head of q.
    backend:   "auto" uses the Triton kernels on a GPU and plain PyTorch elsewhere. Triton takes float32, bfloat16 and
               float16; sums, weights and exponentials are float32 there, and results are deterministic.

    Raises ValueError for shapes that do not fit.
    """
    check_heads("ssd", q, v, is_step=False, grouped=True)
    of_heads = tuple(v.shape[:-1])
    wanted: dict[str, tuple[Tensor | None, Allowed]] = {
        "k": (k, tuple(q.shape)), "log_decay": (log_decay, of_heads), "write": (write, of_heads),
        "own": (own, of_heads), "skip": (skip, of_heads[-1:]),
        "initial_state": (initial_state, (v.shape[0], v.shape[2], q.shape[3], v.shape[3])),
    }  # fmt: skip
    check_shapes("ssd", wanted, to_go_with="q and v")
    if use_triton("ssd", backend, q, k, v, log_decay, write, own, skip, initial_state):
        from subquad.kernels.ssd.triton import ssd_triton

        with on_device_of(q):
            states = initial_state, return_final_state, recompute
            y, state = ssd_triton(q, k, v, log_decay, write, own, skip, *states)
        return y if state is None else (y, state)
    y, state = _ssd_torch(q, k, v, log_decay, write, own, skip, initial_state)
    return (y, state) if return_final_state else y


def _ssd_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor,
    own: Tensor | None,
    skip: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    states: dict[str, Any] = {"initial_state": initial_state, "return_final_state": True}
    if own is None:
        written = (write.unsqueeze(-1) * v).to(v.dtype)
        y, state = gated_linear_attention(q, k, written, log_decay, scale=1.0, **states, backend="torch")
        return (y if skip is None else (y + skip.unsqueeze(-1) * v).to(v.dtype)), state
    q, k = each_head(q, v.shape[2]), each_head(k, v.shape[2])
    keys = (k * write.unsqueeze(-1)).to(k.dtype)
    queries = (q * log_decay.exp().unsqueeze(-1)).to(q.dtype)
    first = torch.zeros_like(v[:, :1])
    if initial_state is not None:
        # a product of matrices would be rounded under autocast
        first = (queries[:, :1].unsqueeze(-1) * initial_state.unsqueeze(1)).sum(-2)
    # a query that stands one position early reads the state before its position is written
    early = F.pad(queries[:, 1:], (0, 0, 0, 0, 0, 1))
    before, state = gated_linear_attention(early, keys, v, log_decay, scale=1.0, **states, backend="torch")
    met = own * (at_least_float32(q) * at_least_float32(k)).sum(-1)
    met = met if skip is None else met + skip
    y = torch.cat([first, before[:, :-1]], dim=1) + met.unsqueeze(-1) * v
    return y.to(v.dtype), state
