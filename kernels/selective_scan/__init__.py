"""Selective scan: a diagonal recurrence whose step size, input map and output map depend on the input.

h_t[d, n] = exp(dt_t[d] A[d, n]) h_{t-1}[d, n] + dt_t[d] B_t[n] x_t[d]
y_t[d]    = Re(sum_n C_t[n] h_t[d, n]) + D[d] x_t[d],   times silu(z_t[d]) where z is given

Source: Mamba (Gu & Dao 2023), section 3.2, Algorithm 2.

Departures from the paper:
- Equation 4 discretizes B by zero-order hold, (exp(dt A) - 1) / A * B. Ours is the Euler form dt * B, which is what the
  authors' own code computes; the two agree to first order in dt.
- With complex A the real part is not doubled. Pass both conjugates or double C.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.selective_scan.chunked import selective_scan_chunked

__all__ = ["selective_scan", "selective_scan_step"]


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of this module over a sequence.

    x, dt, z: [B, T, D]; A: [D, N], real or complex, Re(A) < 0; B, C: [B, T, N] (input dependent) or [D, N];
    D, dt_bias: [D]; initial_state: [B, D, N]. The step size is dt + dt_bias, through softplus where asked.
    Returns y [B, T, D] in the dtype of x and, on request, the final state [B, D, N]. The state, the decays and the
    step size are float32 at least, also for half-precision x and under autocast.
    """
    _check(x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, initial_state=initial_state)
    if backend == "triton":
        raise ValueError("selective_scan: no Triton path yet; use backend='auto' or 'torch'.")
    if backend not in ("auto", "torch"):
        raise ValueError(f"selective_scan: backend={backend!r} is not one of 'auto', 'torch', 'triton'.")
    with torch.autocast(x.device.type, enabled=False):
        y, state = selective_scan_chunked(
            x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, initial_state=initial_state
        )
    return (y, state) if return_final_state else y


def selective_scan_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """One step of the recurrence; `state` [B, D, N] is updated in place.

    x, dt, z: [B, D]; B, C: [B, N] or, where they do not depend on the input, [1, D, N]. Returns y [B, D].
    """
    with torch.autocast(x.device.type, enabled=False):
        real = A.real.dtype
        step = dt.to(real) if dt_bias is None else dt.to(real) + dt_bias.to(real)
        if dt_softplus:
            step = F.softplus(step)
        b, c = (m.unsqueeze(1) if m.ndim == 2 else m for m in (B, C))
        inputs = x.to(real)
        state.mul_(torch.exp(step.unsqueeze(-1) * A)).add_((step * inputs).unsqueeze(-1) * b)
        y = (state * c).sum(-1)
        y = y.real if y.is_complex() else y
        if D is not None:
            y = y + D.to(real) * inputs
        if z is not None:
            y = y * F.silu(z.to(real))
    return y.to(x.dtype)


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    if x.ndim != 3 or x.shape[1] == 0:
        raise ValueError(f"selective_scan: x must be [B, T, D] with T >= 1, got {list(x.shape)}.")
    if A.ndim != 2 or A.shape[0] != x.shape[2]:
        raise ValueError(f"selective_scan: A must be [D, N] with D={x.shape[2]} as in x, got {list(A.shape)}.")
    batch, length, width = x.shape
    state = A.shape[1]
    for name, tensor, allowed in (
        ("dt", dt, [(batch, length, width)]),
        ("B", B, [(batch, length, state), (width, state)]),
        ("C", C, [(batch, length, state), (width, state)]),
        ("D", D, [(width,)]),
        ("z", z, [(batch, length, width)]),
        ("dt_bias", dt_bias, [(width,)]),
        ("initial_state", initial_state, [(batch, width, state)]),
    ):
        if tensor is not None and tuple(tensor.shape) not in allowed:
            shapes = " or ".join(str(list(shape)) for shape in allowed)
            raise ValueError(f"selective_scan: {name} must be {shapes} to go with x and A, got {list(tensor.shape)}.")
