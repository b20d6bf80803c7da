"""Discretization of a diagonal system in a form in which any power of Abar can be evaluated.

`discretize` gives the logarithm of Abar, so that Abar^l = exp(l log_abar), and the factor by which Bbar differs from B.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Discretization = Literal["zoh", "bilinear", "dss-softmax", "dss-exp", "dss-exp-no-scale"]
DISCRETIZATIONS: tuple[str, ...] = get_args(Discretization)

SOFTMAX_EPS = 1e-7
"""eps of the guarded reciprocal, DSS appendix A.2."""


def expm1(z: Tensor) -> Tensor:
    """exp(z) - 1 without cancellation near zero, for real and complex z.

    With z = x + iy: expm1(x) cos y - 2 sin^2(y / 2) + i exp(x) sin y.
    """
    if not z.is_complex():
        return torch.expm1(z)
    x, y = z.real, z.imag
    return torch.complex(torch.expm1(x) * torch.cos(y) - 2 * torch.sin(y / 2).square(), torch.exp(x) * torch.sin(y))


def reciprocal(x: Tensor) -> Tensor:
    """conj(x) / (|x|^2 + eps), bounded where 1/x is not (DSS appendix A.2)."""
    return x.conj() / ((x * x.conj()).real + SOFTMAX_EPS)


def discretize(A: Tensor, dt: Tensor, discretization: str) -> tuple[Tensor, Tensor | None]:
    """(log_abar, scale), both [D, N], with Bbar = scale B; None stands for a scale of one. Not for dss-softmax.

    A [D, N] or [N], dt [D]. With bilinear, log_abar is complex even if A is real, because Abar may be negative.
    """
    z = dt.unsqueeze(-1) * A
    if discretization == "dss-exp-no-scale":
        return z, None
    if discretization in ("zoh", "dss-exp"):
        # (exp(z) - 1) / A = dt (exp(z) - 1) / z, whose limit at A = 0 is dt
        zero = z == 0
        safe = torch.where(zero, torch.ones_like(z), z)
        ratio = torch.where(zero, 1 + z / 2, expm1(safe) / safe)
        return z, dt.unsqueeze(-1) * ratio
    assert discretization == "bilinear"
    denominator = 1 - z / 2
    abar = (1 + z / 2) / denominator
    if not abar.is_complex():
        abar = torch.complex(abar, torch.zeros_like(abar))
    # dt A = -2 gives Abar = 0, whose logarithm is infinite
    tiny = torch.finfo(abar.real.dtype).tiny
    return torch.log(torch.where(abar.abs() < tiny, tiny, abar)), dt.unsqueeze(-1) / denominator


def split_softmax(A: Tensor, dt: Tensor, length: int, *, detach_maximum: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(grows, z, scale) of dss-softmax, each [D, N].

    grows: True where Re(A) > 0; those modes are computed in reversed time. z: dt A, negated where `grows`, so that
    Re(z) <= 0. With q = l, or q = L - 1 - l where `grows`, the filter is Re(sum_n C B scale exp(z q)) and
    scale = (exp(z) - 1) / (A (exp(L z) - 1)), by the guarded reciprocal.

    detach_maximum: see `ssm_kernel`; scale gets the factor exp((L - 1) (z' - z)) of those modes, where z' is z as a
    constant. It is one, and its derivative is that of the maximum which is not to be differentiated.
    """
    z = dt.unsqueeze(-1) * A
    grows = (z.real if z.is_complex() else z) > 0
    z = torch.where(grows, -z, z)
    scale = expm1(z) * reciprocal(expm1(length * z) * A)
    if detach_maximum:
        scale = torch.where(grows, scale * torch.exp((length - 1) * (z.detach() - z)), scale)
    return grows, z, scale
