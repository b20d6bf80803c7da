"""The causal convolution as written: one loop over time (see the package docstring for equation and source)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the final state [B, D, W - 1], computed in the dtypes of the arguments."""
    batch, length, width = x.shape
    state = x.new_zeros(batch, width, weight.shape[1] - 1) if initial_state is None else initial_state
    outputs = []
    for t in range(length):
        window = torch.cat([state, x[:, t, :, None]], dim=-1)
        y_t = (window * weight).sum(-1)
        if bias is not None:
            y_t = y_t + bias
        outputs.append(F.silu(y_t) if activation == "silu" else y_t)
        state = window[..., 1:]
    return torch.stack(outputs, dim=1), state
