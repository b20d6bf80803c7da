"""The causal convolution as W shifted products over the whole sequence: no transposes, no loop over time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_chunked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the final state [B, D, W - 1], both in the dtype of x. seq_idx: see `causal_conv1d`."""
    length, taps = x.shape[1], weight.shape[1]
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    if initial_state is None:
        padded = F.pad(x, (0, 0, taps - 1, 0))
    else:
        padded = torch.cat([initial_state.to(x.dtype).transpose(1, 2), x], dim=1)
    inputs, filters = padded.to(wide), weight.to(wide).unbind(1)
    y = inputs[:, taps - 1 :] * filters[-1]
    if bias is not None:
        y = y + bias.to(wide)
    for w in range(taps - 1):
        seen = inputs[:, w : w + length]
        if seq_idx is not None:
            # the steps before the first one are zeros, so they may count as any sequence
            earlier = F.pad(seq_idx, (taps - 1, 0))[:, w : w + length]
            seen = seen * torch.eq(earlier, seq_idx).unsqueeze(-1)
        y = torch.addcmul(y, seen, filters[w])
    if activation == "silu":
        y = F.silu(y)
    return y.to(x.dtype), padded[:, length:].transpose(1, 2).contiguous()
