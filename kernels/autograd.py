"""Helpers of the operators' `torch.autograd.Function`s: whether a gradient is recorded, and saved tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed from these tensors; None stands for an input that is not given."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """`torch.autograd.function.once_differentiable`, which costs the host nothing where no gradient is recorded.

    Gradients of gradients are refused with an error. Only then is backward called while gradients are recorded.
    """
    refusing: Callable[..., Gradients] = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def either(ctx: Any, *gradients: Tensor | None) -> Gradients:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return either


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """`ctx.save_for_backward(*tensors)` for kernels that rely on the strides of what they read; see `saved`."""
    ctx.save_for_backward(*tensors)
    ctx.saved_strides = [None if x is None else x.stride() for x in tensors]


def saved(ctx: Any) -> list[Any]:
    """The tensors of `save` with their original strides, which a saved-tensor hook may have changed."""
    tensors = list(ctx.saved_tensors)
    if [None if x is None else x.stride() for x in tensors] == ctx.saved_strides:
        return tensors
    return [
        x if x is None else _with_strides(x, strides) for x, strides in zip(tensors, ctx.saved_strides, strict=True)
    ]


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.stride() == strides:
        return x
    # an expanded axis has stride 0 and one element in memory
    once = x[tuple(slice(1) if stride == 0 else slice(None) for stride in strides)]
    return torch.empty_strided(once.shape, strides, dtype=x.dtype, device=x.device).copy_(once).expand(x.shape)
