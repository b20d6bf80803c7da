"""The norm in plain PyTorch: the library's norms between the additions and products around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_chunked(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    kind: str = "rms",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y in `out_dtype` (None: that of x), or (y, x + residual); all between is float32 at least."""
    total = x if residual is None else residual + x
    wide = torch.promote_types(total.dtype, torch.float32)
    u = total.to(wide)
    if activation == "silu":
        u = F.silu(u)
    if kind == "layer":
        y = F.layer_norm(u, u.shape[-1:], weight, bias, eps)
    elif kind == "rms":
        y = F.rms_norm(u, u.shape[-1:], weight, eps)
    else:
        y = u * torch.rsqrt(u.square().sum(-1, keepdim=True) + eps)
        y = y if weight is None else y * weight
    if kind != "layer" and bias is not None:
        y = y + bias
    if gate is not None:
        y = y * F.silu(gate.to(wide))
    y = y.to(out_dtype or x.dtype)
    return y if residual is None else (y, total)
