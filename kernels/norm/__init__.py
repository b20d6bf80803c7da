"""Layer norm, RMS norm and the Euclidean norm over the last axis, with a residual add before and a gate behind.

s = x + residual,   u = act(s)                        or, with gate_first, u = act(s) * h(gate) and no gate behind
y = ((u - m) / sqrt(v + eps) * weight + bias + skip_scale skip) * h(gate),   and with a linear map y linear^T

layer: m and v are mean and variance of the D elements of u (Ba et al. 2016, equation 4);   rms: m = 0 and v is the mean
of u^2 (Zhang & Sennrich 2019, equation 4);   l2: m = 0 and v is the sum of u^2, so that y has length one, as queries
and keys of the delta rule have (Yang et al. 2024). act is the identity or silu. Without a residual s = x, without a
weight or a gate its factor is one. h is silu, as in RetNet (Sun et al. 2023, equation 8), sigmoid, as in mLSTM (Beck et
al. 2024, section 2.3), or the identity, as in RWKV-7 (Peng et al. 2025, section 4), where the values of a position are
added behind the norm, with a factor for every head (skip). The heads of a mixer may have a weight and a bias each, as
in a group norm.
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import check_choice, check_shapes
from subquad.kernels.norm.chunked import in_rows, norm_chunked

__all__ = ["GateActivation", "Kind", "norm"]

Kind = Literal["layer", "rms", "l2"]
GateActivation = Literal["silu", "sigmoid", "identity"]
MAX_WIDTH = 8192
"""Maximum D of the Triton kernels, which hold whole rows in registers."""


@overload
def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, kind: Kind = "rms", eps: float = 1e-5,
    residual: None = None, gate: Tensor | None = None, gate_activation: GateActivation = "silu",
    activation: Literal["silu"] | None = None, skip: Tensor | None = None, skip_scale: Tensor | None = None,
    gate_first: bool = False, linear: Tensor | None = None, out_dtype: torch.dtype | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, kind: Kind = "rms", eps: float = 1e-5,
    residual: Tensor, gate: Tensor | None = None, gate_activation: GateActivation = "silu",
    activation: Literal["silu"] | None = None, skip: Tensor | None = None, skip_scale: Tensor | None = None,
    gate_first: bool = False, linear: None = None, out_dtype: torch.dtype | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    kind: Kind = "rms",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_activation: GateActivation = "silu",
    activation: Literal["silu"] | None = None,
    skip: Tensor | None = None,
    skip_scale: Tensor | None = None,
    gate_first: bool = False,
    linear: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of this module. x, residual and gate [..., D], weight and bias [D] or None; a bias needs a weight.

    weight, bias: [H, D] for x [..., H, D] has a row for each head. The bias has the shape of the weight.
    skip, skip_scale: [..., D] and [...], a factor for each row.
    gate_first: u = act(s) * h(gate) is normalised, and nothing is gated behind, as in Mamba-2.
    linear: [O, D], or [O, H D] for x [..., H, D], a linear map of y in its dtype. The result is y linear^T [..., O].
        It excludes a residual.

    Returns y, and (y, s) where a residual is given. y has the dtype `out_dtype`, by default that of x; s has the dtype
    to which torch promotes x + residual, so that a residual stream in float32 stays there. Sums and statistics are
    float32 at least, also for half-precision x and under autocast.

    backend: the Triton path takes D up to 8192; it copies x, residual and skip unless they are contiguous. `auto` takes
             it on a GPU, but not inside `torch.compile`, which fuses the plain form. In front of a linear map it keeps
             no y: the gradient of the map reads it, and it is computed again with the gradient of x. Both are
             deterministic.

    Raises ValueError for shapes or options that do not fit.
    """
    _check(x, weight, bias, kind, eps, residual, gate, gate_activation, activation, skip, skip_scale, gate_first)
    out_dtype = out_dtype or x.dtype
    _check_linear(x, residual, linear, out_dtype)
    obstacle = f"takes D up to {MAX_WIDTH}, got D={x.shape[-1]}" if x.shape[-1] > MAX_WIDTH else None
    others, pays = (weight, bias, residual, gate, skip, skip_scale, linear), not torch.compiler.is_compiling()
    if use_triton("norm", backend, x, *others, obstacle=obstacle, is_faster=pays):
        from subquad.kernels.norm.triton import Factors, Options, norm_triton

        options = Options(kind, eps, gate_activation, activation, gate_first, out_dtype)
        with on_device_of(x):
            return norm_triton(x, residual, Factors(weight, bias, gate, skip, skip_scale), options, linear)
    y = norm_chunked(
        x,
        weight,
        bias,
        kind=kind,
        eps=eps,
        residual=residual,
        gate=gate,
        gate_activation=gate_activation,
        activation=activation,
        skip=skip,
        skip_scale=skip_scale,
        gate_first=gate_first,
        out_dtype=out_dtype,
    )
    if linear is None or isinstance(y, tuple):
        return y
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(in_rows(y, linear), linear)


def _check_linear(x: Tensor, residual: Tensor | None, linear: Tensor | None, dtype: torch.dtype) -> None:
    if linear is None:
        return
    widths = x.shape[-1], math.prod(x.shape[-2:])
    if linear.ndim != 2 or linear.shape[1] not in widths or linear.dtype != dtype:
        raise ValueError(
            f"norm: linear must be [O, {widths[0]}] or [O, {widths[1]}] in the dtype of y, {dtype}, got "
            f"{list(linear.shape)} in {linear.dtype}."
        )
    if residual is not None:
        raise ValueError("norm: linear excludes a residual, whose sum is a second result; leave one of both out.")


def _check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    residual: Tensor | None,
    gate: Tensor | None,
    gate_activation: str,
    activation: str | None,
    skip: Tensor | None,
    skip_scale: Tensor | None,
    gate_first: bool,
) -> None:
    if x.ndim == 0 or x.numel() == 0:
        raise ValueError(f"norm: x must be [..., D] with at least one element, got {list(x.shape)}.")
    if weight is None and bias is not None:
        raise ValueError("norm: a bias needs a weight.")
    if weight is not None and weight.shape not in (x.shape[-1:], x.shape[-2:]):
        heads = f" or {list(x.shape[-2:])}, a row for each head" if x.ndim > 1 else ""
        raise ValueError(f"norm: weight must be {list(x.shape[-1:])}{heads}, got {list(weight.shape)}.")
    if weight is not None:
        check_shapes("norm", {"bias": (bias, tuple(weight.shape))}, to_go_with="the weight")
    shape = tuple(x.shape)
    beside = {"residual": (residual, shape), "gate": (gate, shape), "skip": (skip, shape)}
    check_shapes("norm", {**beside, "skip_scale": (skip_scale, shape[:-1])}, to_go_with="x")
    if gate_first and gate is None:
        raise ValueError("norm: gate_first needs a gate; give one or leave gate_first out.")
    if (skip is None) != (skip_scale is None):
        raise ValueError("norm: skip and skip_scale go together; give both or none of them.")
    check_choice("norm", "kind", kind, ("layer", "rms", "l2"))
    check_choice("norm", "gate_activation", gate_activation, ("silu", "sigmoid", "identity"))
    check_choice("norm", "activation", activation, (None, "silu"))
    if not 0 <= eps < math.inf:
        raise ValueError(f"norm: eps must be a finite number of at least 0, got {eps}.")
