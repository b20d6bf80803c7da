"""Solves linear systems with a symmetric positive definite matrix by conjugate gradients, and differentiates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, not_saved

Product = Callable[..., Tensor]
"""(x, *operands) to A x, of the shape of x, where the matrices A are made of the operands."""


def solve(product: Product, b: Tensor, *operands: Tensor, num_steps: int) -> Tensor:
    """x with A x = b for every vector b [..., K], after `num_steps` steps from x = 0.

    In exact arithmetic K steps are enough. The gradient is that of the solution, dL/db = A^-1 dL/dx, and is found by as
    many steps, whatever their number; so nothing of the steps is kept. It cannot be differentiated again.
    """
    x = _Solve.apply(product, num_steps, b, *operands)
    assert isinstance(x, Tensor)
    return x


class _Solve(OnceDifferentiable):
    """`solve`, with L the loss:  dL/d(operands) = -(A^-1 dL/dx)^T d(A x)/d(operands)  at the solution x."""

    @staticmethod
    def forward(ctx: Any, product: Product, num_steps: int, b: Tensor, *operands: Tensor) -> Tensor:
        x = _steps(lambda p: product(p, *operands), b, num_steps)
        ctx.product, ctx.num_steps = product, num_steps
        ctx.save_for_backward(x, *operands)
        not_saved(ctx, b)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *operands = (z.detach() for z in ctx.saved_tensors)
        db = _steps(lambda p: ctx.product(p, *operands), gradient, ctx.num_steps)
        leaves = [z.requires_grad_(needed) for z, needed in zip(operands, ctx.needs_input_grad[3:], strict=True)]
        wanted = [z for z in leaves if z.requires_grad]
        found: Iterator[Tensor] = iter(())
        if wanted:
            with torch.enable_grad():
                image = ctx.product(x, *leaves)
            found = iter(torch.autograd.grad(image, wanted, -db))
        return None, None, db, *(next(found) if z.requires_grad else None for z in leaves)


def _steps(product: Callable[[Tensor], Tensor], b: Tensor, num_steps: int) -> Tensor:
    x, residual, direction = torch.zeros_like(b), b, b
    size = b.square().sum(-1, keepdim=True)
    for _ in range(num_steps):
        image = product(direction)
        length = size / _or_one((direction * image).sum(-1, keepdim=True))
        x, residual = x + length * direction, residual - length * image
        before, size = size, residual.square().sum(-1, keepdim=True)
        direction = residual + size / _or_one(before) * direction
    return x


def _or_one(x: Tensor) -> Tensor:
    """x, and one where it is zero: a vector that is solved exactly stays as it is."""
    return torch.where(x == 0, torch.ones_like(x), x)
