"""The rows [B_t, C_t] of the maps that depend on time: how a warp loads them and how its lanes share them.

A row consists of 32-bit words, each one float32 or, if PACKED, two bfloat16: B_WORDS words of B_t, then C_WORDS words
of C_t, WORDS in all. Every channel needs the whole row, so each lane of a warp loads a word and the others fetch it
from that lane (SHUFFLE). A register of the 32 lanes holds a part of one row, or several short rows.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.selective_scan.triton.lanes import from_lane
from subquad.kernels.selective_scan.triton.memory import at_step, load


@triton.jit
def word_pointers(p_b, p_c, o_e, B_WORDS: tl.constexpr, C_WORDS: tl.constexpr):
    """For each word of a row that this lane loads: its pointer at time 0, then the stride of a step.

    p_b, p_c: (pointer to the batch row, stride of a step) of B and C, or () for a map that does not depend on time.
    """
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
def load_words(p_held, o_e, t, t_last, WORDS: tl.constexpr, STEPS: tl.constexpr, PTX: tl.constexpr):
    """The rows of STEPS steps from t on, as registers of the 32 lanes, each with 32 / WORDS rows or a part of one.

    Steps from t_last on are replaced by the last step before it.
    """
    held = ()
    TOGETHER: tl.constexpr = (32 // WORDS if 32 // WORDS < STEPS else STEPS) if WORDS < 32 else 1
    for j in tl.static_range(0, STEPS, TOGETHER):
        o_t = tl.minimum(t + j + o_e % 32 // WORDS % TOGETHER, t_last - 1)
        for i in tl.static_range(len(p_held) // 2):
            held += (load(at_step(p_held[2 * i], o_t, p_held[2 * i + 1], PTX), PTX),)
    return held


@triton.jit
def words_at_step(
    held, p_map, t, t_last, j: tl.constexpr, o_w, FIRST: tl.constexpr,
    WORDS: tl.constexpr, STEPS: tl.constexpr, NUM: tl.constexpr, SHUFFLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Words o_w .. o_w + NUM - 1 of a map at step t + j, from the lanes that hold them if SHUFFLE, else from memory.

    held: the registers of `load_words`.   p_map: pointer to the batch row and stride of a step of this map.
    FIRST: the word of a row [B_t, C_t] at which the map starts.
    """
    words = ()
    if SHUFFLE:
        TOGETHER: tl.constexpr = (32 // WORDS if 32 // WORDS < STEPS else STEPS) if WORDS < 32 else 1
        PER_ROW: tl.constexpr = WORDS // 32 if WORDS > 32 else 1
        for n in tl.static_range(NUM):
            o_lane = j % TOGETHER * WORDS + FIRST % 32 + o_w + n
            words += (from_lane(held[j // TOGETHER * PER_ROW + FIRST // 32], o_lane, 32, PTX),)
    else:
        p_row = at_step(p_map[0], tl.minimum(t + j, t_last - 1), p_map[1], False) + o_w
        for n in tl.static_range(NUM):
            words += (load(p_row + n, PTX),)
    return words


@triton.jit
def row_at_step(
    held, p_map, t, t_last, j: tl.constexpr, o_n, FIRST: tl.constexpr, PACKED: tl.constexpr, WORDS: tl.constexpr,
    STEPS: tl.constexpr, NT: tl.constexpr, CHANNELS: tl.constexpr, SHUFFLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The NT elements of a map at step t + j for the states o_n .. of this lane, repeated for each of its channels."""
    row = ()
    if PACKED:
        words = words_at_step(held, p_map, t, t_last, j, o_n // 2, FIRST, WORDS, STEPS, NT // 2, SHUFFLE, PTX)
        for i in tl.static_range(NT // 2):
            # a bfloat16 is the upper half of the float32 with the same value
            b_word = words[i].to(tl.int32, bitcast=True)
            row += ((b_word << 16).to(tl.float32, bitcast=True), (b_word & -65536).to(tl.float32, bitcast=True))
    else:
        row = words_at_step(held, p_map, t, t_last, j, o_n, FIRST, WORDS, STEPS, NT, SHUFFLE, PTX)
    rows = ()
    for _ in tl.static_range(CHANNELS):
        rows += row
    return rows
