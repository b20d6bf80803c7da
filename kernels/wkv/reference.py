"""The recurrence of WKV as one loop over time; equation and source are in the package docstring."""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY = -1e38
"""Scale of the state before the first step: exp(EMPTY - k) is zero for every key k."""

State = tuple[Tensor, ...]
"""Numerator, denominator and scale, [batch, width] each."""


def read(k: Tensor, v: Tensor, bonus: Tensor, state: State) -> Tensor:
    """y of one step, from the state before it."""
    a, b, p = state
    scale = torch.maximum(p, bonus + k).detach()
    past, present = torch.exp(p - scale), torch.exp(bonus + k - scale)
    return (past * a + present * v) / (past * b + present)


def advance(k: Tensor, v: Tensor, log_decay: Tensor, state: State) -> State:
    """The state after one step."""
    a, b, p = state
    scale = torch.maximum(p + log_decay, k).detach()
    past, present = torch.exp(p + log_decay - scale), torch.exp(k - scale)
    return past * a + present * v, past * b + present, scale


def wkv_reference(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y [batch, length, width] and the final state [batch, 3, width], computed in the dtypes of the arguments."""
    if initial_state is None:
        zero = torch.zeros_like(k[:, 0])
        state: State = (zero, zero, torch.full_like(zero, EMPTY))
    else:
        state = (initial_state[:, 0], initial_state[:, 1], initial_state[:, 2].detach())
    outputs = []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        outputs.append(read(k_t, v_t, bonus, state))
        state = advance(k_t, v_t, log_decay, state)
    return torch.stack(outputs, 1), torch.stack(state, 1)
