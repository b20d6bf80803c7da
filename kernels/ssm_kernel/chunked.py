"""The filter as a product of two small tables of powers, in plain PyTorch.

With l = i J + j, the sum over the state is a matrix product for each channel,
Re(sum_n w[n] exp(z[n] i J) exp(z[n] j)), of tables [I, N] and [N, J] with I J >= L and J near sqrt(L). Nothing of size
[D, N, L] is ever formed, forward or backward; the tables have D N (I + J) elements. Their exponents are computed in
float64, because in float32 the phase of exp(z l) would be wrong by |z l| rounding errors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from subquad.kernels.ssm_kernel.discretize import discretize, split_softmax


def vandermonde_product(w: Tensor, z: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Re(sum_n w[d, m, n] exp(z[d, n] l)) for l = 0 .. length - 1, [D, M, length] in dtype.

    w [D, M, N] and z [D, N] are real or complex, z in float64. Either Re(z) <= 0 or exp(z length) fits the dtype.
    """
    inner = math.isqrt(length - 1) + 1
    outer = -(-length // inner)
    kind = torch.promote_types(dtype, torch.complex64) if w.is_complex() or z.is_complex() else dtype
    i = torch.arange(outer, device=z.device, dtype=torch.float64) * inner
    j = torch.arange(inner, device=z.device, dtype=torch.float64)
    left = w.to(kind).unsqueeze(2) * torch.exp(z[:, None, None] * i[:, None]).to(kind)
    if kind.is_complex:
        # Re(a b) = Re a Re b + Im a Im conj(b): a real product of twice the inner size
        right = torch.view_as_real(torch.exp(z.conj().unsqueeze(1) * j[:, None]).to(kind)).flatten(-2)
        left = torch.view_as_real(left).flatten(-2)
    else:
        right = torch.exp(z.unsqueeze(1) * j[:, None]).to(kind)
    product = torch.matmul(left.flatten(1, 2), right.transpose(1, 2))
    return product.view(*w.shape[:2], outer * inner)[..., :length]


def ssm_kernel_chunked(
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    length: int,
    *,
    conj_pairs: bool = True,
    discretization: str = "zoh",
    normalize_over: int | None = None,
    detach_maximum: bool = False,
) -> Tensor:
    """K [D, length]; arguments as those of `ssm_kernel`."""
    A, B, C, dt, dtype = widen(A, B, C, dt)
    weight = C if B is None else C * B
    factor = 2.0 if conj_pairs else 1.0
    if discretization == "dss-softmax":
        whole = normalize_over or length
        grows, z, scale = split_softmax(A, dt, whole, detach_maximum=detach_maximum)
        weight = weight * scale
        zero = torch.zeros_like(weight)
        falling = vandermonde_product(torch.where(grows, zero, weight).unsqueeze(1), z, length, dtype)
        # for modes in reversed time, the tap at lag l is the power L - 1 - l
        rest = torch.exp(z * (whole - length))
        rising = vandermonde_product((torch.where(grows, weight, zero) * rest).unsqueeze(1), z, length, dtype)
        return factor * (falling + rising.flip(-1)).squeeze(1)
    log_abar, scale_or_one = discretize(A, dt, discretization)
    if scale_or_one is not None:
        weight = weight * scale_or_one
    return factor * vandermonde_product(weight.unsqueeze(1), log_abar, length, dtype).squeeze(1)


def widen(
    A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, torch.dtype]:
    """A, B, C and dt in float64 (complex ones in complex128), and the dtype of the filter."""

    def double(tensor: Tensor) -> Tensor:
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

    return double(A), None if B is None else double(B), double(C), double(dt), filter_dtype(A, B, C, dt)


def filter_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of the filter of A, B, C and dt: float64 where one of them has this precision, else float32."""
    double = (torch.float64, torch.complex128)
    return torch.float64 if any(x is not None and x.dtype in double for x in tensors) else torch.float32
