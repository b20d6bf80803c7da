"""The sums as one loop over the pairs of poles; equation and source are in the package docstring."""

from __future__ import annotations

import torch
from torch import Tensor


def points(s: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """w [F] and q [D, F] in the precision of dt, computed from s [F] in float64."""
    s, kind = s.detach().to(torch.complex128), torch.promote_types(dt.dtype, torch.complex64)
    return (2 * s.sinh()).to(kind), dt[:, None] * s.cosh().to(kind)


def cauchy_reference(residues: Tensor, Lambda: Tensor, dt: Tensor, s: Tensor) -> Tensor:
    """U [.., D, F], computed in the dtypes of the arguments."""
    w, q = points(s, dt)
    U = torch.zeros_like(q)
    for n in range(Lambda.shape[1]):
        v, pole = residues[..., n, None], Lambda[:, n, None]
        U = U + v / (w - q * pole) + v.conj() / (w - q * pole.conj())
    return U
