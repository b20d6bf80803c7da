"""Checks of arguments that operators share. What does not fit is refused in words that begin with the operator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Allowed = tuple[int, ...] | list[tuple[int, ...]]
"""The shape that a tensor must have, or several of which it must have one."""


def check_shapes(op: str, wanted: Mapping[str, tuple[Tensor | None, Allowed]], to_go_with: str = "") -> None:
    """Raises ValueError where a tensor that is given does not have its shape. Nothing is broadcast by accident.

    to_go_with: names the arguments that the shapes follow from.
    """
    for name, (tensor, allowed) in wanted.items():
        if tensor is None:
            continue
        # a shape is a tuple; this runs at every call, and takes the host as long as it has tensors
        if tensor.shape not in allowed if isinstance(allowed, list) else tensor.shape != allowed:
            shapes = allowed if isinstance(allowed, list) else [allowed]
            these = " or ".join(str(list(shape)) for shape in shapes)
            given = f" to go with {to_go_with}" if to_go_with else ""
            raise ValueError(f"{op}: {name} must be {these}{given}, got {list(tensor.shape)}.")


def check_choice(op: str, name: str, value: object, allowed: Sequence[str | None]) -> None:
    """Raises ValueError where an option is none of those that there are."""
    if value not in allowed:
        raise ValueError(f"{op}: {name}={value!r} is not one of {', '.join(map(repr, allowed))}.")


def check_number(op: str, name: str, value: float | None, *, above: float | None = None) -> None:
    """Raises ValueError where a number that is given is NaN or infinite, or not above a bound."""
    if value is None or (math.isfinite(value) and (above is None or value > above)):
        return
    raise ValueError(f"{op}: {name} must be a finite number{'' if above is None else f' above {above}'}, got {value}.")


def check_integers(op: str, name: str, x: Tensor) -> None:
    """Raises ValueError unless a tensor holds integers."""
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{op}: {name} must be integers, got {x.dtype}.")


def check_tensors(op: str, x: Tensor, *others: Tensor | None, beside: Sequence[object] = ()) -> None:
    """Raises ValueError where one of these is not of a floating point dtype, or is not on the device of x.

    beside: further arguments, of which those that are tensors must be on that device, whatever their dtype is.
    """
    device = x.device
    for tensor in (x, *others):
        if tensor is not None and not tensor.dtype.is_floating_point:
            raise ValueError(f"{op}: takes tensors of floating point, got {tensor.dtype}; convert it.")
    for other in (*others, *beside):
        # a kernel would take an address on another device for one of its own
        if isinstance(other, Tensor) and other.device != device:
            raise ValueError(f"{op}: needs all tensors on one device, got {x.device} and {other.device}; move them.")


def check_one_dtype(op: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raises ValueError where tensors that PyTorch multiplies with each other differ in dtype and autocast is off."""
    given = {name: x.dtype for name, x in tensors.items() if x is not None}
    device = next(x.device.type for x in tensors.values() if x is not None)
    if len(set(given.values())) == 1 or torch.is_autocast_enabled(device):
        return
    found = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
    raise ValueError(f"{op}: {', '.join(given)} must have one dtype, got {found}; convert them.")


def check_heads(op: str, q: Tensor, v: Tensor, *, is_step: bool, grouped: bool = False) -> None:
    """Raises ValueError unless q and v are [B, T >= 1, H, K >= 1] and [B, T, H, V], without T for a step.

    grouped: whether q may have fewer heads than v, of which each serves as many heads of v as every other one.
    """
    rank, leading = (3, "B, H") if is_step else (4, "B, T, H")
    if q.dim() != rank or v.dim() != rank:
        raise ValueError(
            f"{op}: q and v must be [{leading}, K] and [{leading}, V], got {list(q.shape)} and {list(v.shape)}."
        )
    groups, heads = q.shape[-2], v.shape[-2]
    if grouped and v.shape[:-2] == q.shape[:-2] and groups != heads:
        if not groups or not heads or heads % groups:
            raise ValueError(
                f"{op}: the heads of q must divide those of v, got {groups} and {heads}; give q and k as many heads as "
                "v has, or a divisor of that number."
            )
    elif v.shape[:-1] != q.shape[:-1]:
        raise ValueError(f"{op}: v must share {leading} with q {list(q.shape)}, got {list(v.shape)}.")
    if not is_step and q.shape[1] == 0:
        raise ValueError(f"{op}: needs at least one time step, got T=0.")
    if q.shape[-1] == 0:
        raise ValueError(f"{op}: needs at least one key channel, got K=0.")
