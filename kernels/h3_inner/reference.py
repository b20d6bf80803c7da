"""The step as written, from the references of its parts (equation: the package docstring)."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.lti_ssm.reference import lti_ssm_reference


def h3_inner_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Tensor,
    state: Tensor,
    *,
    taps: Tensor,
    shift_skip: Tensor,
    log_dt: Tensor,
    log_A_real: Tensor,
    A_imag: Tensor,
    C: Tensor,
    skip: Tensor,
    B: Tensor | None = None,
    dt_scale: float = 1.0,
    discretization: str = "bilinear",
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the next window and state, computed in the dtypes of the arguments."""
    inputs = torch.cat([k.unsqueeze(-1), window], dim=-1)
    shifted = shift_skip * k
    for m in range(taps.shape[1]):
        shifted = shifted + taps[:, m] * inputs[..., m]
    y, after = lti_ssm_reference(
        (shifted * v).unsqueeze(1),
        torch.complex(-torch.exp(log_A_real), A_imag).expand(len(log_dt), -1),
        None if B is None else torch.view_as_complex(B),
        torch.view_as_complex(C),
        torch.exp(log_dt) * dt_scale,
        D=skip,
        discretization=discretization,
        initial_state=state,
    )
    assert after is not None
    return q * y.squeeze(1), inputs[..., :-1], after
