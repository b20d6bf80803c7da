"""The gated linear unit with silu, between the two linear maps of a channel mixer.

y[f] = silu(x[f]) x[F + f],   f < F

Source: Shazeer 2020 (GLU variants improve Transformer), equation 6 (SwiGLU with beta = 1), without its linear maps: x
holds the products with W and V side by side.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton

__all__ = ["swiglu"]


def swiglu(x: Tensor, *, backend: Literal["auto", "torch", "triton"] = "auto") -> Tensor:
    """The unit of this module: x [..., 2 F] to y [..., F], in the dtype of x.

    backend: the Triton path computes in float32, rounds once, and writes the gradients of both halves into one tensor.
    It copies x unless it is contiguous. `auto` takes it on a GPU, but not inside `torch.compile`, which fuses the plain
    form. Raises ValueError where the last axis has no two halves.
    """
    if x.ndim == 0 or x.shape[-1] % 2 or x.numel() == 0:
        raise ValueError(f"swiglu: x must be [..., 2 F] with at least one element, got {list(x.shape)}.")
    if (backend != "auto" or not torch.compiler.is_compiling()) and use_triton("swiglu", backend, x):
        from subquad.kernels.swiglu.triton import swiglu_triton

        with on_device_of(x):
            return swiglu_triton(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
