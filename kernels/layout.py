"""Memory layout of tensors: strides for the launchers, and copies for kernels that need another layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class TensorSpec(NamedTuple):
    """All that the choice and the compilation of kernels depend on, except for the address of the tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    """The unit is elements."""
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


def address(x: Tensor | None) -> int:
    """Address of the first element in bytes, for the choice of wide loads; 0 where there is no tensor or no memory."""
    # torch warns for a fake tensor, which has none
    return 0 if x is None or isinstance(x, FakeTensor) else x.data_ptr()


@overload
def dense(x: Tensor) -> Tensor: ...
@overload
def dense(x: Tensor | None) -> Tensor | None: ...
def dense(x: Tensor | None) -> Tensor | None:
    """x itself where it is contiguous and not a lazy conjugate, else a contiguous copy of its values."""
    return x if x is None or (x.is_contiguous() and not x.is_conj()) else x.resolve_conj().contiguous()


@overload
def dense_channels(x: Tensor) -> Tensor: ...
@overload
def dense_channels(x: Tensor | None) -> Tensor | None: ...
def dense_channels(x: Tensor | None) -> Tensor | None:
    """x itself where neighbouring channels, which are its last axis, are adjacent in memory, else a contiguous copy."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def dense_rows(x: Tensor) -> Tensor:
    """x [..., F] as [R, F] with adjacent channels; copied where its rows do not follow each other at one distance."""
    return dense_channels(x.reshape(-1, x.shape[-1]))


@overload
def as_pairs(x: Tensor) -> Tensor: ...
@overload
def as_pairs(x: Tensor | None) -> Tensor | None: ...
def as_pairs(x: Tensor | None) -> Tensor | None:
    """A complex tensor as a real view with a last axis (real, imaginary), for Triton; a real tensor as it is."""
    return torch.view_as_real(x) if x is not None and x.is_complex() else x


def places_in_one(parts: Sequence[Tensor]) -> list[int] | None:
    """Returns the offset, in elements, at which each of these tensors begins in the memory that they share.

    The result is None where they do not share their memory, or where they differ in shape, strides or dtype.
    """
    first = parts[0]
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        if part.shape != first.shape or part.stride() != first.stride() or part.dtype != first.dtype:
            return None
        if part.untyped_storage().data_ptr() != memory:
            return None
    return [int(part.storage_offset()) for part in parts]


def slices_of_one(parts: Sequence[Tensor], axis: int) -> Tensor | None:
    """Returns the tensor of which these (two or more) are all slices along an axis, one behind the other, or None."""
    places = places_in_one(parts)
    if places is None:
        return None
    step = places[1] - places[0]
    if step < 1 or places != [places[0] + i * step for i in range(len(parts))]:
        return None
    first = parts[0]
    size, stride = list(first.shape), list(first.stride())
    size.insert(axis, len(parts))
    stride.insert(axis, step)
    return first.as_strided(size, stride)


def empty_in_rows(x: Tensor) -> Tensor:
    """Returns an empty tensor for the gradient of x [..., D], which has contiguous channels.

    Where x is the first part of rows that are up to half as long again, so is the result, and `whole_rows` gives its
    rows. Nothing else has their other parts, into which the gradients of what stands behind x can be written.
    """
    width, row = x.shape[-1], x.stride(-2)
    shape = (*x.shape[:-1], row)
    if not width < row < 1.5 * width or x.stride() != torch.empty(shape, device="meta").stride():
        return x.new_empty(x.shape)
    whole = x.new_empty(shape)
    part = whole[..., :width]
    part.whole_rows = whole  # type: ignore[attr-defined]
    return part


def whole_rows(x: Tensor | None) -> Tensor | None:
    """Returns the rows of which `empty_in_rows` made x a part, or None where x is no such part."""
    return getattr(x, "whole_rows", None)


def parts_of_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns the contiguous tensor of which these are all parts along the last axis, one behind the other, or None."""
    first = parts[0]
    width = sum(part.shape[-1] for part in parts)
    shape = (*first.shape[:-1], width)
    strides = torch.empty(shape, device="meta").stride()
    memory, place = first.untyped_storage().data_ptr(), int(first.storage_offset())
    for part in parts:
        if part.dtype != first.dtype or part.shape[:-1] != first.shape[:-1] or part.stride() != strides:
            return None
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != place:
            return None
        place += part.shape[-1]
    return first.as_strided(shape, strides)
