"""The recurrence as written, one position after the other; it is in the package docstring."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.gated_linear_attention.reference import each_head


def ssd_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor,
    own: Tensor | None = None,
    skip: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Arguments and results as in the public operator, computed in the dtypes of the arguments."""
    own = write if own is None else own
    q, k = each_head(q, v.shape[2]), each_head(k, v.shape[2])
    zeros = q.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    state = zeros if initial_state is None else initial_state
    outputs = []
    for t in range(v.shape[1]):
        decayed = log_decay[:, t, :, None, None].exp() * state
        product = k[:, t, :, :, None] * v[:, t, :, None, :]
        read = decayed + own[:, t, :, None, None] * product
        y = (q[:, t, :, :, None] * read).sum(2)
        outputs.append(y if skip is None else y + skip[:, None] * v[:, t])
        state = decayed + write[:, t, :, None, None] * product
    y = torch.stack(outputs, 1).to(v.dtype)
    return (y, state) if return_final_state else y
