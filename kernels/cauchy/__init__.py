"""Sums of partial fractions over pairs of conjugate poles, at points of the bilinear rule: the Cauchy kernel of S4.

    U[.., d, f] = sum_n v / (w - q Lambda) + conj(v) / (w - q conj(Lambda)),    v = residues[.., d, n],
    Lambda = Lambda[d, n],    w = 2 sinh(s[f]),    q = dt[d] cosh(s[f])

This is the transform sum_l K_l z^l of a diagonal, time-invariant state space model at z = exp(-2 s), up to a factor:
with v = C B and the bilinear rule it is dt e^s U. S4 makes the filter of a matrix that is diagonal less one of low rank
from a few such sums (`models.s4`).

Source: S4 (Gu et al. 2022), section 3, algorithm 1 and appendix C.3.

Departure from the paper: its sums are those of 1 / (g - Lambda) with g = w / q, which is infinite at z = -1. With w and
q apart no point is an exception.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from subquad.kernels.backend import NO_ELEMENT, chooses_triton, on_device_of, use_triton
from subquad.kernels.cauchy.matrix import cauchy_matrix
from subquad.kernels.operations import counted

__all__ = ["cauchy", "elements_per_point"]


@counted("cauchy")
def cauchy(
    residues: Tensor,
    Lambda: Tensor,
    dt: Tensor,
    s: Tensor,
    *,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """The sums U [.., D, F] of this module.

    residues: [.., D, N], complex, N >= 1: v of one number of each conjugate pair. The axes in front of D are those of
              independent sums at the same poles; all of them together cost little more than one.
    Lambda:   [D, N], in the dtype of residues: one number of each conjugate pair of poles.
    dt:       [D], real, in the precision of residues: step sizes.
    s:        [F], complex, F >= 1: points, which count as constants and have no gradient. w and q are computed in
              float64 and rounded once, because an error of w is made larger by 1 / |w - q Lambda| near a pole. So s
              should be given in complex128.
    backend:  triton takes complex64 on a CUDA device and keeps nothing larger than its result. torch forms a tensor
              [D, N, F] a few times; it sums in float64 where matrix products of float32 are not exact
              (`torch.set_float32_matmul_precision`). Both are deterministic. auto takes triton wherever it can.

    Returns U in the dtype of residues. It has gradients for residues, Lambda and dt, and in Triton no gradients of
    gradients. ValueError for shapes and dtypes that do not fit together, and where backend="triton" cannot run.
    """
    _check(residues, Lambda, dt, s)
    # for a complex tensor, the dtype of its parts decides
    if use_triton("cauchy", backend, dt, residues.real, Lambda.real, beside=(s,), obstacle=_obstacle(residues)):
        from subquad.kernels.cauchy.triton import cauchy_triton

        with on_device_of(dt):
            return cauchy_triton(residues, Lambda, dt, s)
    with torch.autocast(dt.device.type, enabled=False):
        return cauchy_matrix(residues, Lambda, dt, s)


def elements_per_point(residues: Tensor, Lambda: Tensor, dt: Tensor, s: Tensor) -> int:
    """Complex numbers that `cauchy` with backend="auto" needs in memory for every point of s.

    A caller with many points can compute them in pieces of a size that fits. They are D N in PyTorch, for a term of
    every pole, and one for each of the sums in Triton, which keeps the terms in registers.
    """
    sums = residues.numel() // Lambda.shape[1]
    kernels = chooses_triton("cauchy", "auto", dt, residues.real, Lambda.real, obstacle=_obstacle(residues))
    return sums if kernels else Lambda.numel()


def _obstacle(residues: Tensor) -> str | None:
    return None if residues.numel() else NO_ELEMENT


def _check(residues: Tensor, Lambda: Tensor, dt: Tensor, s: Tensor) -> None:
    if dt.ndim != 1 or not dt.is_floating_point():
        raise ValueError(f"cauchy: dt must be real and [D], got {dt.dtype} and {list(dt.shape)}.")
    width = len(dt)
    if Lambda.ndim != 2 or Lambda.shape[0] != width or Lambda.shape[1] == 0:
        raise ValueError(f"cauchy: Lambda must be [D, N >= 1] with D={width} as in dt, got {list(Lambda.shape)}.")
    if residues.shape[-2:] != Lambda.shape:
        raise ValueError(f"cauchy: residues must end in {list(Lambda.shape)} as Lambda, got {list(residues.shape)}.")
    if s.ndim != 1 or len(s) == 0 or not s.is_complex():
        raise ValueError(f"cauchy: s must be complex and [F >= 1], got {s.dtype} and {list(s.shape)}.")
    kinds = {torch.float32: torch.complex64, torch.float64: torch.complex128}
    if not residues.dtype == Lambda.dtype == kinds.get(dt.dtype):
        raise ValueError(
            "cauchy: residues and Lambda must be complex64 with dt in float32, or complex128 with float64, got "
            f"{residues.dtype}, {Lambda.dtype} and {dt.dtype}; convert them."
        )
