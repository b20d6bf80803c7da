"""The forward kernel."""

# a tuple of tiles that grows has no type of its own
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.lti_ssm.triton.products import (
    _add_product,
    _factors,
    _interleave,
    _load_parts,
    _load_tile,
    _terms,
    _transposed,
)
from kernels.lti_ssm.triton.scan import _decayed, _scan
from kernels.lti_ssm.triton.tables import _map, _toeplitz


@triton.jit(do_not_specialize=["num_pieces", "num_steps", "num_chunks"])
def _lti_fwd_kernel(
    u,
    gate_in,
    gate_out,
    small,
    start,
    y,
    saved,
    end,
    B,
    T,
    D,
    N,
    num_pieces,
    num_steps,
    num_chunks,
    u_stride_b,
    u_stride_d,
    in_stride_b,
    in_stride_d,
    out_stride_b,
    out_stride_d,
    COMPLEX: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED_TERMS: tl.constexpr,
    TAP_TERMS: tl.constexpr,
    MAP_TERMS: tl.constexpr,
    STATE_TERMS: tl.constexpr,
    STORE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """y of a piece of ROWS / SEGMENTS sequences of one channel; y None: only the state after the piece.

    A row of a tile is a segment of num_steps chunks. start [pieces, B, D, N] or None (zeros): the state before each
    piece. saved [B, D, num_chunks, interleaved BLOCK_N] or None: the state before each chunk. end [pieces, B, D, N]:
    after each piece (y None), or [B, D, N]: before chunk T // C.
    """
    i_d, i_gp = tl.program_id(0) % D, tl.program_id(0) // D
    i_p, i_g = i_gp % num_pieces, i_gp // num_pieces
    pair: tl.constexpr = 2 if COMPLEX else 1
    o_r, o_c = tl.arange(0, ROWS)[:, None], tl.arange(0, C)
    o_w = tl.arange(0, BLOCK_N * pair)[None, :]
    row = N * pair
    m_w = o_w < row
    o_b, o_s = i_g * (ROWS // SEGMENTS) + o_r // SEGMENTS, o_r % SEGMENTS
    i_wide = i_d
    if WIDE:
        o_b, i_wide = o_b.to(tl.int64), i_d.to(tl.int64)
    m_b, m_first = o_b < B, o_s == 0
    o_chunk = (i_p * SEGMENTS + o_s) * num_steps
    o_state = ((i_p * B + o_b) * D + i_d) * row + o_w
    o_u = o_b * u_stride_b + i_wide * u_stride_d
    o_in = o_b * in_stride_b + i_wide * in_stride_d
    NUM_POWERS: tl.constexpr = J + C // J + 8
    taps = small + i_d * (C + (2 + NUM_POWERS) * row)
    bbar, weight, powers = taps + C, taps + C + row, taps + C + 2 * row
    decays = powers + (J + C // J) * row
    a_re, a_im = _load_parts(decays, o_w, m_w, COMPLEX)
    r_re, r_im = _load_parts(decays + row, o_w, m_w, COMPLEX)
    e_re, e_im = _map(powers, bbar, C - 1 - o_c, o_w, m_w, row, J, COMPLEX)
    e = _terms(_interleave(e_re, e_im, COMPLEX), MAP_TERMS, HALF)
    if y is not None:
        # here too, so that all that is loaded from the tables is waited for once
        k = _terms(_toeplitz(taps, C), TAP_TERMS, HALF)
        w_re, w_im = _map(powers, weight, o_c, o_w, m_w, row, J, COMPLEX)
        w = _transposed(_terms(_interleave(w_re, -w_im, COMPLEX), MAP_TERMS, HALF))

    b_h = tl.zeros([ROWS, BLOCK_N * pair], tl.float32)
    if SEGMENTS > 1 or y is None:
        # states that the segment before, or for the end its own, reaches from zero
        shift: tl.constexpr = 0 if y is None else 1
        o_before = o_chunk - shift * num_steps
        m_before = m_b & (o_s >= shift)
        for i in tl.range(0, num_steps, num_stages=NUM_STAGES):
            o_t = (o_before + i) * C + o_c[None, :]
            m_t = m_before & (o_t < T)
            b_v = _load_tile(u, o_u, o_t, m_t)
            if gate_in is not None:
                b_v = b_v.to(tl.float32) * _load_tile(gate_in, o_in, o_t, m_t).to(tl.float32)
            v = _factors(b_v, GATED_TERMS, HALF)
            b_h = _add_product(_decayed(b_h, a_re, a_im, r_re, r_im, COMPLEX, HALF), v, e, HALF)
    if start is not None:
        b_h += tl.load(start + o_state, mask=m_b & m_first & m_w, other=0.0)
    if SEGMENTS > 1:
        x_re, x_im = _load_parts(decays + 2 * row, o_w, m_w, COMPLEX)
        s_re, s_im = _load_parts(decays + 3 * row, o_w, m_w, COMPLEX)
        b_h = _scan(b_h, x_re, x_im, s_re, s_im, SEGMENTS, COMPLEX, HALF)
    if y is None:
        tl.store(end + o_state, b_h, mask=m_b & (o_s == SEGMENTS - 1) & m_w)
    else:
        o_out = o_b * out_stride_b + i_wide * out_stride_d
        o_row = o_b * D + i_d
        for i in tl.range(0, num_steps, num_stages=NUM_STAGES):
            o_t = (o_chunk + i) * C + o_c[None, :]
            m_t = m_b & (o_t < T)
            b_v = _load_tile(u, o_u, o_t, m_t)
            if gate_in is not None:
                b_v = b_v.to(tl.float32) * _load_tile(gate_in, o_in, o_t, m_t).to(tl.float32)
            v = _factors(b_v, GATED_TERMS, HALF)
            h = _terms(b_h, STATE_TERMS, HALF)
            if saved is not None:
                o_saved = (o_row * num_chunks + o_chunk + i) * (BLOCK_N * pair) + o_w
                m_saved = m_b & (o_chunk + i < num_chunks)
                tl.store(saved + o_saved, b_h.to(saved.dtype.element_ty), mask=m_saved, cache_modifier=STORE)
            if end is not None:
                tl.store(end + o_row * row + o_w, b_h, mask=m_b & m_w & (o_chunk + i == T // C))
            b_h = _add_product(_decayed(b_h, a_re, a_im, r_re, r_im, COMPLEX, HALF), v, e, HALF)
            b_y = _add_product(tl.zeros([ROWS, C], tl.float32), v, k, HALF)
            b_y = _add_product(b_y, h, w, HALF)
            if gate_out is not None:
                b_y *= _load_tile(gate_out, o_out, o_t, m_t).to(tl.float32)
            tl.store(y + (o_row * T + o_t), b_y.to(y.dtype.element_ty), mask=m_t, cache_modifier=STORE)
