"""Claims about an operator `op` that prepares the inputs of RWKV-6 or RWKV-7, which the tests of both share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.suite.laws.accuracy import assert_close
from tests.kernels.gated import on_device

BACKENDS = ["torch", "triton"]


def gradients_of(op: Callable[..., Any], inputs: dict[str, Any], backend: str) -> list[Tensor]:
    """Gradients of a fixed weighted sum of all results, for all tensors; the weights rise from -1 to 1."""
    leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, Tensor)]
    results = op(**inputs, backend=backend)
    total = sum((x * torch.linspace(-1, 1, x.numel()).bfloat16().to(x).view_as(x)).sum() for x in results)
    return list(torch.autograd.grad(total, leaves))


def kernels_equal_plain_pytorch(op: Callable[..., Any], inputs: dict[str, Any], dtype: torch.dtype) -> None:
    """Against plain PyTorch in double precision, by the rule of `suite.laws.accuracy`."""
    exact_inputs = on_device(inputs, torch.float64)
    exact, plain = (op(**given, backend="torch") for given in (exact_inputs, inputs))
    for name, a, e, p in zip(exact._fields, op(**inputs, backend="triton"), exact, plain, strict=True):
        assert_close(a, e, dtype, plain=p, what=name)
    names = [name for name, x in inputs.items() if isinstance(x, Tensor)]
    exact_gradients = gradients_of(op, exact_inputs, "torch")
    plain_gradients, found = gradients_of(op, inputs, "torch"), gradients_of(op, inputs, "triton")
    for name, a, e, p in zip(names, found, exact_gradients, plain_gradients, strict=True):
        assert_close(a, e, dtype, plain=p, what=f"gradient of {name}")
