"""Products of float32 matrices on matrix units, as exact as those of the float32 units and faster.

    C = A B + bias,   A = A_1 + A_2,   B = B_1 + B_2,   A B = A_1 B_1 + A_1 B_2 + A_2 B_1 + (A_2 B_2, left out)

A_1 has the nearest TF32 numbers, with 11 bits, and A_2 the next 11. Or a number is the sum of three bfloat16 numbers
with 8 bits each, and the six products of parts whose indices add up to at most 4 are taken. Matrix units multiply both
kinds exactly. Source: the products are those of CUTLASS, example 27 (3xTF32), after Markidis et al. 2018 (NVIDIA tensor
core programmability, performance and precision), section 5, and of Henry et al. 2019 (arXiv 1904.06376).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import NO_ELEMENT, NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import check_one_dtype, check_shapes

__all__ = ["float32_matmul", "takes_parts"]

MIN_PRODUCTS = 1 << 30
"""Number of products M N K from which the kernel was measured to be faster than cuBLAS, on GPUs of MEASURED_ON."""
MEASURED_ON = (9, 0)
"""Compute capability."""
MAX_COLUMNS = 2**23
"""Number of columns that the matrices of `parts` do not reach, because offsets within a tile of 256 rows are int32."""
MIN_SIZE = 80
"""Parts are made once for a linear map from C to D channels where C D / (C + D) is at least this number, because only
then do its products gain more than the making takes. Maps from 128 to 384 channels (96) gained, and those from 128 to
128 (64) lost."""


def float32_matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """C [M, N] of A [M, K], B [K, N] and bias [N], in their dtype; it is written into `out` where that is given.

    backend: triton takes float32 matrices with rows or columns that are contiguous, and a contiguous `out`. It has no
        gradient. auto takes it on a CUDA device for large products, unless torch may round float32 to TF32
        (`torch.set_float32_matmul_precision`), which is faster still. Everything else is a product of PyTorch.

    Infinities give infinities or NaN as in any product. Raises ValueError for shapes that do not fit.
    """
    _check(a, b, bias, out)
    check_one_dtype("float32_matmul", {"a": a, "b": b, "bias": bias})
    is_faster = _is_faster(a, a.shape[0] * b.numel())
    if use_triton("float32_matmul", backend, a, b, bias, out, obstacle=_obstacle(a, b, bias, out), is_faster=is_faster):
        from subquad.kernels.float32_matmul.triton import float32_matmul_triton

        with on_device_of(a):
            return float32_matmul_triton(a, b, bias, out=out)
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def takes_parts(x: Tensor, weight: Tensor) -> bool:
    """Whether the products of a linear map of x [..., C] with weight [D, C] are those of `float32_matmul.parts`.

    Those are products that `float32_matmul` would take to its kernel, of maps of at least MIN_SIZE; the answer is
    recorded as one of its uses.
    """
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or not _is_faster(x, x.numel() * len(weight)):
        return False
    if weight.numel() < MIN_SIZE * sum(weight.shape):
        return False
    # gradients are products whose matrices have the rows of x or of the weight as their columns
    if max(x.numel() // x.shape[-1], *weight.shape) >= MAX_COLUMNS:
        return False
    return use_triton("float32_matmul", "auto", x, weight)


def _is_faster(x: Tensor, num_products: int) -> bool:
    """Whether matrix units were measured to be faster for so many float32 products M N K on the device of x."""
    return (
        x.is_cuda
        and num_products >= MIN_PRODUCTS
        and not torch.backends.cuda.matmul.allow_tf32
        and torch.cuda.get_device_capability(x.device) == MEASURED_ON
    )


def _obstacle(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if needs_gradient(a, b, bias):
        return NO_GRADIENT
    for x in (a, b, bias, out):
        if x is not None and x.dtype != torch.float32:
            return f"takes float32, got {x.dtype}"
    if any(1 not in x.stride() for x in (a, b)):
        return "takes matrices with contiguous rows or columns"
    if out is not None and not out.is_contiguous():
        return "takes a contiguous `out`"
    return None if a.numel() and b.numel() else NO_ELEMENT


def _check(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"float32_matmul: a is [M, K] and b [K, N], got {list(a.shape)} and {list(b.shape)}.")
    size = a.shape[0], b.shape[1]
    check_shapes("float32_matmul", {"bias": (bias, size[1:]), "out": (out, size)})
