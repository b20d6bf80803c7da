"""The generalised delta rule of RWKV-7, as one step of the delta rule a position.

    S_t = S_{t-1} diag(a_t) + (S_{t-1} remove_t) add_t^T + v_t k_t^T,     o_t = S_t q_t,     a_t = exp(log_decay_t)

with S [V, K]. What is removed lies in another direction than what is added, and v_t is written under a third key. The
delta rule decays the state, reads it for -remove_t / a_t, which finds -S_{t-1} remove_t in the decayed state, and
writes the difference to a value of zero under add_t (`write`). It adds v_t k_t^T as in linear attention, whatever the
state holds (`plain`). q_t reads the state behind all that.

Source: Peng et al. 2025 (arXiv 2503.14456), section 4, there with S as here and z = remove, b = add.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import check_heads, check_shapes, check_tensors
from subquad.kernels.delta_rule import delta_rule, obstacle
from subquad.kernels.delta_rule.chunked import LOWEST_PLAIN


def generalised_delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, remove: Tensor, add: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence, one loop over time in the dtype it is given; arguments and results as below."""
    state = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1])
    outputs = []
    for q_t, k_t, v_t, remove_t, add_t, decay in zip(
        *(x.unbind(1) for x in (q, k, v, remove, add, log_decay.exp())), strict=True
    ):
        held = (remove_t.unsqueeze(-1) * state).sum(-2, keepdim=True)
        state = decay.unsqueeze(-1) * state + add_t.unsqueeze(-1) * held + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, 1).to(v.dtype), state


def generalised_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    remove: Tensor,
    add: Tensor,
    log_decay: Tensor,
    *,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, V] in the dtype of v, S_T transposed [B, H, K, V]) from a state of zeros.

    q, k, add:         [B, T, H, K], in the dtype of v on their way through the operator; v: [B, T, H, V].
    remove:            [B, T, H, K], read in its own dtype; the keys that are made of it are in the dtype of v,
                       or float32 where that is float16.
    log_decay:         [B, T, H, K], at most 0, float32. Those below -50 count as -50, since `remove` is divided by the
                       decay: they keep 2e-22 of the state, and have no gradient.
    backend:           as in `delta_rule`, whose limits and precision are those of this operator.

    Raises ValueError for shapes that do not fit.
    """
    check_tensors("generalised_delta_rule", q, k, v, remove, add, log_decay)
    check_heads("generalised_delta_rule", q, v, is_step=False)
    others = {"k": k, "remove": remove, "add": add, "log_decay": log_decay}
    check_shapes("generalised_delta_rule", {name: (x, tuple(q.shape)) for name, x in others.items()}, to_go_with="q")
    dtype = v.dtype
    q, write, plain, beta = q.to(dtype), add.to(dtype), k.to(dtype), v.new_ones(v.shape[:-1])
    # the kernels read it in its own dtype unless that is one that they do not take
    remove = remove.to(log_decay.dtype) if remove.dtype == torch.float64 else remove
    # float16 ends at exp(11)
    read_in = torch.promote_types(dtype, torch.bfloat16)
    reason = obstacle(q, write, v, log_decay, write, plain)
    in_triton = use_triton("generalised_delta_rule", backend, q, remove, v, log_decay, write, plain, obstacle=reason)
    if in_triton:
        from subquad.kernels.delta_rule.triton.reading import reading_keys

        with on_device_of(q):
            reading, log_decay = reading_keys(remove, log_decay, read_in)
    else:
        growth = torch.exp(-log_decay.clamp(min=LOWEST_PLAIN))
        reading = (-remove.to(log_decay.dtype) * growth).to(read_in)
    o, state = delta_rule(
        q, reading, v, beta, log_decay,
        write=write, plain=plain, scale=1.0, return_final_state=True, backend="triton" if in_triton else "torch",
    )  # fmt: skip
    return o, state
