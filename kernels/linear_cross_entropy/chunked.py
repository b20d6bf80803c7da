"""The loss in chunks of tokens, with the gradients computed in the forward pass.

With p_i = softmax(l_i), n labelled tokens and g the gradient of the loss:

    dl_iv = g/n (p_iv - [v = target_i])  (0 without a label),   dx = dl weight,   dweight = dl^T x,   dbias = sum_i dl_i

dl of a chunk is formed without the factor g/n, in place of the logits, and multiplied at once. The factor, a scalar on
the device, is applied to dx, dweight and dbias in the backward pass, so the host never waits for it. Only what passes
over the logits of a chunk differs between the backends: `softmax_gradient_` here, a kernel in `triton.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, not_saved
from subquad.kernels.float32_matmul import float32_matmul
from subquad.kernels.linear_cross_entropy.padding import padded, padded_size

CHUNK_BYTES = 256 << 20
"""Largest size of the logits of a chunk."""
CHUNK_MULTIPLE = 256
"""A chunk that is not the last has a multiple of this number of tokens, the rows of a tile in a matrix product."""

SoftmaxGradient = Callable[[Tensor, Tensor, Tensor, int, int, bool], None]
"""Function of (logits [M, P] of which the first V columns are classes, targets [M], losses [M], V, ignore_index,
gradient): writes the losses, zero without a label. With `gradient`, dl without the factor g/n replaces the logits, and
columns of padding stay finite."""


class Gradients(NamedTuple):
    """Gradients without the factor g/n; None where none is wanted. Those of weight and bias are padded."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Plan(NamedTuple):
    """Dtype, chunk size and kernel that one call computes with."""

    dtype: torch.dtype
    """Dtype of logits and products."""
    rows: int
    """Number of tokens in a chunk."""
    ignore_index: int
    softmax_gradient: SoftmaxGradient
    by_parts: Callable[..., tuple[Tensor, Tensor, Gradients]] | None = None
    """This function replaces `loss_and_gradients` and takes the same arguments; None: nothing replaces it."""


def chunk_rows(rows: int, num_classes: int, itemsize: int, limit: int = CHUNK_BYTES) -> int:
    """The number of tokens in a chunk: chunks of about one size, whose logits take at most `limit` bytes.

    limit: for rows beyond which a chunk would have fewer than CHUNK_MULTIPLE tokens, it is exceeded.
    """
    most = max(CHUNK_MULTIPLE, limit // (padded_size(num_classes) * itemsize) // CHUNK_MULTIPLE * CHUNK_MULTIPLE)
    if rows <= most:
        return rows
    even = -(-rows // -(-rows // most))
    return -(-even // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product with x is taken: that of autocast, where it is enabled, or that of x."""
    kind = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def softmax_gradient_(
    logits: Tensor, targets: Tensor, losses: Tensor, num_classes: int, ignore_index: int, gradient: bool
) -> None:
    """`SoftmaxGradient` in plain PyTorch."""
    classes = logits[:, :num_classes]
    labelled = targets != ignore_index
    index = targets.where(labelled, 0).unsqueeze(1)
    wide = classes.to(torch.promote_types(logits.dtype, torch.float32))
    normaliser = wide.logsumexp(dim=1, keepdim=True)
    losses.copy_((normaliser - wide.gather(1, index)).squeeze(1).where(labelled, 0.0))
    if gradient:
        probabilities = (wide - normaliser).exp()
        probabilities.scatter_(1, index, probabilities.gather(1, index) - 1)
        classes.copy_(probabilities.where(labelled.unsqueeze(1), 0.0))


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total += a b, or total = a b where `first`; total may be float32 where a and b are in half precision."""
    beta = 0 if first else 1
    if first and total.dtype == a.dtype == torch.float32:
        float32_matmul(a, b, out=total)
    elif a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """a b + bias; float32 matrices are multiplied on matrix units, where that is faster."""
    if a.dtype == torch.float32:
        return float32_matmul(a, b, bias, out=out)
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def loss_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: Plan, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Gradients]:
    """The loss, the number of labels n, and the gradients. wanted: of x, weight and bias.

    x [N, D] and targets [N] with N >= 1, weight [V, D], bias [V].
    """
    num_classes, wide = len(weight), torch.promote_types(plan.dtype, torch.float32)
    x, weight = x.to(plan.dtype), padded(weight, plan.dtype)
    bias = None if bias is None else padded(bias, plan.dtype)
    losses = torch.empty(len(x), dtype=wide, device=x.device)
    dx = torch.empty_like(x) if wanted[0] else None
    dweight = torch.empty_like(weight, dtype=wide) if wanted[1] else None
    dbias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
    for start in range(0, len(x), plan.rows):
        part = slice(start, start + plan.rows)
        logits = _product(x[part], weight.t(), bias)
        plan.softmax_gradient(logits, targets[part], losses[part], num_classes, plan.ignore_index, any(wanted))
        if dx is not None:
            _product(logits, weight, out=dx[part])
        if dweight is not None:
            add_product(dweight, logits.t(), x[part], first=start == 0)
        if dbias is not None:
            dbias += logits.sum(0, dtype=wide)
        # the logits of the next chunk take the same memory
        del logits
    count = (targets != plan.ignore_index).sum()
    return losses.sum() / count, count, Gradients(dx, dweight, dbias)


class LinearCrossEntropy(OnceDifferentiable):
    """(x, weight, bias, targets, plan) to the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: Plan) -> Tensor:
        run = plan.by_parts or loss_and_gradients
        loss, count, gradients = run(x, weight, bias, targets, plan, ctx.needs_input_grad[:3])
        ctx.save_for_backward(count, *gradients)
        not_saved(ctx, x, weight, bias)
        ctx.num_classes = len(weight)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        count, dx, dweight, dbias = ctx.saved_tensors
        # without any label, all gradients are zero and stay so
        factor = dloss / count.clamp(min=1)
        dweight, dbias = (None if y is None else y[: ctx.num_classes] for y in (dweight, dbias))
        scaled = [
            None if y is None else (y.to(torch.promote_types(y.dtype, dtype)) * factor).to(dtype)
            for y, dtype in zip((dx, dweight, dbias), ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def compute(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: Plan) -> Tensor:
    """The loss, with gradients where autograd records."""
    # autocast does not know meta tensors, for which launchers compute shapes
    with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):
        if needs_gradient(x, weight, bias):
            return LinearCrossEntropy.apply(x, weight, bias, targets, plan)
        return (plan.by_parts or loss_and_gradients)(x, weight, bias, targets, plan, (False, False, False))[0]


def linear_cross_entropy_chunked(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, ignore_index: int, rows: int | None = None
) -> Tensor:
    """The loss in plain PyTorch. x [N, D], targets [N]. rows: number of tokens in a chunk; None: chosen by memory."""
    dtype = product_dtype(x)
    # softmax_gradient_ holds the logits in float32 twice
    rows = rows or chunk_rows(len(x), len(weight), 8)
    return compute(x, weight, bias, targets.long(), Plan(dtype, rows, ignore_index, softmax_gradient_))
