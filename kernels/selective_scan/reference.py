"""The recurrence of the selective scan as one loop over time; equation and source are in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def selective_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    negative_eigenvalues: bool = False,
) -> tuple[Tensor, Tensor]:
    """y [batch, length, width] and the final state [batch, width, N], computed in the dtypes of the arguments.

    Shapes are those of `selective_scan`.
    """
    batch, length, width = x.shape
    step = dt if dt_bias is None else dt + dt_bias
    if dt_softplus:
        step = F.softplus(step)
    # maps that depend on the input become [batch, length, 1, N], the others [1, length, width, N]
    b, c = (m.unsqueeze(2) if m.ndim == 3 else m[None, None] for m in (B, C))
    b, c = (m.expand(-1, length, -1, -1) for m in (b, c))
    state = A.new_zeros(batch, width, A.shape[1]) if initial_state is None else initial_state
    outputs = []
    for t in range(length):
        decay = torch.exp(step[:, t, :, None] * A)
        if negative_eigenvalues:
            decay = 2 * decay - 1
        state = decay * state + (step[:, t] * x[:, t])[:, :, None] * b[:, t]
        y_t = (c[:, t] * state).sum(-1)
        outputs.append(y_t.real if y_t.is_complex() else y_t)
    y = torch.stack(outputs, dim=1)
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * F.silu(z)
    return y, state
