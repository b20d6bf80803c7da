"""The map as written, row by row (equation: the package docstring)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.skinny_linear import Activation, Norm


def skinny_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [B, K] and weight [N, K] to y [B, N], computed in the dtypes of the arguments."""
    f = x
    if norm is not None:
        groups = x.unflatten(-1, (-1, norm.weight.shape[0]))
        if norm.kind == "layer":
            groups = groups - groups.mean(-1, keepdim=True)
        groups = groups / (groups.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
        f = (groups if norm.bias is None else groups + norm.bias).flatten(-2)
    if gate is not None:
        f = f * gate * torch.sigmoid(gate)
    y = torch.stack([(weight * row).sum(-1) for row in f])
    if bias is not None:
        y = y + bias
    if activation == "gelu":
        y = F.gelu(y, approximate="tanh")
    elif activation == "silu":
        y = y * torch.sigmoid(y)
    return y if residual is None else residual + y
