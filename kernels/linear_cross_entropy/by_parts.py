"""The loss in float32 by products of float16 parts, which are made once for several products.

The equations and chunks are those of `chunked.py`, its function `loss_and_gradients`. x and the weight are split once
for all chunks. The kernel of the softmax writes the gradient of the logits as parts, in place of the logits, so that
both of its products read it without another pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.float32_matmul.parts import Parts, parts_matmul, split
from subquad.kernels.linear_cross_entropy.chunked import Gradients, Plan
from subquad.kernels.linear_cross_entropy.padding import padded

SCALE = 2.0**-14
"""Scale of the parts of elements in [-1, 1], `Parts` without one."""


def loss_and_gradients_by_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: Plan, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Gradients]:
    """The loss, the number of labels n, and the gradients. wanted: of x, weight and bias.

    x [N, D] and targets [N] with N >= 1, weight [V, D], bias [V]; a chunk has a multiple of SIDE tokens.
    """
    num_classes, weight = len(weight), padded(weight, torch.float32)
    bias = None if bias is None else padded(bias, torch.float32)
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format) if wanted[0] else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if wanted[1] else None
    dbias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
    x_parts, weight_parts = split(x.float()), split(weight)
    for start in range(0, len(x), plan.rows):
        stop = min(start + plan.rows, len(x))
        part = slice(start, stop)
        x_part = x_parts.rows(start, stop)
        logits = parts_matmul(x_part, weight_parts.t(), bias)
        plan.softmax_gradient(logits, targets[part], losses[part], num_classes, plan.ignore_index, any(wanted))
        # two float16 numbers in the place of one float32 number
        dlogits = Parts(logits.view(torch.float16).view(len(logits), 2, -1), None)
        if dx is not None:
            parts_matmul(dlogits, weight_parts, out=dx[part])
        if dweight is not None:
            parts_matmul(dlogits.t(), x_part, out=dweight, add=start > 0)
        if dbias is not None:
            dbias += dlogits.values.sum((0, 1), dtype=torch.float32) * SCALE
        # the logits of the next chunk take the same memory
        del logits, dlogits
    count = (targets != plan.ignore_index).sum()
    return losses.sum() / count, count, Gradients(dx, dweight, dbias)
