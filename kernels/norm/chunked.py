"""The norm in plain PyTorch: the library's norms between the additions and products around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def in_rows(y: Tensor, linear: Tensor) -> Tensor:
    """y [..., D] or [..., H, D] with as many channels in a row as a linear map [O, D] or [O, H D] reads."""
    return y if y.shape[-1] == linear.shape[1] else y.flatten(-2)


def norm_chunked(
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
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y in `out_dtype` (None: that of x), or (y, x + residual); all between is float32 at least."""
    total = x if residual is None else residual + x
    wide = torch.promote_types(total.dtype, torch.float32)
    u = total.to(wide)
    if activation == "silu":
        u = F.silu(u)
    if gate is not None:
        gate = gate.to(wide)
        if gate_activation != "identity":
            gate = F.silu(gate) if gate_activation == "silu" else torch.sigmoid(gate)
        u = u * gate if gate_first else u
    # the library's norms multiply by a weight that all rows share, and by no other; on a CPU it needs the dtype of u
    shared = weight.to(wide) if kind != "l2" and weight is not None and weight.ndim == 1 else None
    if kind == "layer":
        y = F.layer_norm(u, u.shape[-1:], shared, None if shared is None or bias is None else bias.to(wide), eps)
    elif kind == "rms":
        y = F.rms_norm(u, u.shape[-1:], shared, eps)
    else:
        y = u * torch.rsqrt(u.square().sum(-1, keepdim=True) + eps)
    if weight is not None and shared is None:
        y = y * weight if bias is None else torch.addcmul(bias, y, weight)
    elif kind == "rms" and bias is not None:
        y = y + bias
    if skip is not None and skip_scale is not None:
        y = y + skip_scale.to(wide).unsqueeze(-1) * skip.to(wide)
    if gate is not None and not gate_first:
        y = y * gate
    y = y.to(out_dtype or x.dtype)
    return y if residual is None else (y, total)
