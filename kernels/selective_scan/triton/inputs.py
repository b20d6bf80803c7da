"""The inputs of the scan in the layout that the kernels read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.device import interpreted, speaks_ptx
from kernels.selective_scan.triton.plan import padded_states

MAX_STRIDE_BYTES = 2**31 - 1
"""The kernels compute the byte offset of a step with a stride of 32 bits."""


class MapLayout(NamedTuple):
    """Layout in which the kernels read the input map B and the output map C."""

    dtypes: tuple[torch.dtype, torch.dtype]
    """Dtypes of B and C as they were given."""
    strides: dict[str, int | None]
    """Kernel argument to a stride, of a batch row or of a step, in 32-bit words; None for a map without time."""
    constants: dict[str, bool]
    """Constexprs. PACKED: words are pairs of bfloat16. SHUFFLE: the lanes of a warp share the words of a row."""

    @property
    def in_time(self) -> tuple[bool, bool]:
        """Whether B and C depend on time."""
        return self.strides["b_stride_t"] is not None, self.strides["c_stride_t"] is not None


class ScanInputs(NamedTuple):
    """Inputs of the forward and the backward kernels."""

    x: Tensor
    """[batch, T, D], as dt and z."""
    dt: Tensor
    A: Tensor
    """[D, N]."""
    B: Tensor
    """[batch, T, words] as float32 words, zeros from state N on, or [D, N] in any dtype."""
    C: Tensor
    """The same layouts as B."""
    skip: Tensor | None
    """[D], as bias: the weight of x in y, which the paper calls D."""
    z: Tensor | None
    bias: Tensor | None
    """Added to dt."""
    layout: MapLayout
    softplus: bool

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:8]


def prepare_inputs(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
) -> ScanInputs:
    """Inputs whose maps B and C [batch, T, N] are views as words where their memory allows it, else copies.

    x, dt and z have contiguous channels (`contiguous_channels`); all that does not depend on time is contiguous.
    """
    padded = padded_states(A.shape[1])
    packed = all(m.ndim == 2 or m.dtype == torch.bfloat16 for m in (B, C)) and not B.ndim == C.ndim == 2
    b_words, c_words = (m if m.ndim == 2 else _as_words(m, padded, packed) for m in (B, C))
    b_stride_b, b_stride_t = (None, None) if B.ndim == 2 else time_strides(b_words)
    c_stride_b, c_stride_t = (None, None) if C.ndim == 2 else time_strides(c_words)
    strides = {"b_stride_b": b_stride_b, "b_stride_t": b_stride_t, "c_stride_b": c_stride_b, "c_stride_t": c_stride_t}
    # a lane finds up to 32 words of a map in one register; the interpreter follows, so that tests cover this path
    ptx = speaks_ptx()
    shuffle = (ptx or interpreted()) and padded // (2 if packed else 1) <= 32
    layout = MapLayout((B.dtype, C.dtype), strides, {"PACKED": packed, "SHUFFLE": shuffle, "PTX": ptx})
    return ScanInputs(x, dt, A, b_words, c_words, skip, z, bias, layout, softplus)


def _as_words(rows: Tensor, padded: int, packed: bool) -> Tensor:
    """[batch, T, N] as 32-bit words, contiguous in a row of `padded` states: pairs of bfloat16 if packed, else float32.

    A view where the memory of `rows` allows it, else a copy with zeros from state N on.
    """
    dtype = torch.bfloat16 if packed else torch.float32
    in_batch, in_time, _ = rows.stride()
    fits = rows.dtype == dtype and rows.shape[2] == padded and _has_contiguous_channels(rows)
    # pairs of bfloat16 begin at even offsets
    if not fits or (packed and (rows.storage_offset() | in_batch | in_time) & 1):
        copy = torch.zeros((*rows.shape[:2], padded), dtype=dtype, device=rows.device)
        copy[..., : rows.shape[2]] = rows
        rows = copy
    return rows.view(torch.float32)


def _has_contiguous_channels(tensor: Tensor) -> bool:
    """Whether the last axis of [batch, T, channels] is contiguous and a step no further away than the kernels reach."""
    _, in_time, in_width = tensor.stride()
    return in_width == 1 and in_time * tensor.element_size() <= MAX_STRIDE_BYTES


def contiguous_channels(tensor: Tensor) -> Tensor:
    """[batch, T, D] itself where the kernels can read it, else a contiguous copy."""
    return tensor if _has_contiguous_channels(tensor) else tensor.contiguous()


def time_strides(tensor: Tensor | None) -> tuple[int, int]:
    """Strides of a batch row and of a step of [batch, T, D], in elements; zeros if there is no tensor.

    The stride of a single step has no meaning and may be any number, so it is taken as zero.
    """
    if tensor is None:
        return 0, 0
    in_batch, in_time, _ = tensor.stride()
    return in_batch, in_time if tensor.shape[1] > 1 else 0
