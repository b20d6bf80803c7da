"""Token shift: every input is mixed with the one before it, once for each of its U uses.

    y_u,t = x_t + (x_{t-1} - x_t) * (mu_u + delta_u,t)          u = 1 .. U, for every channel

With `weighs="now"` the factor is that of the present input, y_u,t = x_{t-1} + (x_t - x_{t-1}) * mu_u.

Source: RWKV-4 (Peng et al. 2023, arXiv 2305.13048), section 3.1, where mu weighs the present input; RWKV-6 ("Eagle and
Finch", Peng et al. 2024, arXiv 2404.05892), section 4.2, where delta_u = tanh(y_0 A_u) B_u depends on the data, and y_0
is a token shift of its own with mu_x; RWKV-7 (Peng et al. 2025, arXiv 2503.14456), section 4, without delta. The
products with A_u, B_u and the matrices that read y_u are no part of the operator.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import check_choice, check_shapes

__all__ = ["Weighs", "token_shift", "token_shift_step"]

Weighs = Literal["before", "now"]
MAX_USES = 6
"""Maximum U of the Triton kernels, which take one tensor for each use."""


def token_shift(
    x: Tensor,
    mu: Tensor,
    delta: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    weighs: Weighs = "before",
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Tensor, ...]:
    """y_1 .. y_U, each [B, T, D] in the dtype of x, by the equation of this module.

    x:             [B, T, D].
    mu:            [U, D].
    delta:         [U, B, T, D], or None for zeros; it needs weighs="before".
    initial_state: x_0, the input before the first one, [B, D]; None stands for zeros. The final state is x[:, -1].
    weighs:        whether mu is the factor of the input before ("before") or that of the present one ("now").
    backend:       the Triton path takes U up to 6 in float32, bfloat16 and float16. It computes in float32, rounds
                   once, and keeps nothing but its inputs for the backward pass. It copies what is not contiguous.
                   `auto` takes it wherever it can. Both paths are deterministic.

    The plain path computes in the dtype of x. Raises ValueError for shapes that do not fit.
    """
    if x.ndim != 3 or x.numel() == 0:
        raise ValueError(f"token_shift: x must be [B, T >= 1, D] with at least one element, got {list(x.shape)}.")
    _check("token_shift", x, initial_state, "initial_state", mu, delta, weighs)
    obstacle = f"takes U up to {MAX_USES}, got U={len(mu)}" if len(mu) > MAX_USES else None
    if use_triton("token_shift", backend, x, mu, delta, initial_state, obstacle=obstacle):
        from subquad.kernels.token_shift.triton import token_shift_triton

        with on_device_of(x):
            return token_shift_triton(x, mu if weighs == "before" else 1 - mu.float(), delta, initial_state)
    if initial_state is None:
        before = F.pad(x, (0, 0, 1, -1))
    else:
        before = torch.cat((initial_state.to(x.dtype).unsqueeze(1), x[:, :-1]), 1)
    return _mixed(x, before, mu, delta, weighs)


def token_shift_step(
    x_t: Tensor, state: Tensor, mu: Tensor, delta: Tensor | None = None, *, weighs: Weighs = "before"
) -> tuple[Tensor, ...]:
    """y_1 .. y_U at one position, each [B, D], for x_t [B, D], the input before it, state [B, D], and delta [U, B, D].

    It is plain PyTorch, and the state to come is x_t. Raises ValueError for shapes that do not fit.
    """
    if x_t.ndim != 2 or x_t.numel() == 0:
        raise ValueError(f"token_shift_step: x must be [B, D] with at least one element, got {list(x_t.shape)}.")
    _check("token_shift_step", x_t, state, "state", mu, delta, weighs)
    return _mixed(x_t, state.to(x_t.dtype), mu, delta, weighs)


def _mixed(x: Tensor, before: Tensor, mu: Tensor, delta: Tensor | None, weighs: Weighs) -> tuple[Tensor, ...]:
    mu = mu.to(x.dtype)
    if weighs == "now":
        return tuple(torch.lerp(before, x, one) for one in mu)
    factors = mu.view(len(mu), *[1] * (x.ndim - 1), -1)
    return torch.addcmul(x, before - x, factors if delta is None else factors + delta.to(x.dtype)).unbind()


def _check(
    op: str, x: Tensor, state: Tensor | None, state_name: str, mu: Tensor, delta: Tensor | None, weighs: Weighs
) -> None:
    width = x.shape[-1]
    if mu.ndim != 2 or len(mu) == 0 or mu.shape[1] != width:
        raise ValueError(f"{op}: mu must be [U >= 1, {width}], got {list(mu.shape)}.")
    wanted = {"delta": (delta, (len(mu), *x.shape)), state_name: (state, (len(x), width))}
    check_shapes(op, wanted, to_go_with="x and mu")
    check_choice(op, "weighs", weighs, ("before", "now"))
    if delta is not None and weighs == "now":
        raise ValueError(f"{op}: delta needs weighs='before', got weighs='now'.")
