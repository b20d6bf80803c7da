"""Comparison of a mixer on the Triton kernels with the same mixer on plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from subquad.suite.laws.accuracy import assert_close


def kernels_equal_plain_pytorch(mixer: nn.Module, batch_size: int, choose: Callable[[str], None]) -> None:
    """Output and gradients of a mixer of width 24, by the rule of `suite.laws.accuracy`.

    choose: makes an operator of the mixer run on a backend, `torch` or `triton`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(batch_size, 9, 24, generator=torch.Generator().manual_seed(0)).to(device)

    def results(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        choose(backend)
        mixer.to(device, dtype)
        inputs = x.to(dtype).requires_grad_()
        y = mixer(inputs)
        return [y, *torch.autograd.grad(y.square().sum(), [inputs, *mixer.parameters()])]

    plain, actual = results("torch", torch.float32), results("triton", torch.float32)
    # float32 weights are exact in float64
    exact = results("torch", torch.float64)
    for index, (a, e, p) in enumerate(zip(actual, exact, plain, strict=True)):
        assert_close(a, e, torch.float32, plain=p, what=f"result {index}")
