"""The lookup as written, row by row."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding_reference(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [...] and weight [V, D] to [..., D]."""
    rows = [weight[token] for token in tokens.flatten().tolist()]
    return torch.stack(rows).view(*tokens.shape, weight.shape[1])


def embedding_gradient_reference(tokens: Tensor, dy: Tensor, num_tokens: int) -> Tensor:
    """The gradient of the weight [num_tokens, D] from tokens [R] and dy [R, D]."""
    dweight = [torch.zeros_like(dy[0]) for _ in range(num_tokens)]
    for token, row in zip(tokens.tolist(), dy, strict=True):
        dweight[token] = dweight[token] + row
    return torch.stack(dweight)
