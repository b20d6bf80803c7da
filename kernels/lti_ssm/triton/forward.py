"""The forward kernel: outputs of a piece of some sequences of one channel, or only the state after it."""

# Triton lets a name change its type while it traces: a tile of bfloat16 that becomes one of float32
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.lti_ssm.triton.products import (
    add_product,
    as_factors,
    interleave,
    leading_terms,
    load_parts,
    load_tile,
    split_terms,
    transpose_terms,
)
from subquad.kernels.lti_ssm.triton.scan import decay_states, scan_segments
from subquad.kernels.lti_ssm.triton.tables import load_map, load_toeplitz


@triton.jit(do_not_specialize=["num_pieces", "num_steps", "num_chunks"])
def _lti_fwd_kernel(
    u, gate_in, gate_out, tables, start, y, ungated, states, end,
    B, T, D, N, num_pieces, num_steps, num_chunks,
    u_stride_b, u_stride_d, in_stride_b, in_stride_d, out_stride_b, out_stride_d,
    COMPLEX: tl.constexpr, BF16: tl.constexpr, CHUNK: tl.constexpr, NEAR: tl.constexpr, ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr, INT64: tl.constexpr, BLOCK_N: tl.constexpr, GATED_TERMS: tl.constexpr,
    TAP_TERMS: tl.constexpr, MAP_TERMS: tl.constexpr, STATE_TERMS: tl.constexpr, SUM_TERMS: tl.constexpr,
    STORE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """y_r = v_r K + Re(h_r W), h_{r+1} = a h_r + v_r E, for one piece of ROWS / SEGMENTS sequences of one channel.

    u, gates [B, T, D], time contiguous. tables: those of `_prepare_kernel`. y [B, D, T], or None: then only the states
    after the piece are computed.
    ungated: None, or receives y before gate_out, contiguous as y.
    start [num_pieces, B, D, N] or None (zeros): the state before each piece.
    states [B, D, num_chunks, BLOCK_N interleaved] or None: receives the state before each chunk.
    end: receives [num_pieces, B, D, N], the state after each piece, where y is None; else None or [B, D, N], the state
    before chunk T // CHUNK.
    INT64: offsets are computed in 64 bits.
    """
    i_d, i_gp = tl.program_id(0) % D, tl.program_id(0) // D
    i_p, i_g = i_gp % num_pieces, i_gp // num_pieces
    pair: tl.constexpr = 2 if COMPLEX else 1
    o_r, o_c = tl.arange(0, ROWS)[:, None], tl.arange(0, CHUNK)
    o_w = tl.arange(0, BLOCK_N * pair)[None, :]
    row = N * pair
    m_w = o_w < row
    o_b, o_s = i_g * (ROWS // SEGMENTS) + o_r // SEGMENTS, o_r % SEGMENTS
    i_wide = i_d
    if INT64:
        o_b, i_wide = o_b.to(tl.int64), i_d.to(tl.int64)
    m_b, m_first = o_b < B, o_s == 0
    o_chunk = (i_p * SEGMENTS + o_s) * num_steps
    o_state = ((i_p * B + o_b) * D + i_d) * row + o_w
    o_u = o_b * u_stride_b + i_wide * u_stride_d
    o_in = o_b * in_stride_b + i_wide * in_stride_d
    NUM_POWERS: tl.constexpr = NEAR + CHUNK // NEAR + 8
    taps = tables + i_d * (CHUNK + (2 + NUM_POWERS) * row)
    bbar, weight, powers = taps + CHUNK, taps + CHUNK + row, taps + CHUNK + 2 * row
    decays = powers + (NEAR + CHUNK // NEAR) * row
    a_re, a_im = load_parts(decays, o_w, m_w, COMPLEX)
    r_re, r_im = load_parts(decays + row, o_w, m_w, COMPLEX)
    e_re, e_im = load_map(powers, bbar, CHUNK - 1 - o_c, o_w, m_w, row, NEAR, COMPLEX)
    e = leading_terms(split_terms(interleave(e_re, e_im, COMPLEX), MAP_TERMS, BF16), SUM_TERMS)
    if y is not None:
        # before the first loop, so that the program waits only once for what it loads from the tables
        k = split_terms(load_toeplitz(taps, CHUNK), TAP_TERMS, BF16)
        w_re, w_im = load_map(powers, weight, o_c, o_w, m_w, row, NEAR, COMPLEX)
        w = transpose_terms(split_terms(interleave(w_re, -w_im, COMPLEX), MAP_TERMS, BF16))

    b_h = tl.zeros([ROWS, BLOCK_N * pair], tl.float32)
    if SEGMENTS > 1 or y is None:
        # each row walks through the segment before its own (where only the end is asked for: its own) from state zero
        shift: tl.constexpr = 0 if y is None else 1
        o_before = o_chunk - shift * num_steps
        m_before = m_b & (o_s >= shift)
        for i in tl.range(0, num_steps, num_stages=NUM_STAGES):
            o_t = (o_before + i) * CHUNK + o_c[None, :]
            m_t = m_before & (o_t < T)
            b_v = load_tile(u, o_u, o_t, m_t)
            if gate_in is not None:
                b_v = b_v.to(tl.float32) * load_tile(gate_in, o_in, o_t, m_t).to(tl.float32)
            v = as_factors(b_v, GATED_TERMS, BF16)
            b_h = add_product(decay_states(b_h, a_re, a_im, r_re, r_im, COMPLEX, BF16), v, e, BF16)
    if start is not None:
        b_h += tl.load(start + o_state, mask=m_b & m_first & m_w, other=0.0)
    if SEGMENTS > 1:
        x_re, x_im = load_parts(decays + 2 * row, o_w, m_w, COMPLEX)
        s_re, s_im = load_parts(decays + 3 * row, o_w, m_w, COMPLEX)
        b_h = scan_segments(b_h, x_re, x_im, s_re, s_im, SEGMENTS, COMPLEX, BF16)
    if y is None:
        tl.store(end + o_state, b_h, mask=m_b & (o_s == SEGMENTS - 1) & m_w)
    else:
        o_out = o_b * out_stride_b + i_wide * out_stride_d
        o_row = o_b * D + i_d
        for i in tl.range(0, num_steps, num_stages=NUM_STAGES):
            o_t = (o_chunk + i) * CHUNK + o_c[None, :]
            m_t = m_b & (o_t < T)
            b_v = load_tile(u, o_u, o_t, m_t)
            if gate_in is not None:
                b_v = b_v.to(tl.float32) * load_tile(gate_in, o_in, o_t, m_t).to(tl.float32)
            v = as_factors(b_v, GATED_TERMS, BF16)
            h = split_terms(b_h, STATE_TERMS, BF16)
            if states is not None:
                o_states = (o_row * num_chunks + o_chunk + i) * (BLOCK_N * pair) + o_w
                m_states = m_b & (o_chunk + i < num_chunks)
                tl.store(states + o_states, b_h.to(states.dtype.element_ty), mask=m_states, cache_modifier=STORE)
            if end is not None:
                tl.store(end + o_row * row + o_w, b_h, mask=m_b & m_w & (o_chunk + i == T // CHUNK))
            b_h = add_product(decay_states(b_h, a_re, a_im, r_re, r_im, COMPLEX, BF16), v, e, BF16)
            b_y = add_product(tl.zeros([ROWS, CHUNK], tl.float32), v, k, BF16)
            b_y = add_product(b_y, h, w, BF16)
            if ungated is not None:
                b_ungated = b_y.to(ungated.dtype.element_ty)
                tl.store(ungated + (o_row * T + o_t), b_ungated, mask=m_t, cache_modifier=STORE)
            if gate_out is not None:
                b_y *= load_tile(gate_out, o_out, o_t, m_t).to(tl.float32)
            tl.store(y + (o_row * T + o_t), b_y.to(y.dtype.element_ty), mask=m_t, cache_modifier=STORE)
