"""The generalised delta rule of RWKV-7, as one or two steps of the delta rule a position.

    S_t = S_{t-1} diag(a_t) + (S_{t-1} remove_t) add_t^T + v_t k_t^T,     o_t = S_t q_t,     a_t = exp(log_decay_t)

with S [V, K]. What is removed lies in another direction than what is added, and v_t is written under a third key. The
first step of a position decays the state, reads it for -remove_t / a_t, which finds -S_{t-1} remove_t in the decayed
state, and writes the difference to a value of zero under add_t. The second has no decay, reads nothing and writes v_t
under k_t. q_t reads the state behind it.

The chunked forms can also do both in one step, because v_t k_t^T is added as in linear attention (`plain` of
`delta_rule`), whatever the state holds. Then there are half as many positions and triangular systems. Plain PyTorch
takes one step. The kernels take two until a GPU has run them with `plain`.

Source: Peng et al. 2025 (arXiv 2503.14456), section 4, there with S as here and z = remove, b = add.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kernels.backend import use_triton
from kernels.delta_rule import delta_rule, obstacle


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


def one_step(
    q: Tensor, k: Tensor, v: Tensor, remove: Tensor, add: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, log_decay, write and plain of `delta_rule` [B, T, H, K or V], of the arguments of the operator below.

    All are in the dtype of v but log_decay, which keeps its own.
    """
    reading = -remove.to(log_decay.dtype) * torch.exp(-log_decay)
    q, reading, add, k = (x.to(v.dtype) for x in (q, reading, add, k))
    return q, reading, v, log_decay, add, k


def two_steps(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, write: Tensor, plain: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, log_decay and write of `delta_rule` [B, 2 T, H, K or V], of the results of `one_step`."""

    def two(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack((first, second), 2).flatten(1, 2)

    nothing, no_value, no_decay = torch.zeros_like(q), torch.zeros_like(v), torch.zeros_like(log_decay)
    return two(nothing, q), two(k, nothing), two(no_value, v), two(log_decay, no_decay), two(write, plain)


def delta_rule_of_two_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor,
    *,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> tuple[Tensor, Tensor]:
    """Runs `delta_rule` on inputs as those of `two_steps`, and returns what `generalised_delta_rule` does."""
    beta = v.new_ones(v.shape[:-1])
    o, state = delta_rule(
        q, k, v, beta, log_decay, write=write, scale=1.0, return_final_state=True, backend=backend
    )  # fmt: skip
    return o[:, 1::2], state


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

    q, k, remove, add: [B, T, H, K], in the dtype of v on their way through the operator; v: [B, T, H, V].
    log_decay:         [B, T, H, K], float32. exp of single ones divides, so they must not be far below zero; those of
                       RWKV-7 are at least -0.61.
    backend:           as in `delta_rule`, whose limits and precision are those of this operator.

    Raises ValueError for shapes that do not fit.
    """
    step = one_step(q, k, v, remove, add, log_decay)
    *inputs, plain = step
    if use_triton("generalised_delta_rule", backend, *step, obstacle=obstacle(*inputs)):
        return delta_rule_of_two_steps(*two_steps(*step), backend="triton")
    q, reading, v, log_decay, write = inputs
    beta = v.new_ones(v.shape[:-1])
    o, state = delta_rule(
        q, reading, v, beta, log_decay,
        write=write, plain=plain, scale=1.0, return_final_state=True, backend="torch",
    )  # fmt: skip
    return o, state
