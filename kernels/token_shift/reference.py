"""The equation of the package docstring, position by position, in the dtype of the arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def token_shift_reference(
    x: Tensor,
    mu: Tensor,
    delta: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    weighs: str = "before",
) -> tuple[Tensor, ...]:
    """y_1 .. y_U; arguments and results as in the package."""
    results: list[list[Tensor]] = [[] for _ in mu]
    before = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state
    for t in range(x.shape[1]):
        now = x[:, t]
        for u, outputs in enumerate(results):
            if weighs == "now":
                mixed = before + (now - before) * mu[u]
            else:
                mixed = now + (before - now) * (mu[u] if delta is None else mu[u] + delta[u, :, t])
            outputs.append(mixed.to(x.dtype))
        before = now
    return tuple(torch.stack(outputs, 1) for outputs in results)
