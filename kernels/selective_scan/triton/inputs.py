"""The inputs of the scan in the layout that the kernels read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.device import interpreted, num_processors, speaks_ptx
from subquad.kernels.launch import cdiv
from subquad.kernels.layout import address
from subquad.kernels.selective_scan.triton.plan import Division, Tuning, choose_division, padded_states

MAX_STRIDE_BYTES = 2**31 - 1
"""The kernels compute the byte offset of a step with a stride of 32 bits."""

Layout = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and strides of a tensor [batch, T, D]."""
Map = tuple[torch.dtype, int | None, int | None]
"""Dtype of a map as it was given, and the strides of a batch row and of a step in words."""


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
    B, C:     dtype as given, then the strides of a batch row and of a step in 32-bit words, None for maps without time.
    packed:   whether these words are pairs of bfloat16, else they are float32.
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
        B: Map,
        C: Map,
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
        self.dtypes = B[0], C[0]
        """Dtypes of B and C as they were given."""
        self.in_time = B[2] is not None, C[2] is not None
        """Whether B and C depend on time."""
        length = shape[1]
        self.map_strides: dict[str, int | None] = dict(
            zip(("b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t"), (*B[1:], *C[1:]), strict=True)
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

    @functools.cached_property
    def _workspaces(self) -> dict[bool, tuple[int, ...]]:
        """By whether backward runs on the matrix units: floats of each tensor of `workspace`, multiples of four."""
        batch, length, width = self.shape
        division, num_states = self.backward_division, self.num_states
        segments = batch * division.splits
        ends = segments * width if division.splits > 1 else 0
        columns = self.padded * sum(self.in_time)
        parts = cdiv(width, division.block_d) * batch * length * columns
        groups = self.tuning.chunk // division.constants["STEPS"]
        floats = {}
        for matrix in (False, True):
            # numbers that a group of steps stores for each channel
            kept = groups * (self.padded + 8) if matrix else (groups - 1) * self.padded
            scratch = division.programs * division.block_d * kept
            counts = (ends * num_states, ends, segments * (num_states + 2) * width, parts, scratch)
            # every tensor begins at a multiple of 16 bytes
            floats[matrix] = tuple([cdiv(count, 4) * 4 for count in counts])
        return floats

    def workspace(self, matrix: bool) -> tuple[Tensor, ...]:
        """Empty float32 tensors of one allocation for the backward pass, without their shapes.

        ends [batch, splits, N, D] and the sums of dt over segments [batch, splits, D], both without elements where
        there is one segment; the sums over each segment [batch splits, N + 2, D]; the sums over the channels of each
        program [programs of channels, batch T, rows of B and C]; the scratch memory of the kernel of the gradients.
        """
        floats = self._workspaces[matrix]
        whole = torch.empty(sum(floats), dtype=torch.float32, device=self.device)
        # not `split`, whose results know each other as views, which takes longer
        return torch.unsafe_split_with_sizes(whole, floats)

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
    """Inputs whose maps B and C [batch, T, N] are views as words where their memory allows it, else copies.

    x, dt and z have contiguous channels (`contiguous_channels`); all that does not depend on time is contiguous.
    """
    num_states = A.shape[1]
    padded = padded_states(num_states)
    b_in_time, c_in_time = B.ndim == 3, C.ndim == 3
    packed = (
        (b_in_time or c_in_time)
        and (B.dtype == torch.bfloat16 or not b_in_time)
        and (C.dtype == torch.bfloat16 or not c_in_time)
    )
    b_words = _as_words(B, padded, packed) if b_in_time else B
    c_words = _as_words(C, padded, packed) if c_in_time else C
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
        (B.dtype, *time_strides(b_words)) if b_in_time else (B.dtype, None, None),
        (C.dtype, *time_strides(c_words)) if c_in_time else (C.dtype, None, None),
        packed,
    )
    return ScanInputs(x, dt, A, b_words, c_words, skip, z, bias, plan)


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


def time_strides(tensor: Tensor) -> tuple[int, int]:
    """Strides of a batch row and of a step of [batch, T, D], in elements.

    The stride of a single step has no meaning and may be any number, so it is taken as zero.
    """
    in_batch, in_time, _ = tensor.stride()
    return in_batch, in_time if tensor.shape[1] > 1 else 0


def _time_strides(given: Layout | None, length: int) -> tuple[int, int]:
    """`time_strides` of a tensor of this length, zeros if there is no tensor."""
    return (0, 0) if given is None else (given[1][0], given[1][1] if length > 1 else 0)
