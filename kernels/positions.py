"""Operators whose inputs are vectors [D] at every position, in heads of K channels, share this check and this cast."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from subquad.kernels.checks import check_shapes


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32 or wider. Under autocast, states, decays, step sizes and norms need this precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_positions(
    op: str, inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor], head_dim: int, *, sequence: bool
) -> None:
    """Raises ValueError unless all inputs are [.., D] as the first, all parameters [D], and head_dim divides D.

    sequence: whether the inputs must be [B, T, D].
    """
    name, first = next(iter(inputs.items()))
    wanted = "[B, T >= 1, D]" if sequence else "[..., D]"
    if first.ndim == 0 or (sequence and first.ndim != 3) or first.numel() == 0:
        raise ValueError(f"{op}: {name} must be {wanted} with at least one element, got {list(first.shape)}.")
    width = first.shape[-1]
    if head_dim < 1 or width % head_dim:
        raise ValueError(f"{op}: head_dim must divide D={width}, got {head_dim}.")
    check_shapes(op, {other: (x, tuple(first.shape)) for other, x in inputs.items()}, to_go_with=name)
    check_shapes(op, {parameter: (x, (width,)) for parameter, x in parameters.items()}, to_go_with=name)
