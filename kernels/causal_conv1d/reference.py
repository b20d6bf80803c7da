"""The causal convolution as written: one loop over time (see the package docstring for equation and source)."""

from __future__ import annotations

from collections.abc import Sequence

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
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the final state [B, D, S], computed in the dtypes of the arguments."""
    batch, length, width = x.shape
    taps = weight.shape[1]
    state = x.new_zeros(batch, width, taps - 1) if initial_state is None else initial_state
    outputs = []
    for t in range(length):
        window = torch.cat([state, x[:, t, :, None]], dim=-1)
        seen = window[..., -taps:]
        if seq_idx is not None:
            before = [seq_idx[:, max(s, 0)] == seq_idx[:, t] for s in range(t - taps + 1, t + 1)]
            seen = torch.where(torch.stack(before, -1).unsqueeze(1), seen, torch.zeros_like(seen))
        y_t = (seen * weight).sum(-1)
        if bias is not None:
            y_t = y_t + bias
        outputs.append(F.silu(y_t) if activation == "silu" else y_t)
        state = window[..., 1:]
    return torch.stack(outputs, dim=1), state


def causal_conv1d_heads_reference(
    x: Tensor,
    weight: Tensor,
    heads: Sequence[tuple[int, int]],
    *,
    num_unit: int = 0,
    eps: float = 1e-6,
    activation: str | None = None,
) -> tuple[Tensor, ...]:
    """The results [B, T, H, K] for (H, K) in heads; each head of the first `num_unit` is divided by its length."""
    y, _ = causal_conv1d_reference(x, weight, activation=activation)
    results, first = [], 0
    for i, (number, size) in enumerate(heads):
        part = y[..., first : first + number * size].unflatten(-1, (number, size))
        first += number * size
        results.append(part / torch.sqrt(part.square().sum(-1, keepdim=True) + eps) if i < num_unit else part)
    return tuple(results)
