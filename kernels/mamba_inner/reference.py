"""The step as written, from the references of its parts (equation: the package docstring)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.causal_conv1d.reference import causal_conv1d_reference
from subquad.kernels.selective_scan.reference import selective_scan_reference


def mamba_inner_step_reference(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the next window and state, computed in the dtypes of the arguments."""
    u, window = causal_conv1d_reference(x.unsqueeze(1), conv_weight, conv_bias, activation="silu", initial_state=window)
    # the convolution and the maps of a model give the dtype of x, whatever that of the filter is
    u = u.to(x.dtype)
    r, B, C = F.linear(u, x_proj).split([dt_proj.shape[1], log_A.shape[1], log_A.shape[1]], dim=-1)
    y, state = selective_scan_reference(
        u,
        F.linear(r, dt_proj),
        -torch.exp(log_A),
        B,
        C,
        D=D,
        z=None if z is None else z.unsqueeze(1),
        dt_bias=dt_bias,
        dt_softplus=True,
        initial_state=state,
    )
    return y.squeeze(1), window, state
