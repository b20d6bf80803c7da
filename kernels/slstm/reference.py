"""The recurrence of sLSTM as one loop over time; equation and source are in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EMPTY = -1e30
"""Scale of the state before the first step: exp(EMPTY - i) is zero for every gate i."""

State = tuple[Tensor, Tensor, Tensor, Tensor]
"""Output h, cell c, normaliser n and scale m, [batch, heads, K] each."""


def advance(x: Tensor, recurrent: Tensor, state: State) -> State:
    """The state after one step with x [batch, 4, heads, K]; its first part is the output of the step."""
    h, c, n, m = state
    wide = torch.promote_types(h.dtype, recurrent.dtype)
    i, f, z, o = (x + torch.einsum("bhj,ghjk->bghk", h.to(wide), recurrent.to(wide))).unbind(1)
    kept = F.logsigmoid(f) + m
    scale = torch.maximum(kept, i).detach()
    keep, write = torch.exp(kept - scale), torch.exp(i - scale)
    c, n = keep * c + write * torch.tanh(z), keep * n + write
    # one of the two factors is one, so n is at least one from the first step on
    return torch.sigmoid(o) * c / n.clamp(min=1.0), c, n, scale


def empty(batch: int, heads: int, width: int, like: Tensor) -> State:
    """The state before the first step."""
    zero = like.new_zeros(batch, heads, width)
    return zero, zero, zero, torch.full_like(zero, max(EMPTY, torch.finfo(like.dtype).min))


def slstm_reference(
    x: Tensor, recurrent: Tensor, bias: Tensor | None = None, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y [batch, length, heads, K] and the final state [batch, 4, heads, K], computed in the dtypes of the arguments."""
    batch, _, _, heads, width = x.shape
    if bias is not None:
        x = x + bias
    if initial_state is None:
        state = empty(batch, heads, width, x)
    else:
        h, c, n, m = initial_state.unbind(1)
        state = (h, c, n, m.detach())
    outputs = []
    for x_t in x.unbind(1):
        state = advance(x_t, recurrent, state)
        outputs.append(state[0])
    return torch.stack(outputs, 1), torch.stack(state, 1)
