"""The equations of the package docstring, position by position, in the dtype of the arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def rwkv6_inputs_reference(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, w_0: Tensor, bonus: Tensor, *, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, log_decay and own; arguments and results as in the package."""

    def heads(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, head_dim)

    r, k, v, w, w_0, bonus = (heads(x) for x in (r, k, v, w, w_0, bonus))
    q, log_decay, own = [], [], []
    length = r.shape[1]
    for t in range(length):
        q.append(r[:, t + 1] if t + 1 < length else torch.zeros_like(r[:, t]))
        log_decay.append(-torch.exp(w_0 + w[:, t]))
        own.append((r[:, t] * bonus * k[:, t]).sum(-1, keepdim=True) * v[:, t])
    # copies, because a result that is its argument has no gradient of its own
    return torch.stack(q, 1), k.clone(), v.clone(), torch.stack(log_decay, 1), torch.stack(own, 1)
