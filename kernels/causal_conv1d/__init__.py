"""Causal depthwise convolution with a short filter.

y_t[d] = act(sum_{w=0}^{W-1} weight[d, w] x_{t-(W-1)+w}[d] + bias[d]),   x_s = 0 before the start

The last tap (w = W - 1) meets the current input, the layout of torch.nn.Conv1d. The state holds the last W - 1 inputs,
oldest first. Source: the `Conv` of Mamba (Gu & Dao 2023), figure 3 and section 3.4; Hyena (Poli et al. 2023) takes
W = 3.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.causal_conv1d.chunked import causal_conv1d_chunked

__all__ = ["causal_conv1d", "causal_conv1d_step"]

MAX_WIDTH = 4


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The convolution of this module. x [B, T, D], weight [D, W] with W in 2..4, bias [D], state [B, D, W - 1].

    Returns y [B, T, D] and, on request, the final state, both in the dtype of x; sums are float32 at least.
    """
    _check(x, weight, bias, activation, initial_state)
    if backend == "triton":
        raise ValueError("causal_conv1d: no Triton path yet; use backend='auto' or 'torch'.")
    if backend not in ("auto", "torch"):
        raise ValueError(f"causal_conv1d: backend={backend!r} is not one of 'auto', 'torch', 'triton'.")
    with torch.autocast(x.device.type, enabled=False):
        y, state = causal_conv1d_chunked(x, weight, bias, activation=activation, initial_state=initial_state)
    return (y, state) if return_final_state else y


def causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: Literal["silu"] | None = None,
) -> Tensor:
    """One step: x [B, D] to y [B, D]; `state` [B, D, W - 1] is updated in place."""
    window = torch.cat([state, x.to(state.dtype).unsqueeze(-1)], dim=-1)
    state.copy_(window[..., 1:])
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    y = (window.to(wide) * weight.to(wide)).sum(-1)
    if bias is not None:
        y = y + bias.to(wide)
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, initial_state: Tensor | None
) -> None:
    if x.ndim != 3 or x.shape[1] == 0:
        raise ValueError(f"causal_conv1d: x must be [B, T, D] with T >= 1, got {list(x.shape)}.")
    batch, _, width = x.shape
    if weight.ndim != 2 or weight.shape[0] != width or not 2 <= weight.shape[1] <= MAX_WIDTH:
        raise ValueError(
            f"causal_conv1d: weight must be [D, W] with D={width} and W in 2..{MAX_WIDTH}, got {list(weight.shape)}; "
            "use fft_conv for longer filters."
        )
    if bias is not None and tuple(bias.shape) != (width,):
        raise ValueError(f"causal_conv1d: bias must be [{width}], got {list(bias.shape)}.")
    if activation not in (None, "silu"):
        raise ValueError(f"causal_conv1d: activation={activation!r} is not one of None, 'silu'.")
    shape = (batch, width, weight.shape[1] - 1)
    if initial_state is not None and tuple(initial_state.shape) != shape:
        raise ValueError(f"causal_conv1d: initial_state must be {list(shape)}, got {list(initial_state.shape)}.")
