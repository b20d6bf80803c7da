"""Readout and loss in one operator, so that no tensor holds the logits of all tokens.

    loss = 1/n sum over labelled tokens i of (log sum_v exp(l_iv) - l_{i, target_i}),   l_i = weight x_i + bias

n is the number of labelled tokens. In this folder V is the number of classes, P the same with padding, N the number of
tokens and M that of a chunk. The loss is what `cross_entropy(linear(x, weight, bias).float(), targets)` computes, in
chunks of tokens: the logits of a chunk are overwritten with their gradient, which is multiplied into the gradients of
x and weight at once. Source: the chunks, and the gradient in the forward pass, are those of
mgmalek/efficient_cross_entropy and of Liger-Kernel (Hsu et al. 2024, section 3.2).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import check_integers, check_shapes
from subquad.kernels.linear_cross_entropy.chunked import linear_cross_entropy_chunked, product_dtype
from subquad.kernels.linear_cross_entropy.padding import aligned_linear
from subquad.kernels.operations import counted

__all__ = ["aligned_linear", "linear_cross_entropy"]

MIN_LOGITS = 1 << 22
"""Number of logits from which the operator should be faster than plain PyTorch. This is an estimate: the passes that
PyTorch makes over so many logits take longer than the launches that the operator adds. Measured from 2^26 on."""
PLAIN_BYTES = 256 << 20
"""Largest size of the logits that PyTorch's path does not cut into chunks."""


@counted("linear_cross_entropy")
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """The mean loss of this module, a scalar of at least float32.

    x [..., D] and integer targets [...], weight [V, D], bias [V]. A token whose target is `ignore_index` has no label.
    Without any label the loss is NaN and the gradients are zero. As in PyTorch, targets lie in 0 .. V - 1 otherwise;
    on the Triton path a target outside of that makes the loss NaN. Products are taken in the dtype of x, or in that of
    autocast, and are rounded to it; exponentials and sums are float32 at least. A gradient of the loss has a gradient
    of its own only where the logits were small enough to be kept. Raises ValueError for shapes that do not fit.
    """
    _check(x, weight, targets, bias)
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    num_logits = len(x) * len(weight)
    obstacle = None if len(x) else "needs at least one token"
    if compiled := torch.compiler.is_compiling():
        # the compiler fuses the plain computation, and cannot trace launches
        backend = "torch"
    options: dict[str, Any] = {"obstacle": obstacle, "is_faster": num_logits >= MIN_LOGITS}
    if use_triton("linear_cross_entropy", backend, x, weight, bias, beside=(targets,), **options):
        from subquad.kernels.linear_cross_entropy.triton import linear_cross_entropy_triton

        with on_device_of(x):
            return linear_cross_entropy_triton(x, weight, targets, bias, ignore_index)
    if num_logits * x.element_size() > PLAIN_BYTES and not compiled:
        return linear_cross_entropy_chunked(x, weight, targets, bias, ignore_index)
    return _plain(x, weight, targets, bias, ignore_index)


def _plain(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, ignore_index: int) -> Tensor:
    dtype = product_dtype(x)
    logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.long(), ignore_index=ignore_index)


def _check(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if x.shape[:-1] != targets.shape:
        raise ValueError(
            f"linear_cross_entropy: x is [..., D] and targets [...], got {list(x.shape)} and {list(targets.shape)}."
        )
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"linear_cross_entropy: weight must be [V, D] with D={x.shape[-1]}, got {list(weight.shape)}.")
    check_shapes("linear_cross_entropy", {"bias": (bias, (len(weight),))})
    check_integers("linear_cross_entropy", "targets", targets)
