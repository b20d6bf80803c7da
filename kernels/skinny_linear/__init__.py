"""A linear map of few rows, with what stands before and after it in a network that decodes one token at a time.

    y = act(f(x) W^T + b) + r,     f(x) = norm(x) * silu(gate)

Norm, gate, activation act, bias b and residual r are each optional. With few rows (one for each sequence of a batch)
the time is that of reading W once, so everything else belongs into the same kernel.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import check_choice, check_shapes

__all__ = ["MAX_ROWS", "Norm", "skinny_linear", "skinny_linear_pays"]

MAX_ROWS = 64
"""Maximum number of rows of the Triton kernels."""
FEW_OUTPUTS = 2048
"""Largest number of outputs for which the kernel takes several rows; beyond it cuBLAS is faster."""

MAX_GROUP = 512
"""Maximum number of channels of a group in a norm of groups."""

Activation = Literal["gelu", "silu"]


class Norm(NamedTuple):
    """A norm of the last axis. A weight shorter than that axis is shared by groups of channels, normalised one by one.

    rms:   x / sqrt(mean(x^2) + eps) * weight
    layer: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias; one group only
    """

    kind: Literal["rms", "layer"]
    weight: Tensor
    bias: Tensor | None
    eps: float


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> Tensor:
    """y [B, N] of x [B, K] and weight [N, K], the layout of `torch.nn.Linear`.

    bias:       [N].   gate: [B, K].   residual: [B, N].
    activation: gelu is the tanh approximation.
    backend:    triton takes up to MAX_ROWS rows, norms and gates of one row only, and weights in bfloat16 or float16
                with contiguous rows. auto takes it on a CUDA device where no gradient is recorded and it is faster
                than cuBLAS, and plain PyTorch elsewhere.

    f(x) is rounded to the dtype of the weight, but not where Triton takes one row. Sums are float32 or wider. y has the
    dtype of the weight, and that of the residual where this one is wider. Raises ValueError for shapes or options that
    do not fit.
    """
    _check(x, weight, bias, norm, gate, activation, residual)
    tensors = (weight, bias, gate, residual, *(() if norm is None else (norm.weight, norm.bias)))
    obstacle = NO_GRADIENT if needs_gradient(*tensors) else _obstacle(x, weight, norm, gate)
    is_faster = len(x) == 1 or len(weight) <= FEW_OUTPUTS
    if use_triton("skinny_linear", backend, x, *tensors, obstacle=obstacle, is_faster=is_faster):
        from subquad.kernels.skinny_linear.triton import skinny_linear_triton

        with on_device_of(x):
            return skinny_linear_triton(x, weight, bias, norm=norm, gate=gate, activation=activation, residual=residual)
    with torch.autocast(x.device.type, enabled=False):
        wide = torch.promote_types(x.dtype, torch.float32)
        f = x
        if norm is not None:
            f = _normalise(x.to(wide), norm)
        if gate is not None:
            f = f * F.silu(gate.to(wide))
        y = F.linear(f.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
        if activation is not None:
            y = F.silu(y) if activation == "silu" else F.gelu(y, approximate="tanh")
        return y if residual is None else residual + y


def skinny_linear_pays(x: Tensor, weight: Tensor, norm: Norm | None = None, gate: Tensor | None = None) -> bool:
    """Whether `skinny_linear` takes these arguments on a CUDA device and is faster than cuBLAS."""
    if not x.is_cuda or x.ndim != 2 or not (len(x) == 1 or len(weight) <= FEW_OUTPUTS):
        return False
    return _obstacle(x, weight, norm, gate) is None


def _obstacle(x: Tensor, weight: Tensor, norm: Norm | None, gate: Tensor | None) -> str | None:
    """Why the Triton kernels cannot take these arguments, or None."""
    if needs_gradient(x, weight):
        return NO_GRADIENT
    if x.shape[0] > MAX_ROWS:
        return f"takes up to {MAX_ROWS} rows, got {x.shape[0]}"
    if x.shape[0] > 1 and (norm is not None or gate is not None):
        return "takes norms and gates of one row only"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"takes weights in bfloat16 or float16, got {weight.dtype}"
    if weight.stride(1) != 1:
        return "takes weights with contiguous rows"
    if norm is not None and norm.weight.shape[0] != x.shape[1]:
        size = norm.weight.shape[0]
        if size & (size - 1) or size > MAX_GROUP:
            return f"takes groups of a power of two up to {MAX_GROUP} channels, got {size}"
    return None


def _normalise(x: Tensor, norm: Norm) -> Tensor:
    size = norm.weight.shape[0]
    groups = x.unflatten(-1, (-1, size))
    weight = norm.weight.to(x.dtype)
    if norm.kind == "rms":
        return F.rms_norm(groups, (size,), weight, norm.eps).flatten(-2)
    bias = None if norm.bias is None else norm.bias.to(x.dtype)
    return F.layer_norm(groups, (size,), weight, bias, norm.eps).flatten(-2)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    gate: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
) -> None:
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"skinny_linear: x must be [B, K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}."
        )
    batch, width = x.shape
    outputs = weight.shape[0]
    wanted = {"bias": (bias, (outputs,)), "gate": (gate, (batch, width)), "residual": (residual, (batch, outputs))}
    check_shapes("skinny_linear", wanted)
    check_choice("skinny_linear", "activation", activation, (None, "gelu", "silu"))
    if norm is None:
        return
    if not 0 <= norm.eps < math.inf:
        raise ValueError(f"skinny_linear: eps of the norm must be a finite number of at least 0, got {norm.eps}.")
    size = norm.weight.numel()
    check_shapes("skinny_linear", {"weight of the norm": (norm.weight, (size,)), "its bias": (norm.bias, (size,))})
    if size == 0 or norm.kind not in ("rms", "layer") or width % size or (norm.kind == "layer" and size != width):
        raise ValueError(
            f"skinny_linear: the norm must be 'rms' over groups that divide {width} channels or 'layer' over all of "
            f"them, got {norm.kind!r} over {size}."
        )
    if norm.kind == "rms" and norm.bias is not None:
        raise ValueError("skinny_linear: an 'rms' norm has no bias.")
