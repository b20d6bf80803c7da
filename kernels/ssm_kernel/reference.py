"""The filter by its definition: powers by repeated multiplication, or the softmax over a row of powers."""

from __future__ import annotations

import torch
from torch import Tensor


def ssm_kernel_reference(
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    length: int,
    *,
    conj_pairs: bool = True,
    discretization: str = "zoh",
    detach_maximum: bool = False,
) -> Tensor:
    """K [D, length], computed in the dtypes of the arguments."""
    z = dt[:, None] * A
    factor = 2 if conj_pairs else 1
    weight = C if B is None else C * B
    if discretization == "dss-softmax":
        # figure 6 of the paper: subtract the entry of largest real part, then divide by the sum in closed form
        grows = z.real > 0
        powers = z[..., None] * torch.arange(length, device=z.device)
        maximum = torch.where(grows, z * (length - 1), 0 * z)
        row = torch.exp(powers - (maximum.detach() if detach_maximum else maximum)[..., None])
        z_negative = torch.where(grows, -z, z)
        denominator = (torch.exp(z_negative * length) - 1) * A
        guarded = denominator.conj() / (denominator * denominator.conj() + 1e-7)
        kernel = ((weight * (torch.exp(z_negative) - 1) * guarded)[..., None] * row).sum(1)
        return factor * (kernel.real if kernel.is_complex() else kernel)
    if discretization == "bilinear":
        abar, bbar = (1 + z / 2) / (1 - z / 2), dt[:, None] / (1 - z / 2)
    else:
        abar = torch.exp(z)
        bbar = torch.ones_like(z) if discretization == "dss-exp-no-scale" else (abar - 1) / A
    term, values = weight * bbar, []
    for _ in range(length):
        value = term.sum(1)
        values.append(factor * (value.real if value.is_complex() else value))
        term = abar * term
    return torch.stack(values, dim=1)
