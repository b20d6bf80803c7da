"""Arithmetic and loads that the kernels of WKV share; a state is a tuple (a, b, p) of tensors [BLOCK_D]."""

# Triton lets a name change its type while it traces
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

EMPTY: tl.constexpr = tl.constexpr(-1e38)


@triton.jit
def exp(b_x, PTX: tl.constexpr):
    """exp(x), to a rounding where the GPU is NVIDIA's."""
    return libdevice.exp(b_x) if PTX else tl.exp(b_x)


@triton.jit
def add(state, a, b, p, b_decay, PTX: tl.constexpr):
    """exp(decay) times a state, plus the state (a, b, p)."""
    b_scale = tl.maximum(state[2] + b_decay, p)
    b_past, b_present = exp(state[2] + b_decay - b_scale, PTX), exp(p - b_scale, PTX)
    return b_past * state[0] + b_present * a, b_past * state[1] + b_present * b, b_scale


@triton.jit
def settle(state, b_first, b_decay, STEPS: tl.constexpr):
    """The state after STEPS times `add` from one of scale b_first, whose scale is rounded once where none was larger.

    The same decay is rounded the same way each time, so that a scale to which it is added over and over moves away by
    up to half of its last digit a step, in one direction. Where a and b were only carried on, they belong to the exact
    sum.
    """
    b_added = b_first
    for _ in tl.static_range(STEPS):
        b_added += b_decay
    return state[0], state[1], tl.where(state[2] == b_added, b_first + STEPS * b_decay, state[2])


@triton.jit
def empty(BLOCK_D: tl.constexpr):
    """The state before the first step."""
    b_zero = tl.zeros([BLOCK_D], tl.float32)
    return b_zero, b_zero, b_zero + EMPTY


@triton.jit
def load_state(p, D, o_d, m_d):
    """A state [3, D]."""
    return (
        tl.load(p + o_d, mask=m_d, other=0.0).to(tl.float32),
        tl.load(p + D + o_d, mask=m_d, other=0.0).to(tl.float32),
        tl.load(p + 2 * D + o_d, mask=m_d, other=EMPTY).to(tl.float32),
    )


@triton.jit
def store_state(p, state, D, o_d, m_d):
    """The inverse of `load_state`."""
    for i in tl.static_range(3):
        tl.store(p + i * D + o_d, state[i], mask=m_d)


@triton.jit
def fold(state, p_ends, D, o_d, m_d, b_w, T, segment, splits, i_s, REVERSE: tl.constexpr, PTX: tl.constexpr):
    """The state before segment i_s of a batch row, or with REVERSE the gradients behind it, from those of the row.

    p_ends: [splits, 3, D], for each segment what it adds from an empty state.
    """
    for i in range(splits - 1 - i_s if REVERSE else i_s):
        i_from = splits - 1 - i if REVERSE else i
        a, b, p = load_state(p_ends + i_from * 3 * D, D, o_d, m_d)
        b_size = (tl.minimum(i_from * segment + segment, T) - i_from * segment).to(tl.float32)
        state = add(state, a, b, p, b_w * b_size, PTX)
    return state


@triton.jit
def locate(D, splits, BLOCK_D: tl.constexpr):
    """i_s, i_b: segment and batch row of a program; o_d, m_d: its channels and whether they exist."""
    num_d = tl.cdiv(D, BLOCK_D)
    o_d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    i_s = tl.program_id(0) // num_d % splits
    return i_s, (tl.program_id(0) // num_d // splits).to(tl.int64), o_d, o_d < D


@triton.jit
def load_steps(p, stride_t, t, t_last, o_d, m_d, STEPS: tl.constexpr, OTHER: tl.constexpr):
    """STEPS steps of a sequence from t on in float32, each [BLOCK_D]; OTHER outside of [.., t_last) and D."""
    steps = ()
    for j in tl.static_range(STEPS):
        o_t = t + j + 0 * o_d
        b_x = tl.load(p + o_t.to(tl.int64) * stride_t + o_d, mask=m_d & (o_t < t_last), other=OTHER)
        steps += (b_x.to(tl.float32),)
    return steps
