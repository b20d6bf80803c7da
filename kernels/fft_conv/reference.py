"""The long convolution as written: one loop over the lags (see the package docstring for equation and source)."""

from __future__ import annotations

import torch
from torch import Tensor


def fft_conv_reference(
    u: Tensor,
    filter: Tensor,
    *,
    D: Tensor | None = None,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
) -> Tensor:
    """y [B, T, D], computed in the dtypes of the arguments."""
    v = u if gate_in is None else gate_in * u
    y = torch.zeros_like(v)
    for lag in range(min(u.shape[1], filter.shape[1])):
        y = y + torch.cat([torch.zeros_like(v[:, :lag]), filter[:, lag] * v[:, : v.shape[1] - lag]], dim=1)
    if D is not None:
        y = y + D * v
    return y if gate_out is None else gate_out * y


def fft_conv_at_reference(u: Tensor, filter: Tensor, positions: Tensor, *, D: Tensor | None = None) -> Tensor:
    """y [B, P, D], the convolution at positions [B, P]."""
    y = fft_conv_reference(u, filter, D=D)
    return y[torch.arange(len(u), device=u.device)[:, None], positions.long()]
