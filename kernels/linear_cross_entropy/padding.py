"""Rows of zeros below a weight [V, D], so that matrix products over the classes are aligned.

A product in which the size or the stride of an operand is no multiple of 16 bytes runs on slow kernels: with V = 50,277
in bfloat16 one takes about 10 ms where the product with 50,304 classes takes 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 64
"""The number of classes is padded to a multiple of this one."""
MIN_ROWS = 256
"""Number of rows of x from which an aligned product gains more than the copy of the weight takes."""


def padded_size(size: int) -> int:
    """The number of classes with padding."""
    return -(-size // MULTIPLE) * MULTIPLE


def padded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [V, ...] in dtype, with zeros behind its last row up to the padded size; x itself where it fits. No gradient.

    One copy serves both the cast, which autocast would make anyway, and the padding.
    """
    size, rows = len(x), padded_size(len(x))
    if rows == size:
        return x.to(dtype)
    y = torch.empty(rows, *x.shape[1:], dtype=dtype, device=x.device)
    y[:size].copy_(x)
    y[size:].zero_()
    return y


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)`, on a GPU by an aligned product where V is odd.

    With many rows, the result [..., V] is a view of a tensor with padded rows. With few rows [B, D] in half precision
    it is a view of W x^T, whose rows have B elements, so that the weight is not copied.
    """
    extra = padded_size(len(weight)) - len(weight)
    if not (extra and x.is_cuda):
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.numel() < MIN_ROWS * x.shape[-1]:
        return _by_columns(x, weight, bias) if x.ndim == 2 and x.dtype.itemsize == 2 else F.linear(x, weight, bias)
    weight = F.pad(weight, (0, 0, 0, extra))
    return F.linear(x, weight, None if bias is None else F.pad(bias, (0, extra)))[..., :-extra]


def _by_columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias as the transpose of weight x^T, with x [B, D] padded to rows of whole 16 bytes."""
    columns = F.pad(x, (0, 0, 0, -len(x) % 8)).t()
    y = weight @ columns if bias is None else torch.addmm(bias.to(x.dtype).unsqueeze(1), weight, columns)
    return y.t()[: len(x)]
