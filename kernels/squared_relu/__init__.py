"""The square of a rectified linear unit, between the two linear maps of RWKV's channel mixing.

y = max(x, 0)^2,   and with a weight y weight^T

Source: So et al. 2021 (Primer, arXiv 2109.08668), section 4.1; Peng et al. 2023 (RWKV, arXiv 2305.13048), section 3.1.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import check_shapes

__all__ = ["squared_relu"]


def squared_relu(
    x: Tensor, weight: Tensor | None = None, *, backend: Literal["auto", "torch", "triton"] = "auto"
) -> Tensor:
    """The unit of this module: x [..., F] to y [..., F], in the dtype of x; with a weight [D, F] y weight^T [..., D].

    backend: the Triton path computes y in float32, rounds once, and keeps y and the weight for the backward pass: both
    gradients read y, that of x as 2 sqrt(y) dy. It copies x unless it is contiguous. `auto` takes it on a GPU, but not
    inside `torch.compile`, which fuses the plain form.

    Autocast does not change the dtype of the product. Raises ValueError for an x without elements, and for a weight of
    another dtype or that does not fit.
    """
    if x.ndim == 0 or x.numel() == 0:
        raise ValueError(f"squared_relu: x must be [..., F] with at least one element, got {list(x.shape)}.")
    if weight is not None:
        check_shapes("squared_relu", {"weight": (weight, (*weight.shape[:1], x.shape[-1]))}, to_go_with="x")
        if weight.dtype != x.dtype:
            raise ValueError(f"squared_relu: weight must have the dtype of x, {x.dtype}, got {weight.dtype}.")
    if use_triton("squared_relu", backend, x, weight, is_faster=not torch.compiler.is_compiling()):
        from subquad.kernels.squared_relu.triton import squared_relu_triton

        with on_device_of(x):
            return squared_relu_triton(x, weight)
    y = F.relu(x).square()
    if weight is None:
        return y
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(y, weight)
