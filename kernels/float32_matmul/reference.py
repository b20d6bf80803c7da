"""The product as written, in the dtype of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def float32_matmul_reference(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [M, K] and b [K, N] to [M, N], row by row."""
    c = torch.stack([(row.unsqueeze(1) * b).sum(0) for row in a])
    return c if bias is None else c + bias
