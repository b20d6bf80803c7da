"""Step sizes of state space models with heads: decays and weights of every position, from what a projection gives.

    dt_t = softplus(x_t + bias)
    euler:     log_decay_t = -dt_t rate                       rate [H];  the weight of position t is dt_t
    trapezoid: log_decay_t = -dt_t max(softplus(rate_t), least),   n_t = sigmoid(share_t) dt_t,
               w_t = n_t + (1 - sigmoid(share_{t+1})) dt_{t+1},    without the second term at the last position

Sources: Mamba-2 (Dao & Gu 2024, arXiv 2405.21060), section 7; Mamba-3 (Lahoti et al. 2026, arXiv 2603.15569), the
trapezoidal rule as in models/mamba3.py. They are small tensors, but each operation on them alone takes a GPU longer to
start than to run.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import check_number, check_shapes
from subquad.kernels.positions import at_least_float32


def ssd_steps(
    x: Tensor,
    bias: Tensor,
    rate: Tensor,
    share: Tensor | None = None,
    *,
    least: float = 0.0,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> tuple[Tensor, ...]:
    """(dt, log_decay) or, with a share, (dt, log_decay, w, n), all [..., T, H] in float32 or wider.

    x, share: [..., T, H], T at least 1; bias: [H].
    rate:     [H] and positive; with a share [..., T, H], before its softplus.
    least:    the least rate, where there is a share.
    backend:  triton computes all in one pass, and all gradients in one; it takes float32, bfloat16 and float16 on a
              CUDA device, and auto takes it there, but not inside `torch.compile`. Both are deterministic.

    ValueError for shapes that do not fit.
    """
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"ssd_steps: x must be [..., T, H] with at least one element, got {list(x.shape)}.")
    shape = tuple(x.shape)
    check_number("ssd_steps", "least", least)
    check_shapes("ssd_steps", {"share": (share, shape)}, to_go_with="x")
    wanted = {"bias": (bias, shape[-1:]), "rate": (rate, shape[-1:] if share is None else shape)}
    check_shapes("ssd_steps", wanted, to_go_with="x and share")
    if use_triton("ssd_steps", backend, x, bias, rate, share, is_faster=not torch.compiler.is_compiling()):
        from subquad.kernels.ssd.steps_triton import ssd_steps_triton

        with on_device_of(x):
            return ssd_steps_triton(x, bias, rate, share, least)
    dt = F.softplus(at_least_float32(x) + at_least_float32(bias))
    if share is None:
        return dt, -dt * rate
    now = torch.sigmoid(at_least_float32(share))
    log_decay = -dt * F.softplus(at_least_float32(rate)).clamp(min=least)
    own = now * dt
    return dt, log_decay, own + F.pad(((1 - now) * dt)[..., 1:, :], (0, 0, 0, 1)), own


def ssd_steps_reference(
    x: Tensor, bias: Tensor, rate: Tensor, share: Tensor | None = None, *, least: float = 0.0
) -> tuple[Tensor, ...]:
    """The equations as written, in the dtypes of the arguments."""
    dt = torch.log1p(torch.exp(x + bias))
    if share is None:
        return dt, -dt * rate
    log_decay = -dt * torch.log1p(torch.exp(rate)).clamp(min=least)
    now = 1 / (1 + torch.exp(-share))
    own = now * dt
    later = ((1 - now) * dt)[..., 1:, :]
    return dt, log_decay, torch.cat([own[..., :-1, :] + later, own[..., -1:, :]], -2), own
