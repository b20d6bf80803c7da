"""The mean cross entropy of a linear readout as written (see the package docstring for equation and source)."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100
) -> Tensor:
    """The loss, a scalar; logits have the dtype of x, and what follows has float32 at least."""
    logits = x @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labelled = targets != ignore_index
    logits, classes = logits[labelled], targets[labelled].long()
    losses = torch.logsumexp(logits, dim=-1) - logits.gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    return losses.mean()
