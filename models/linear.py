"""Linear maps whose gradients take fewer passes over memory than those of torch, on a GPU.

Results are those of `nn.Linear`. On a CPU, in other precisions than those of the kernels, and inside `torch.compile`
they are computed by it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.backend import on_device_of, use_triton
from models.casts import as_autocast


def _on_gpu(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and use_triton("linear", "auto", x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class LinearWithBias(torch.autograd.Function):
    """(x [..., K], weight [D, K], bias [D]) to x weight^T + bias. torch's sum for the gradient of the bias is slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        from kernels.sums import row_sums

        x, weight = ctx.saved_tensors
        g = _rows(gradient)
        dx = (g @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        with on_device_of(g):
            return dx, g.t() @ _rows(x), row_sums(g)


class Linear(nn.Linear):
    """A linear map, by default with a bias."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or not torch.is_grad_enabled() or not _on_gpu(x):
            return super().forward(x)
        return LinearWithBias.apply(as_autocast(x), as_autocast(self.weight), as_autocast(self.bias))


class SplitLinear(torch.autograd.Function):
    """(x [..., K], weight [D, K], sizes) to the parts of x weight^T along the last axis.

    The gradient of `split` is a concatenation of the gradients of the parts, as large as the result. Here each of them
    enters products with its rows of the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        return F.linear(x, weight).split(sizes, dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight = None, torch.empty_like(weight)
        for gradient, part, dpart in zip(gradients, weight.split(ctx.sizes), dweight.split(ctx.sizes), strict=True):
            if gradient is None:
                dpart.zero_()
                continue
            g = _rows(gradient)
            torch.mm(g.t(), _rows(x), out=dpart)
            dx = g @ part if dx is None else dx.addmm_(g, part)
        return None if dx is None else dx.view(x.shape), dweight, None


def split_linear(linear: nn.Linear, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """linear(x) split along its last axis, without a concatenation in the backward pass. It has no bias."""
    if not _on_gpu(x):
        return linear(x).split(sizes, dim=-1)
    return SplitLinear.apply(as_autocast(x), as_autocast(linear.weight), sizes)
