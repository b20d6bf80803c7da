"""Causal softmax attention, the quadratic yardstick of every other operator.

    o_t = sum_{j <= t} softmax_j(scale q_t k_j) v_j

Source: Vaswani et al. 2017, section 3.2.1, equation 1, with the mask of section 3.2.3.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from kernels.attention.reference import attention_reference
from kernels.backend import record

__all__ = ["attention", "attention_reference"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """o [B, T, H, K] in the dtype of v, from q, k, v [B, T, H, K], any T >= 1; scale: K^-0.5 where None.

    Runs torch's own fused kernels, which take half precision without forming the T by T matrix.
    Raises ValueError for shapes or options that do not fit.
    """
    if q.dim() != 4 or q.shape[1] < 1 or k.shape != q.shape or v.shape != q.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"attention: q, k and v must be [B, T, H, K], all of one shape and T >= 1, got {shapes}.")
    if backend == "triton":
        raise ValueError("attention: no Triton path, torch has a fused one; use backend='auto' or 'torch'.")
    if backend not in ("auto", "torch"):
        raise ValueError(f"attention: backend={backend!r} is not one of 'auto', 'torch', 'triton'.")
    record("attention", "torch")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
