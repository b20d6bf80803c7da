"""The unit as its equation says; equation and source are in the package docstring."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu_reference(x: Tensor, weight: Tensor | None = None, *, up: Tensor | None = None) -> Tensor:
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    y = gate * torch.sigmoid(gate) * up
    return y if weight is None else y @ weight.t()
