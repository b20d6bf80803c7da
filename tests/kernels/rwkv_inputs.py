"""Claims about an operator `op` that prepares the inputs of RWKV-6 or RWKV-7, which the tests of both share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BACKENDS = ["torch", "triton"]


def gradients_of(op: Callable[..., Any], inputs: dict[str, Any], backend: str) -> list[Tensor]:
    """Gradients of a fixed weighted sum of all results, for all tensors; the weights rise from -1 to 1."""
    leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, Tensor)]
    results = op(**inputs, backend=backend)
    total = sum((x * torch.linspace(-1, 1, x.numel()).bfloat16().to(x).view_as(x)).sum() for x in results)
    return list(torch.autograd.grad(total, leaves))
