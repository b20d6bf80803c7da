"""The rows [B_t, C_t]: the layout in which the kernels read them, and how the lanes of a warp share them."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import speaks_ptx
from kernels.selective_scan.triton.lanes import _from_lane
from kernels.selective_scan.triton.memory import _at, _load1
from kernels.selective_scan.triton.plan import _strides


@triton.jit
def _hold(p_b, p_c, o_e, B_WORDS: tl.constexpr, C_WORDS: tl.constexpr):
    """Which words of a row [B_t, C_t] a lane holds: (pointer at step 0, stride of a step) of each."""
    WORDS: tl.constexpr = B_WORDS + C_WORDS
    held = ()
    for i in tl.static_range(WORDS // 32 if WORDS > 32 else 1):
        o_w = o_e % (WORDS if WORDS < 32 else 32) + i * 32
        if C_WORDS == 0:
            held += (p_b[0] + o_w, p_b[1] + 0 * o_w)
        elif B_WORDS == 0:
            held += (p_c[0] + o_w, p_c[1] + 0 * o_w)
        else:
            m_b = o_w < B_WORDS
            held += (tl.where(m_b, p_b[0] + o_w, p_c[0] + (o_w - B_WORDS)), tl.where(m_b, p_b[1], p_c[1]))
    return held


@triton.jit
def _load_held(p_held, o_e, t, t_last, WORDS: tl.constexpr, STEPS: tl.constexpr, PTX: tl.constexpr):
    """The rows of STEPS steps from t on, a word in each lane of a warp: of one row, or of 32 / WORDS rows together."""
    held = ()
    TOGETHER: tl.constexpr = (32 // WORDS if 32 // WORDS < STEPS else STEPS) if WORDS < 32 else 1
    for j in tl.static_range(0, STEPS, TOGETHER):
        o_t = tl.minimum(t + j + o_e % 32 // WORDS % TOGETHER, t_last - 1)
        for i in tl.static_range(len(p_held) // 2):
            held += (_load1(_at(p_held[2 * i], o_t, p_held[2 * i + 1], PTX), PTX),)
    return held


@triton.jit
def _words(
    held, p_map, t, t_last, j: tl.constexpr, o_w, FIRST: tl.constexpr,
    WORDS: tl.constexpr, STEPS: tl.constexpr, NUM: tl.constexpr, SHUFFLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Words o_w .. o_w + NUM - 1 of a map at step t + j: from lanes that hold them behind FIRST, or from memory."""
    words = ()
    if SHUFFLE:
        TOGETHER: tl.constexpr = (32 // WORDS if 32 // WORDS < STEPS else STEPS) if WORDS < 32 else 1
        PER_ROW: tl.constexpr = WORDS // 32 if WORDS > 32 else 1
        for n in tl.static_range(NUM):
            o_lane = j % TOGETHER * WORDS + FIRST % 32 + o_w + n
            words += (_from_lane(held[j // TOGETHER * PER_ROW + FIRST // 32], o_lane, 32, PTX),)
    else:
        p_row = _at(p_map[0], tl.minimum(t + j, t_last - 1), p_map[1], False) + o_w
        for n in tl.static_range(NUM):
            words += (_load1(p_row + n, PTX),)
    return words


@triton.jit
def _row(
    held, p_map, t, t_last, j: tl.constexpr, o_n, FIRST: tl.constexpr, PACKED: tl.constexpr, WORDS: tl.constexpr,
    STEPS: tl.constexpr, NT: tl.constexpr, CHANNELS: tl.constexpr, SHUFFLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The numbers of a map at step t + j that belong to this lane's states, once for each channel."""
    row = ()
    if PACKED:
        words = _words(held, p_map, t, t_last, j, o_n // 2, FIRST, WORDS, STEPS, NT // 2, SHUFFLE, PTX)
        for i in tl.static_range(NT // 2):
            # a bfloat16 is the upper half of its float32
            b_word = words[i].to(tl.int32, bitcast=True)
            row += ((b_word << 16).to(tl.float32, bitcast=True), (b_word & -65536).to(tl.float32, bitcast=True))
    else:
        row = _words(held, p_map, t, t_last, j, o_n, FIRST, WORDS, STEPS, NT, SHUFFLE, PTX)
    rows = ()
    for _ in tl.static_range(CHANNELS):
        rows += row
    return rows


class Maps(NamedTuple):
    """B and C as the kernels read them."""

    B: Tensor
    C: Tensor
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of B and C as they were given."""
    strides: tuple[int | None, ...]
    """Of a batch row and of a step, in words, of B and of C; None where they do not depend on time."""
    constants: dict[str, bool]

    @property
    def in_time(self) -> tuple[bool, bool]:
        return self.strides[1] is not None, self.strides[3] is not None


def _maps(B: Tensor, C: Tensor, padded: int) -> Maps:
    ptx = speaks_ptx()
    packed = all(m.ndim == 2 or m.dtype == torch.bfloat16 for m in (B, C)) and not B.ndim == C.ndim == 2
    b, c = (m if m.ndim == 2 else _words_of(m, padded, packed) for m in (B, C))
    b_strides, c_strides = ((None, None) if m.ndim == 2 else _strides(m) for m in (b, c))
    # up to 32 a lane finds its words of a map in one register; the interpreter, which has no lanes, plays along
    shuffle = (ptx or triton.knobs.runtime.interpret) and padded // (2 if packed else 1) <= 32
    return Maps(b, c, (B.dtype, C.dtype), (*b_strides, *c_strides), {"PACKED": packed, "SHUFFLE": shuffle, "PTX": ptx})


def _words_of(m: Tensor, padded: int, packed: bool) -> Tensor:
    """[B, T, N] as 32-bit words behind each other, without a copy where it can be."""
    dtype = torch.bfloat16 if packed else torch.float32
    fits = m.dtype == dtype and m.shape[2] == padded and m.stride(2) == 1 and m.stride(1) * m.element_size() < 2**31
    if not fits or (packed and any(i % 2 for i in (m.storage_offset(), m.stride(0), m.stride(1)))):
        rows = torch.zeros((*m.shape[:2], padded), dtype=dtype, device=m.device)
        rows[..., : m.shape[2]] = m
        m = rows
    return m.view(torch.float32)
