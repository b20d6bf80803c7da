"""One decoding step of everything between the two wide linear maps of a Mamba block.

    u = silu(conv(x))                                               short causal convolution over the window and x
    (r, B, C) = W_x u                                               sizes R, N, N
    dt = softplus(W_dt r + b_dt)
    h = exp(dt A) h + dt B u,   A = -exp(log_A)
    y = (C h + D u) * silu(z)

Source: Mamba (Gu & Dao 2023), section 3.4 and algorithm 2, at one position. It is one operator because the parts are
small: each alone would take longer to start than to run.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.causal_conv1d import causal_conv1d_step
from subquad.kernels.checks import Allowed, check_shapes
from subquad.kernels.operations import counted
from subquad.kernels.selective_scan import selective_scan_step

__all__ = ["mamba_inner_step"]

MAX_STATES = 64
MAX_RANK = 512
"""Maximum N and R of the Triton kernels."""


@counted("mamba_inner_step")
def mamba_inner_step(
    x: Tensor,
    z: Tensor | None,
    window: Tensor,
    state: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    log_A: Tensor,
    D: Tensor,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> Tensor:
    """y [B, width] in the dtype of x; `window` and `state` are updated in place.

    x, z:              [B, width]; without z there is no gate.
    window:            [B, width, W - 1], the inputs before x, oldest first.
    state:             [B, width, N].
    conv_weight:       [width, W] with W in 2..4; conv_bias, dt_bias and D: [width].
    x_proj, dt_proj:   [R + 2 N, width] and [width, R].
    log_A:             [width, N].
    backend:           triton takes x_proj and dt_proj in bfloat16 or float16 on a CUDA device; auto takes it there
                       where no gradient is recorded, else the steps of the operators that this one is made of.

    Under autocast, PyTorch's path multiplies with x_proj and dt_proj in its dtype. Raises ValueError for shapes that do
    not fit.
    """
    _check(x, z, window, state, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, log_A, D)
    tensors = (z, window, state, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, log_A, D)
    obstacle = None
    if needs_gradient(x, *tensors):
        obstacle = NO_GRADIENT
    elif x_proj.dtype not in (torch.bfloat16, torch.float16) or dt_proj.dtype != x_proj.dtype:
        obstacle = f"takes x_proj and dt_proj in bfloat16 or float16, got {x_proj.dtype} and {dt_proj.dtype}"
    elif log_A.shape[1] > MAX_STATES or dt_proj.shape[1] > MAX_RANK:
        obstacle = f"takes N up to {MAX_STATES} and R up to {MAX_RANK}, got {log_A.shape[1]} and {dt_proj.shape[1]}"
    if use_triton("mamba_inner_step", backend, x, *tensors, obstacle=obstacle):
        from subquad.kernels.mamba_inner.triton import mamba_inner_step_triton

        with on_device_of(x):
            return mamba_inner_step_triton(
                x, z, window, state, conv_weight=conv_weight, conv_bias=conv_bias, x_proj=x_proj, dt_proj=dt_proj,
                dt_bias=dt_bias, log_A=log_A, D=D,
            )  # fmt: skip
    u = causal_conv1d_step(x, conv_weight, conv_bias, window, activation="silu", backend=backend)
    r, B, C = F.linear(u.to(x_proj.dtype), x_proj).split([dt_proj.shape[1], log_A.shape[1], log_A.shape[1]], dim=-1)
    A = -torch.exp(log_A.to(torch.promote_types(log_A.dtype, torch.float32)))
    dt = F.linear(r.to(dt_proj.dtype), dt_proj)
    return selective_scan_step(u, dt, A, B, C, state, D=D, z=z, dt_bias=dt_bias, dt_softplus=True, backend=backend)


def _check(
    x: Tensor,
    z: Tensor | None,
    window: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    log_A: Tensor,
    D: Tensor,
) -> None:
    if x.ndim != 2 or log_A.ndim != 2 or dt_proj.ndim != 2 or conv_weight.ndim != 2:
        raise ValueError(
            "mamba_inner_step: x must be [B, width], log_A [width, N], dt_proj [width, R] and conv_weight [width, W], "
            f"got {list(x.shape)}, {list(log_A.shape)}, {list(dt_proj.shape)} and {list(conv_weight.shape)}."
        )
    batch, width = x.shape
    num_states, rank, taps = log_A.shape[1], dt_proj.shape[1], conv_weight.shape[1]
    wanted: dict[str, tuple[Tensor | None, Allowed]] = {
        "z": (z, (batch, width)),
        "window": (window, (batch, width, taps - 1)),
        "state": (state, (batch, width, num_states)),
        "conv_weight": (conv_weight, (width, taps)),
        "conv_bias": (conv_bias, (width,)),
        "x_proj": (x_proj, (rank + 2 * num_states, width)),
        "dt_proj": (dt_proj, (width, rank)),
        "dt_bias": (dt_bias, (width,)),
        "log_A": (log_A, (width, num_states)),
        "D": (D, (width,)),
    }
    check_shapes("mamba_inner_step", wanted)
