"""Linear maps of a single position, joined with the norm, gate, activation and sum around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.skinny_linear import Activation, Norm, skinny_linear, skinny_linear_pays
from subquad.models.parts.casts import autocast_dtype
from subquad.models.parts.linear import shared_linears
from subquad.models.parts.norms import RMSNorm, add_norm


def fused_norm(module: nn.Module) -> Norm | None:
    """The norm as an argument of `skinny_linear`; None for a module that is none of its norms."""
    if isinstance(module, nn.RMSNorm) and module.eps is not None:
        return Norm("rms", module.weight, None, module.eps)
    if isinstance(module, nn.LayerNorm):
        return Norm("layer", module.weight, module.bias, module.eps)
    return None


def step_linear(
    linear: nn.Linear,
    x: Tensor,
    *,
    norm: nn.Module | None = None,
    gate: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + act(linear(norm(x) * silu(gate))) for x [..., D]; each part besides linear is optional.

    A norm narrower than D normalises groups of channels. On a GPU all of it is one kernel where x has one row, [1, D].
    With a few rows, norm and gate are a kernel of their own, and the sum is part of the product where that has few
    outputs. Everything else, and sequences [B, T, D], are the modules one after the other.
    """
    fused = None if norm is None else fused_norm(norm)
    if (norm is None or fused is not None) and skinny_linear_pays(x, linear.weight, fused, gate):
        return skinny_linear(
            x, linear.weight, linear.bias, norm=fused, gate=gate, activation=activation, residual=residual
        )
    if isinstance(norm, RMSNorm) and (gate is not None or norm.weight.shape[0] != x.shape[-1]):
        heads = (-1, norm.weight.shape[0])
        x = norm.before_product(x.unflatten(-1, heads), None if gate is None else gate.unflatten(-1, heads)).flatten(-2)
    else:
        x = x if norm is None else add_norm(norm, None, x, autocast_dtype(x))[0]
        x = x if gate is None else x * F.silu(gate)
    if skinny_linear_pays(x, linear.weight):
        return skinny_linear(x, linear.weight, linear.bias, activation=activation, residual=residual)
    y = linear(x)
    if activation is not None:
        y = F.silu(y) if activation == "silu" else F.gelu(y, approximate="tanh")
    return y if residual is None else residual + y


def shared_norm(norm: nn.Module | None, x: Tensor) -> tuple[Tensor, nn.Module | None]:
    """x and the norm for several `step_linear` of one norm: a single row is normalised by each of them, more here."""
    if norm is None or (x.is_cuda and len(x) == 1):
        return x, norm
    return add_norm(norm, None, x, autocast_dtype(x))[0], None


def maps_of(
    linears: Sequence[nn.Linear], x: Tensor, norm: nn.Module | None = None, *, join: bool = False
) -> list[Tensor]:
    """linear(norm(x)) for several maps: of a sequence [B, T, D] by `shared_linears`, of a position by `step_linear`."""
    if norm is None and x.ndim == 3:
        return list(shared_linears(linears, x, join=join))
    return [step_linear(linear, x, norm=norm) for linear in linears]
