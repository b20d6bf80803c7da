"""Norms over the last axis, in float32 or wider, and the norm of a sum."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from subquad.kernels.norm import GateActivation, Kind, norm
from subquad.models.parts.casts import autocast_dtype

NormKind = Literal["layer", "rms", "batch"]


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of x, or float32 where that is wider; x itself is not cast."""
    return torch.promote_types(x.dtype, torch.float32)


class BatchNorm(nn.BatchNorm1d):
    """Batch norm of x [..., D] over all positions of a batch. In training, its statistics include the future."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / std(x) * weight + bias over the last axis, in float32 or wider."""

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, kind="layer", eps=self.eps, out_dtype=_wide(x))


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last axis, in float32 or wider; heads [..., H, V] are normalised one by one."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return norm(x, self.weight, eps=self.eps, out_dtype=_wide(x))

    def before_product(
        self,
        x: Tensor,
        gate: Tensor | None = None,
        *,
        gate_activation: GateActivation = "silu",
        activation: Literal["silu"] | None = None,
        gate_first: bool = False,
        linear: Tensor | None = None,
    ) -> Tensor:
        """The norm of act(x), times silu(gate) or sigmoid(gate), rounded once; `gate_first`: the norm of the product.

        The result has the dtype of the matrix product that reads it. linear: the weight of the map behind it, whose
        result is given instead, so that the norm need not be kept.
        """
        assert self.eps is not None
        return norm(
            x,
            self.weight,
            eps=self.eps,
            gate=gate,
            gate_activation=gate_activation,
            activation=activation,
            gate_first=gate_first,
            linear=linear,
            out_dtype=autocast_dtype(x),
        )


def unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) over the last axis, computed in float32 or wider and rounded to the dtype of x."""
    return norm(x, None, kind="l2", eps=1e-6)


class HeadNorm(nn.GroupNorm):
    """(x - mean(x)) / std(x) over V of every head of x [..., H, V], times a weight [H V] plus a bias [H V]."""

    def __init__(self, num_heads: int, width: int, *, eps: float, bias: bool = True) -> None:
        super().__init__(num_heads, width, eps=eps)
        if not bias:
            self.register_parameter("bias", None)

    def forward(
        self,
        x: Tensor,
        gate: Tensor | None = None,
        *,
        gate_activation: GateActivation = "silu",
        residual: Tensor | None = None,
        skip: Tensor | None = None,
        skip_scale: Tensor | None = None,
    ) -> Tensor:
        """The norm [..., H V] of x, or of x + residual, in float32 or wider.

        skip [..., H, V] times skip_scale [..., H] is added to it. With a gate [..., H V] it is multiplied by
        silu(gate), sigmoid(gate) or the gate itself, and the product is rounded once, to the dtype of the gate.
        """
        heads = (self.num_groups, -1)
        y = norm(
            x,
            self.weight.view(heads),
            None if self.bias is None else self.bias.view(heads),
            kind="layer",
            eps=self.eps,
            residual=residual,
            gate=None if gate is None else gate.unflatten(-1, heads),
            gate_activation=gate_activation,
            skip=skip,
            skip_scale=skip_scale,
            out_dtype=_wide(x) if gate is None else gate.dtype,
        )
        return (y if isinstance(y, Tensor) else y[0]).flatten(-2)


NORM_MODULES = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.GroupNorm)


def make_norm(kind: NormKind, width: int, eps: float) -> nn.Module:
    """A norm over the last axis of [B, T, D] or [B, D]."""
    if kind == "layer":
        return LayerNorm(width, eps=eps)
    if kind == "rms":
        return RMSNorm(width, eps=eps)
    return BatchNorm(width, eps=eps)


def add_norm(
    module: nn.Module, branch: Tensor | None, residual: Tensor, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(y, x) with x = residual + branch, the residual stream, and y = module(x), both [..., D]; None adds nothing.

    out_dtype: the dtype of y; None stands for that of x, float32 at least. The sum is float32 where the residual is.
    """
    if not isinstance(module, (LayerNorm, RMSNorm)):
        x = residual if branch is None else residual + branch
        y = module(x)
        return y if out_dtype is None else y.to(out_dtype), x
    assert module.eps is not None
    bias = module.bias if isinstance(module, LayerNorm) else None
    kind: Kind = "layer" if isinstance(module, LayerNorm) else "rms"
    dtype = out_dtype or _wide(residual)
    if branch is None:
        return norm(residual, module.weight, bias, kind=kind, eps=module.eps, out_dtype=dtype), residual
    return norm(branch, module.weight, bias, kind=kind, eps=module.eps, residual=residual, out_dtype=dtype)
