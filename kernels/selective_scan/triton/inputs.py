"""The inputs of the scan in the layout that the kernels read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.device import interpreted, num_processors, speaks_ptx
from subquad.kernels.layout import address, dense
from subquad.kernels.selective_scan.triton.plan import Division, Tuning, choose_division, padded_states

MAX_STRIDE_BYTES = 2**31 - 1
"""The kernels compute the byte offset of a step with a stride of 32 bits."""

Layout = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and strides of a tensor [batch, T, D]."""
MapStrides = tuple[int, int] | None
"""Strides of a batch row and of a step in 32-bit words; None for a map that does not depend on time."""

MAX_NARROW_WIDTH = 32
"""Largest width that is kept from the kernels on the matrix units; above it, their gradients take four warps or more.

128 threads store a group of eight rows of B and C in shared memory, so two warps would leave half of it unwritten.
"""


class Plan:
    """The division into programs that calls of equal shapes, strides, dtypes and device share.

    tuning:   choices of the launchers.   softplus: whether step sizes go through softplus.
    negative: whether the factor of the state is 2 exp(dt A) - 1.
    aligned:  whether x, dt and z begin at multiples of 4 bytes.
    device:   of all tensors.   shape: of x.   num_states: N.
    x, dt, z: dtype and strides of each; z may be None.
    packed:   whether the words of B and C are pairs of bfloat16, else they are float32.
    """

    def __init__(
        self,
        tuning: Tuning,
        softplus: bool,
        negative: bool,
        aligned: bool,
        device: torch.device,
        shape: Sequence[int],
        num_states: int,
        x: Layout,
        dt: Layout,
        z: Layout | None,
        B: MapStrides,
        C: MapStrides,
        packed: bool,
    ) -> None:
        self.tuning, self.softplus, self.negative, self.device, self.shape, self.num_states = (
            tuning,
            softplus,
            negative,
            device,
            shape,
            num_states,
        )
        self.in_time = B is not None, C is not None
        """Whether B and C depend on time."""
        length, none = shape[1], (None, None)
        self.map_strides: dict[str, int | None] = dict(
            zip(("b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t"), (*(B or none), *(C or none)), strict=True)
        )
        self.strides = {
            f"{name}_stride_{axis}": stride
            for name, given in (("x", x), ("dt", dt), ("z", z))
            for axis, stride in zip("bt", _time_strides(given, length), strict=True)
        }
        self.padded = padded_states(num_states)
        # a lane finds up to 32 words of a map in one register; the interpreter follows, so that tests cover this path
        ptx = speaks_ptx()
        shuffle = (ptx or interpreted()) and self.padded // (2 if packed else 1) <= 32
        self.map_constants: dict[str, Any] = {"PACKED": packed, "SHUFFLE": shuffle, "PTX": ptx}
        """Constexprs. PACKED: words are pairs of bfloat16. SHUFFLE: the lanes of a warp share the words of a row."""
        narrow = all(given is None or given[0] == torch.bfloat16 for given in (x, dt, z))
        even = not any(stride & 1 for stride in (shape[2], *self.strides.values()))
        self.matrix = (
            tuning.matrix
            and not negative
            and ptx
            and packed
            and all(self.in_time)
            and narrow
            and aligned
            and even
            and z is not None
            and 8 < num_states <= 16
            and shape[2] > MAX_NARROW_WIDTH
        )
        """Whether the kernels on the matrix units (`matrix.py`) can read the inputs."""
        choose = functools.partial(choose_division, shape, num_states, num_processors(device), tuning=tuning)
        gated = tuning.forward_matrix if self.matrix else tuning.forward
        wide = gated if z is not None else tuning.forward_segments
        backward = tuning.backward if ptx else tuning.backward_portable
        if negative:
            # the factor over a segment is no exponential of the sum of its step sizes, so time is not cut
            self.forward_division, self.backward_division = choose(wide, splits=1), choose(backward, splits=1)
        else:
            self.forward_division = choose(wide, tuning.forward_narrow, tuning.forward_segments)
            self.backward_division = choose(backward)
        self.ends_division = choose(tuning.backward_ends, splits=self.backward_division.splits)

    def sizes(self, division: Division, *names: str) -> dict[str, Any]:
        """The sizes of a division and the strides of B, C and the named inputs, as arguments of a launch."""
        _, length, width = self.shape
        return {
            "T": length, "D": width, "segment": division.segment, "splits": division.splits, **self.map_strides,
            **{key: self.strides[key] for name in names for key in (f"{name}_stride_b", f"{name}_stride_t")},
        }  # fmt: skip


kept_plan = functools.lru_cache(256)(Plan)
"""The `Plan` of equal calls, since making one takes longer than a short kernel runs. The plans of its launches are
kept by its identity."""


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
    plan: Plan

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
    negative: bool,
    tuning: Tuning,
) -> ScanInputs:
    """Inputs for the kernels, with the plan of such inputs.

    x, dt and z have contiguous channels (`contiguous_channels`), B and C come from `readable_maps`, and all that does
    not depend on time is contiguous.
    """
    num_states = A.shape[1]
    b_words, c_words = words(B), words(C)
    addresses = address(x) | address(dt) | address(z)
    # meta tensors stand for several GPUs (`suite.bench.compile`), and each has plans of its own
    plan = (Plan if x.is_meta else kept_plan)(
        tuning,
        softplus,
        negative,
        not addresses & 3,
        x.device,
        x.shape,
        num_states,
        (x.dtype, x.stride()),
        (dt.dtype, dt.stride()),
        None if z is None else (z.dtype, z.stride()),
        time_strides(b_words) if B.ndim == 3 else None,
        time_strides(c_words) if C.ndim == 3 else None,
        _packed(B, C),
    )
    return ScanInputs(x, dt, A, b_words, c_words, skip, z, bias, plan)


def words(rows: Tensor) -> Tensor:
    """A map of `readable_maps` as the kernels read it: [batch, T, words] in float32, [D, N] as it is."""
    return rows.view(torch.float32) if rows.ndim == 3 else rows


def _packed(B: Tensor, C: Tensor) -> bool:
    """Whether the maps that depend on time, of which there is one, are read as pairs of bfloat16."""
    in_time = [m.dtype for m in (B, C) if m.ndim == 3]
    return bool(in_time) and all(dtype == torch.bfloat16 for dtype in in_time)


def readable_maps(B: Tensor, C: Tensor, num_states: int) -> tuple[Tensor, Tensor]:
    """B and C [batch, T, N] as they can be viewed as 32-bit words, pairs of bfloat16 or else float32, or contiguous.

    A row has `padded_states`. Where the memory of a map does not allow that, it is a copy with zeros from state N on.
    """
    padded, packed = padded_states(num_states), _packed(B, C)
    b, c = (_readable(m, padded, packed) if m.ndim == 3 else dense(m) for m in (B, C))
    return b, c


def _readable(rows: Tensor, padded: int, packed: bool) -> Tensor:
    dtype = torch.bfloat16 if packed else torch.float32
    in_batch, in_time, _ = rows.stride()
    fits = rows.dtype == dtype and rows.shape[2] == padded and _has_contiguous_channels(rows)
    # pairs of bfloat16 begin at even offsets
    if fits and not (packed and (rows.storage_offset() | in_batch | in_time) & 1):
        return rows
    copy = torch.zeros((*rows.shape[:2], padded), dtype=dtype, device=rows.device)
    copy[..., : rows.shape[2]] = rows
    return copy


def _has_contiguous_channels(tensor: Tensor) -> bool:
    """Whether the last axis of [batch, T, channels] is contiguous and a step no further away than the kernels reach."""
    _, in_time, in_width = tensor.stride()
    return in_width == 1 and in_time * tensor.element_size() <= MAX_STRIDE_BYTES


def contiguous_channels(tensor: Tensor) -> Tensor:
    """[batch, T, D] itself where the kernels can read it, else a contiguous copy."""
    return tensor if _has_contiguous_channels(tensor) else tensor.contiguous()


def time_strides(tensor: Tensor) -> tuple[int, int]:
    """Strides of a batch row and of a step of [batch, T, D], in elements.

    The stride of a single step has no meaning and may be any number, so it is taken as zero.
    """
    in_batch, in_time, _ = tensor.stride()
    return in_batch, in_time if tensor.shape[1] > 1 else 0


def _time_strides(given: Layout | None, length: int) -> tuple[int, int]:
    """`time_strides` of a tensor of this length, zeros if there is no tensor."""
    return (0, 0) if given is None else (given[1][0], given[1][1] if length > 1 else 0)
