"""Causal depthwise convolution with a short filter.

y_t[d] = act(sum_{w=0}^{W-1} weight[d, w] x_{t-(W-1)+w}[d] + bias[d]),   x_s = 0 before the start

The last tap (w = W - 1) meets the current input, as in torch.nn.Conv1d. The state holds the last W - 1 inputs,
oldest first. Source: the `Conv` of Mamba (Gu & Dao 2023), figure 3 and section 3.4; Hyena (Poli et al. 2023) takes
W = 3.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.autograd import needs_gradient
from kernels.backend import NO_GRADIENT, on_device_of, use_triton
from kernels.causal_conv1d.chunked import causal_conv1d_chunked

__all__ = ["causal_conv1d", "causal_conv1d_step"]

MAX_WIDTH = 4
"""Maximum number of taps of a filter."""


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
    x may have any strides. The Triton path is fast where D or T is contiguous (channel-last or channel-first), and
    gives y and the gradient of x the same layout. Raises ValueError for shapes or options that do not fit.
    """
    _check(x, weight, bias, activation, initial_state)
    if use_triton("causal_conv1d", backend, x, weight, bias, initial_state):
        from kernels.causal_conv1d.triton import causal_conv1d_triton

        with on_device_of(x):
            return causal_conv1d_triton(x, weight, bias, activation, initial_state, return_final_state)
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
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """One step: x [B, D] to y [B, D]; `state` [B, D, W - 1] is updated in place. The Triton path has no gradient."""
    _check_step(x, weight, bias, activation, state)
    tensors = (x, weight, bias, state)
    obstacle = NO_GRADIENT if needs_gradient(*tensors) else None
    if use_triton("causal_conv1d_step", backend, *tensors, obstacle=obstacle):
        from kernels.causal_conv1d.triton import causal_conv1d_step_triton

        with on_device_of(x):
            return causal_conv1d_step_triton(x, weight, bias, state, activation)
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
    _check_filter("causal_conv1d", x.shape[2], weight, bias, activation)
    shape = (x.shape[0], x.shape[2], weight.shape[1] - 1)
    if initial_state is not None and initial_state.shape != shape:
        raise ValueError(f"causal_conv1d: initial_state must be {list(shape)}, got {list(initial_state.shape)}.")


def _check_step(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor) -> None:
    if x.ndim != 2:
        raise ValueError(f"causal_conv1d_step: x must be [B, D], got {list(x.shape)}.")
    _check_filter("causal_conv1d_step", x.shape[1], weight, bias, activation)
    shape = (*x.shape, weight.shape[1] - 1)
    if state.shape != shape:
        raise ValueError(f"causal_conv1d_step: state must be {list(shape)}, got {list(state.shape)}.")


def _check_filter(op: str, width: int, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    if weight.ndim != 2 or weight.shape[0] != width or not 2 <= weight.shape[1] <= MAX_WIDTH:
        raise ValueError(
            f"{op}: weight must be [D, W] with D={width} and W in 2..{MAX_WIDTH}, got {list(weight.shape)}; "
            "use fft_conv for longer filters."
        )
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"{op}: bias must be [{width}], got {list(bias.shape)}.")
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: activation={activation!r} is not one of None, 'silu'.")
