"""Memory layout of tensors: strides for the launchers, and copies for kernels that need another layout."""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """All that the choice and the compilation of kernels depend on, except for the address of the tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    """In elements."""
    dtype: torch.dtype
    device: torch.device


@overload
def spec(x: Tensor) -> TensorSpec: ...
@overload
def spec(x: Tensor | None) -> TensorSpec | None: ...
def spec(x: Tensor | None) -> TensorSpec | None:
    """The `TensorSpec` of x, or None where the tensor is not given. Plans are cached by the specs of the inputs."""
    # the constructor of a NamedTuple takes twice as long as that of a tuple
    return None if x is None else tuple.__new__(TensorSpec, (x.shape, x.stride(), x.dtype, x.device))


def strides(x: Tensor | None, *axes: int) -> tuple[int, ...]:
    """Strides of x along some axes, in elements; zeros where the tensor is not given."""
    if x is None:
        return (0,) * len(axes)
    stride = x.stride()
    return tuple([stride[axis] for axis in axes])


@overload
def dense(x: Tensor) -> Tensor: ...
@overload
def dense(x: Tensor | None) -> Tensor | None: ...
def dense(x: Tensor | None) -> Tensor | None:
    """x itself where it is contiguous and not a lazy conjugate, else a contiguous copy of its values."""
    return x if x is None or (x.is_contiguous() and not x.is_conj()) else x.resolve_conj().contiguous()


@overload
def as_pairs(x: Tensor) -> Tensor: ...
@overload
def as_pairs(x: Tensor | None) -> Tensor | None: ...
def as_pairs(x: Tensor | None) -> Tensor | None:
    """A complex tensor as a real view with a last axis (real, imaginary), for Triton; a real tensor as it is."""
    return torch.view_as_real(x) if x is not None and x.is_complex() else x
