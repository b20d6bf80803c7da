"""The backward kernel: gradients through time, and partial sums of those of taps, Bbar, w and log Abar of a channel.

With g_r the gradient of y_r before its gate (dy gate_out) and dh_r that of h_r (real part: of Re h, imaginary part: of
Im h), from the last chunk of a sequence to the first,

    dh_r = g_r conj(W) + conj(a) dh_{r+1};   dv_r = g_r K^T + Re(dh_{r+1} conj(E))
    dK = sum v_r^T g_r;   dE = sum v_r^T dh_{r+1};   dW = sum g_r^T conj(h_r);   da = sum dh_{r+1} conj(h_r)

dK, dE, dW and the matrix sum h_r^T dh_{r+1}, whose diagonal gives da, are accumulators of the whole loop. At its end
they are contracted to the gradients of what the matrices are made of: taps, Bbar, w and z = log Abar, with
d Abar^k / dz = k Abar^k.
"""

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
    multiply,
    split_parts,
    split_terms,
    transpose_terms,
)
from subquad.kernels.lti_ssm.triton.scan import decay_states, scan_segments
from subquad.kernels.lti_ssm.triton.tables import load_map, load_powers, load_toeplitz


@triton.jit
def _diagonal_sums(b_x):
    """The sum of each diagonal j - i >= 0 of x [CHUNK, CHUNK]: the gradient of the taps from that of K."""
    CHUNK: tl.constexpr = b_x.shape[0]
    o_l = tl.arange(0, CHUNK)[None, :]
    o_j = o_l + tl.arange(0, CHUNK)[:, None]
    return tl.sum(tl.where(o_j < CHUNK, tl.gather(b_x, tl.minimum(o_j, CHUNK - 1), 1), 0.0), 0)


@triton.jit
def _add2(a, b, x, y):
    return a + x, b + y


@triton.jit
def _add4(a, b, c, d, x, y, z, w):
    return a + x, b + y, c + z, d + w


@triton.jit
def _contract_with_powers(
    b_x, powers, o_k, f_re, f_im, p_sum, o_w, m_w, row, NEAR: tl.constexpr, SIGN: tl.constexpr, COMPLEX: tl.constexpr
):
    """From x [k, N], the gradient of f Abar^k, to those of f and z = log Abar.

    Stores sum_k conj(Abar^k) x_k at p_sum and returns conj(f) sum_k k conj(Abar^k) x_k.
    SIGN: -1 where the imaginary part of x is given with the opposite sign, else 1.
    """
    p_re, p_im = load_powers(powers, o_k, o_w, m_w, row, NEAR, COMPLEX)
    d_re, d_im = split_parts(b_x, COMPLEX)
    d_re, d_im = multiply(p_re, -p_im, d_re, SIGN * d_im, COMPLEX)
    b_k = o_k[:, None].to(tl.float32)
    # one reduction for all sums, because each reduction over rows waits for all warps
    if COMPLEX:
        d_re, d_im, k_re, k_im = tl.reduce((d_re, d_im, b_k * d_re, b_k * d_im), 0, _add4)
        d_im, k_im = d_im[None, :], k_im[None, :]
    else:
        d_re, k_re = tl.reduce((d_re, b_k * d_re), 0, _add2)
        k_im = f_im
    d_re, k_re = d_re[None, :], k_re[None, :]
    tl.store(p_sum + o_w, interleave(d_re, d_im, COMPLEX), mask=m_w)
    return multiply(f_re, -f_im, k_re, k_im, COMPLEX)


@triton.jit
def _decay_gradient(b_x, COMPLEX: tl.constexpr):
    """da = sum conj(h) dh [1, N], from the matrix h^T dh of interleaved states [2 N, 2 N]."""
    WIDTH: tl.constexpr = b_x.shape[0]
    o_i, o_j = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    b_same = tl.where(o_i == o_j, b_x, 0.0)
    if COMPLEX:
        b_cross = tl.where(o_i == (o_j ^ 1), tl.where(o_j % 2 == 0, -b_x, b_x), 0.0)
        d_re, d_im = tl.reduce((b_same, b_cross), 0, _add2)
        d_re = tl.sum(tl.reshape(d_re, [WIDTH // 2, 2]), 1)[None, :]
        d_im = tl.sum(tl.reshape(d_im, [WIDTH // 2, 2]), 1)[None, :]
    else:
        d_re = tl.sum(b_same, 0)[None, :]
        d_im = d_re
    return d_re, d_im


@triton.jit(do_not_specialize=["num_pieces", "num_steps", "num_chunks"])
def _lti_bwd_kernel(
    u, gate_in, gate_out, dy, tables, ungated, states, after, dend, du, dgate_in, dgate_out, dstart, partial,
    B, T, D, N, num_pieces, num_steps, num_chunks,
    u_stride_b, u_stride_d, in_stride_b, in_stride_d, out_stride_b, out_stride_d, dy_stride_b, dy_stride_d,
    COMPLEX: tl.constexpr, BF16: tl.constexpr, CHUNK: tl.constexpr, NEAR: tl.constexpr, ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr, HALVED: tl.constexpr, INT64: tl.constexpr, BLOCK_N: tl.constexpr, GATED_TERMS: tl.constexpr,
    TAP_TERMS: tl.constexpr, MAP_TERMS: tl.constexpr, STATE_TERMS: tl.constexpr, SUM_TERMS: tl.constexpr,
    STORE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient recurrence of this module, for one piece of ROWS / SEGMENTS sequences of one channel.

    u, gates, dy [B, T, D], time contiguous. tables: those of `_prepare_kernel`.
    ungated, states: those of the forward kernel.
    after [num_pieces, B, D, N] or None (zeros): dh behind each piece.
    dend [B, D, N] or None: the gradient of the state before chunk T // CHUNK.
    du and the gradients of gates that are given: receive [B, D, T]. With du None, only dh is computed.
    dstart: receives [num_pieces, B, D, N], dh before each piece, where du is None; else None or [B, D, N], the gradient
    of the initial state.
    partial [programs of a channel, D, CHUNK + 3 N]: receives the gradients of the taps, Bbar, w and z.
    HALVED: segments are half as long as those of the forward pass.   INT64: offsets are computed in 64 bits.
    """
    i_d, i_gp = tl.program_id(0) % D, tl.program_id(0) // D
    i_p, i_g = i_gp % num_pieces, i_gp // num_pieces
    pair: tl.constexpr = 2 if COMPLEX else 1
    o_r, o_c = tl.arange(0, ROWS)[:, None], tl.arange(0, CHUNK)
    o_w = tl.arange(0, BLOCK_N * pair)[None, :]
    row = N * pair
    m_w = o_w < row
    # the scan goes through rows in their order, so segments stand from the last to the first, as dh goes
    o_b, o_s = i_g * (ROWS // SEGMENTS) + o_r // SEGMENTS, SEGMENTS - 1 - o_r % SEGMENTS
    i_wide = i_d
    if INT64:
        o_b, i_wide = o_b.to(tl.int64), i_d.to(tl.int64)
    m_b, m_first = o_b < B, o_r % SEGMENTS == 0
    o_chunk = (i_p * SEGMENTS + o_s) * num_steps
    o_row = o_b * D + i_d
    o_state = ((i_p * B + o_b) * D + i_d) * row + o_w
    o_dy = o_b * dy_stride_b + i_wide * dy_stride_d
    o_out = o_b * out_stride_b + i_wide * out_stride_d
    NUM_POWERS: tl.constexpr = NEAR + CHUNK // NEAR + 8
    taps = tables + i_d * (CHUNK + (2 + NUM_POWERS) * row)
    bbar, weight, powers = taps + CHUNK, taps + CHUNK + row, taps + CHUNK + 2 * row
    decays = powers + (NEAR + CHUNK // NEAR) * row
    a_re, a_im = load_parts(decays, o_w, m_w, COMPLEX)
    r_re, r_im = load_parts(decays + row, o_w, m_w, COMPLEX)
    w_re, w_im = load_map(powers, weight, o_c, o_w, m_w, row, NEAR, COMPLEX)
    w = split_terms(interleave(w_re, -w_im, COMPLEX), SUM_TERMS, BF16)
    if du is not None:
        e_re, e_im = load_map(powers, bbar, CHUNK - 1 - o_c, o_w, m_w, row, NEAR, COMPLEX)
        e = transpose_terms(split_terms(interleave(e_re, e_im, COMPLEX), MAP_TERMS, BF16))
        k = split_terms(load_toeplitz(taps, CHUNK), TAP_TERMS, BF16)

    b_dh = tl.zeros([ROWS, BLOCK_N * pair], tl.float32)
    if SEGMENTS > 1 or du is None:
        shift: tl.constexpr = 0 if du is None else 1
        o_behind = o_chunk + shift * num_steps
        m_behind = m_b & (o_s < SEGMENTS - shift)
        # a step loads one tile where the other loop loads three, so that more steps fit ahead
        stages: tl.constexpr = 2 * NUM_STAGES if gate_out is None else NUM_STAGES
        for i in tl.range(0, num_steps, num_stages=stages):
            i_chunk = o_behind + (num_steps - 1 - i)
            o_t = i_chunk * CHUNK + o_c[None, :]
            m_t = m_behind & (o_t < T)
            b_g = load_tile(dy, o_dy, o_t, m_t)
            if gate_out is not None:
                b_g = b_g.to(tl.float32) * load_tile(gate_out, o_out, o_t, m_t).to(tl.float32)
            g = as_factors(b_g, GATED_TERMS, BF16)
            b_dh = add_product(decay_states(b_dh, a_re, -a_im, r_re, -r_im, COMPLEX, BF16), g, w, BF16)
            if dend is not None:
                m_end = m_behind & m_w & (i_chunk == T // CHUNK)
                b_dh += tl.load(dend + o_row * row + o_w, mask=m_end, other=0.0)
    if after is not None:
        b_dh += tl.load(after + o_state, mask=m_b & m_first & m_w, other=0.0)
    if SEGMENTS > 1:
        segment = decays + (4 if HALVED else 2) * row
        x_re, x_im = load_parts(segment, o_w, m_w, COMPLEX)
        s_re, s_im = load_parts(segment + row, o_w, m_w, COMPLEX)
        b_dh = scan_segments(b_dh, x_re, -x_im, s_re, -s_im, SEGMENTS, COMPLEX, BF16)
    if du is None:
        tl.store(dstart + o_state, b_dh, mask=m_b & (o_s == 0) & m_w)
    else:
        o_u = o_b * u_stride_b + i_wide * u_stride_d
        o_in = o_b * in_stride_b + i_wide * in_stride_d
        dk = tl.zeros([CHUNK, CHUNK], tl.float32)
        de = tl.zeros([CHUNK, BLOCK_N * pair], tl.float32)
        dw = tl.zeros([CHUNK, BLOCK_N * pair], tl.float32)
        # a whole matrix, of which da needs the diagonal only: cheaper than leaving the matrix units
        dhh = tl.zeros([BLOCK_N * pair, BLOCK_N * pair], tl.float32)
        dskip = tl.zeros([ROWS], tl.float32)
        for i in tl.range(0, num_steps, num_stages=NUM_STAGES):
            i_chunk = o_chunk + (num_steps - 1 - i)
            o_t = i_chunk * CHUNK + o_c[None, :]
            m_t = m_b & (o_t < T)
            b_dy = load_tile(dy, o_dy, o_t, m_t)
            b_u = load_tile(u, o_u, o_t, m_t)
            o_states = (o_row * num_chunks + i_chunk) * (BLOCK_N * pair) + o_w
            b_h = tl.load(states + o_states, mask=m_b & (i_chunk < num_chunks), other=0.0)
            b_g, b_v = b_dy, b_u
            if gate_out is not None:
                b_gate_out = load_tile(gate_out, o_out, o_t, m_t).to(tl.float32)
                b_g = b_dy.to(tl.float32) * b_gate_out
            if gate_in is not None:
                b_gate_in = load_tile(gate_in, o_in, o_t, m_t).to(tl.float32)
                b_v = b_u.to(tl.float32) * b_gate_in
            if gate_in is not None or gate_out is not None:
                # the gradient of the skip is this sum alone; rounding v or g to bfloat16 would lose too much of it
                dskip += tl.sum(b_v.to(tl.float32) * b_g.to(tl.float32), 1)
            g, v = as_factors(b_g, GATED_TERMS, BF16), as_factors(b_v, GATED_TERMS, BF16)
            h, dh = as_factors(b_h, SUM_TERMS, BF16), split_terms(b_dh, STATE_TERMS, BF16)
            b_dh = add_product(decay_states(b_dh, a_re, -a_im, r_re, -r_im, COMPLEX, BF16), g, w, BF16)
            if dend is not None:
                m_end = m_b & m_w & (i_chunk == T // CHUNK)
                b_dh += tl.load(dend + o_row * row + o_w, mask=m_end, other=0.0)

            b_dv = add_product(tl.zeros([ROWS, CHUNK], tl.float32), g, transpose_terms(k), BF16)
            b_dv = add_product(b_dv, dh, e, BF16)
            o_y = o_row * T + o_t
            if gate_in is not None:
                b_dgate = (b_dv * b_u.to(tl.float32)).to(dgate_in.dtype.element_ty)
                tl.store(dgate_in + o_y, b_dgate, mask=m_t, cache_modifier=STORE)
                b_dv *= b_gate_in
            b_du = b_dv.to(du.dtype.element_ty)
            if gate_out is not None:
                b_y = load_tile(ungated, o_row * T, o_t, m_t).to(tl.float32)
                b_dgate = (b_y * b_dy.to(tl.float32)).to(dgate_out.dtype.element_ty)
                tl.store(dgate_out + o_y, b_dgate, mask=m_t, cache_modifier=STORE)

            v_transposed = transpose_terms(v)
            dk = add_product(dk, v_transposed, g, BF16)
            dh = leading_terms(dh, SUM_TERMS)
            de = add_product(de, v_transposed, dh, BF16)
            dw = add_product(dw, transpose_terms(g), h, BF16)
            dhh = add_product(dhh, transpose_terms(h), dh, BF16)
            # stored last: products wait for earlier stores, and du can take the shared memory of dh
            tl.store(du + o_y, b_du, mask=m_t, cache_modifier=STORE)

        if dstart is not None:
            tl.store(dstart + o_row * row + o_w, b_dh, mask=m_b & m_w & (i_p + o_s == 0))
        p_partial = partial + (i_gp.to(tl.int64) * D + i_d) * (CHUNK + 3 * row)
        b_taps = _diagonal_sums(dk)
        if gate_in is not None or gate_out is not None:
            b_taps = tl.where(o_c == 0, tl.sum(dskip, 0), b_taps)
        tl.store(p_partial + o_c, b_taps)
        p_partial += CHUNK
        # through E = Bbar Abar^k to Bbar and z
        f_re, f_im = load_parts(bbar, o_w, m_w, COMPLEX)
        dz_re, dz_im = _contract_with_powers(
            de, powers, CHUNK - 1 - o_c, f_re, f_im, p_partial, o_w, m_w, row, NEAR, 1, COMPLEX
        )
        # through W = w Abar^k to w and z; dw is the conjugate of dW
        f_re, f_im = load_parts(weight, o_w, m_w, COMPLEX)
        x_re, x_im = _contract_with_powers(
            dw, powers, o_c, f_re, f_im, p_partial + row, o_w, m_w, row, NEAR, -1, COMPLEX
        )
        # through a = Abar^CHUNK to z
        d_re, d_im = _decay_gradient(dhh, COMPLEX)
        f_re, f_im = load_parts(decays, o_w, m_w, COMPLEX)
        d_re, d_im = multiply(f_re, -f_im, d_re, d_im, COMPLEX)
        dz_re, dz_im = dz_re + x_re + CHUNK * d_re, dz_im + x_im + CHUNK * d_im
        tl.store(p_partial + 2 * row + o_w, interleave(dz_re, dz_im, COMPLEX), mask=m_w)
