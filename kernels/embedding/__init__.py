"""Lookup of embeddings whose gradient takes the same time for frequent and for rare tokens.

    y_i = weight[token_i],     dweight[v] = sum_{i: token_i = v} dy_i

torch adds the parts of one token one after the other, which takes longer than a layer where a token fills half of a
batch, as the filler of synthetic tasks does.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import check_integers

__all__ = ["embedding"]

MIN_TOKENS = 4096
"""Number of tokens from which the kernels are used."""
MAX_WIDTH = 8192
"""Maximum D of the Triton kernels."""


def embedding(tokens: Tensor, weight: Tensor, *, backend: Literal["auto", "triton", "torch"] = "auto") -> Tensor:
    """y [..., D] of integers tokens [...] and weight [V, D], in the dtype of the weight.

    backend: triton has its own gradient, with sums in float32 and in an order that depends on the tokens alone. auto
        takes it on a CUDA device where a gradient is recorded, but not inside `torch.compile`. The lookup itself is
        torch's.

    Raises ValueError for shapes or dtypes that do not fit. As in torch, a token outside of 0 .. V - 1 is an error that
    a GPU reports later.
    """
    check_integers("embedding", "tokens", tokens)
    if weight.ndim != 2:
        raise ValueError(f"embedding: weight must be [V, D], got {list(weight.shape)}.")
    obstacle = f"takes D up to {MAX_WIDTH}, got {weight.shape[1]}" if weight.shape[1] > MAX_WIDTH else None
    pays = tokens.numel() >= MIN_TOKENS and needs_gradient(weight) and not torch.compiler.is_compiling()
    if use_triton("embedding", backend, weight, beside=(tokens,), obstacle=obstacle, is_faster=pays):
        from subquad.kernels.embedding.triton import embedding_triton

        with on_device_of(weight):
            return embedding_triton(tokens, weight)
    return F.embedding(tokens.long(), weight)
