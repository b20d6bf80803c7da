"""The norm as its equation says; equation and sources are in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    kind: str = "rms",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    activation: str | None = None,
    skip: Tensor | None = None,
    skip_scale: Tensor | None = None,
    gate_first: bool = False,
    linear: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y in the dtype of x, (y, x + residual), or y linear^T, computed in the dtypes of the arguments.

    A weight and a bias [H, V] meet the last two axes of x [..., H, V], and so does a linear map [O, H V].
    """
    total = x if residual is None else x + residual
    u = F.silu(total) if activation == "silu" else total
    if gate is not None and gate_activation != "identity":
        gate = F.silu(gate) if gate_activation == "silu" else torch.sigmoid(gate)
    if gate is not None and gate_first:
        u = u * gate
    if kind == "layer":
        u = u - u.mean(-1, keepdim=True)
    squares = u.square().sum(-1, keepdim=True)
    y = u / torch.sqrt((squares if kind == "l2" else squares / u.shape[-1]) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    if skip is not None and skip_scale is not None:
        y = y + skip_scale.unsqueeze(-1) * skip
    if gate is not None and not gate_first:
        y = y * gate
    y = y.to(x.dtype)
    if linear is not None:
        y = (y if linear.shape[1] == y.shape[-1] else y.flatten(-2)) @ linear.t()
    return y if residual is None else (y, total)
