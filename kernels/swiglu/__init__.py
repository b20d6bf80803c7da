"""The gated linear unit with silu, between the two linear maps of a channel mixer.

y[f] = silu(x[f]) x[F + f],   f < F,   and with a weight y weight^T

x[F + f] may also lie in a tensor of its own, as the output that Mamba-3 gates does (up).

Source: Shazeer 2020 (GLU variants improve Transformer), equation 6 (SwiGLU with beta = 1), without its linear maps: x
holds the products with W and V side by side.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import check_shapes

__all__ = ["swiglu"]


def swiglu(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    up: Tensor | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """The unit of this module: x [..., 2 F] to y [..., F], in the dtype of x; with a weight [D, F] y weight^T [..., D].

    up: [..., F], the second half of x, which is then [..., F] with rows at any distance, as in a part of a projection.
    backend: the Triton path computes y in float32, rounds once, and writes the gradients of both halves into one
    tensor. It keeps nothing but its inputs for the backward pass: the gradient of the weight reads y, which is computed
    again with the gradient of x. It copies x unless it is contiguous. `auto` takes it on a GPU, but not inside
    `torch.compile`, which fuses the plain form.

    Autocast does not change the dtype of the product. Raises ValueError where the last axis has no two halves, and for
    a weight of another dtype or that does not fit.
    """
    if x.ndim == 0 or (up is None and x.shape[-1] % 2) or x.numel() == 0:
        raise ValueError(f"swiglu: x must be [..., 2 F] with at least one element, got {list(x.shape)}.")
    width = x.shape[-1] // 2 if up is None else x.shape[-1]
    behind = (0,) if weight is None else weight.shape[:1]
    check_shapes("swiglu", {"up": (up, tuple(x.shape)), "weight": (weight, (*behind, width))}, to_go_with="x")
    for name, other in (("weight", weight), ("up", up)):
        if other is not None and other.dtype != x.dtype:
            raise ValueError(f"swiglu: {name} must have the dtype of x, {x.dtype}, got {other.dtype}.")
    if use_triton("swiglu", backend, x, weight, up, is_faster=not torch.compiler.is_compiling()):
        from subquad.kernels.swiglu.triton import swiglu_triton

        with on_device_of(x):
            return swiglu_triton(x, weight, up)
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    y = F.silu(gate) * up
    if weight is None:
        return y
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(y, weight)
