"""Claims about an operator `op` that prepares the inputs of RWKV-6 or RWKV-7, which the tests of both share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from suite.laws.accuracy import assert_close
from tests.kernels.gated import on_device

BACKENDS = ["torch", "triton"]


def gradients_of(op: Callable[..., Any], inputs: dict[str, Any], backend: str) -> list[Tensor]:
    """Gradients of a fixed weighted sum of all results, for all tensors; the weights rise from -1 to 1."""
    leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, Tensor)]
    results = op(**inputs, backend=backend)
    total = sum((x * torch.linspace(-1, 1, x.numel()).bfloat16().to(x).view_as(x)).sum() for x in results)
    return list(torch.autograd.grad(total, leaves))


def inputs_may_have_any_memory(op: Callable[..., Any], inputs: dict[str, Any]) -> None:
    def with_strides(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.repeat_interleave(2)[::2] if x.dim() == 1 else x.transpose(0, 1).contiguous().transpose(0, 1)

    strided = {name: with_strides(x) for name, x in inputs.items()}
    strided["v"] = torch.stack((inputs["v"], inputs["v"]), -1)[..., 1]
    for x, y in zip(op(**strided, backend="triton"), op(**inputs, backend="triton"), strict=True):
        assert torch.equal(x, y)
    # the gradients of the results come in any memory too
    for x, y in zip(gradients_of(op, strided, "triton"), gradients_of(op, inputs, "torch"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def gradients_of_results_may_have_any_memory(op: Callable[..., Any], inputs: dict[str, Any]) -> None:
    leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, Tensor)]
    # a sum gives a gradient that is one element in memory
    found = [torch.autograd.grad(sum(x.sum() for x in op(**inputs, backend=name)), leaves) for name in BACKENDS]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


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


def two_runs_are_bitwise_equal(op: Callable[..., Any], inputs: dict[str, Any]) -> None:
    runs = [[*op(**inputs, backend="triton"), *gradients_of(op, inputs, "triton")] for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def what_does_not_fit_is_refused(
    op: Callable[..., Any],
    at_position: Callable[..., Any],
    make_inputs: Callable[..., dict[str, Any]],
    of_channels: str,
) -> None:
    """of_channels: name of an argument that has one number for each channel."""
    inputs = make_inputs(1, 2, 2, 3)
    with pytest.raises(ValueError, match=r"r must be \[B, T >= 1, D\] with at least one element, got \[6\]"):
        op(**(inputs | {"r": torch.ones(6)}))
    with pytest.raises(ValueError, match=rf"{op.__name__}: w must be \[1, 2, 6\] as r, got \[1, 2, 5\]"):
        op(**(inputs | {"w": torch.ones(1, 2, 5)}))
    with pytest.raises(ValueError, match=rf"{op.__name__}: {of_channels} must be \[6\], got \[2, 3\]"):
        op(**(inputs | {of_channels: torch.ones(2, 3)}))
    with pytest.raises(ValueError, match=rf"{at_position.__name__}: head_dim must divide D=6, got 4"):
        at_position(**(inputs | {"head_dim": 4}))
    with pytest.raises(ValueError, match=r"takes float32, bfloat16 and float16, got torch\.float64"):
        op(**inputs, backend="triton")
    with pytest.raises(ValueError, match="takes K up to 256, got K=300"):
        op(**on_device(make_inputs(1, 1, 1, 300)), backend="triton")
