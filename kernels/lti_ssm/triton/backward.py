"""The backward kernel."""

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
    _multiply,
    _parts,
    _terms,
    _transposed,
)
from kernels.lti_ssm.triton.scan import _decayed, _scan
from kernels.lti_ssm.triton.tables import _map, _powers, _toeplitz


@triton.jit
def _tap_sums(b_x):
    """The sum of each diagonal: the gradient of taps from that of K."""
    C: tl.constexpr = b_x.shape[0]
    o_l = tl.arange(0, C)[None, :]
    o_j = o_l + tl.arange(0, C)[:, None]
    return tl.sum(tl.where(o_j < C, tl.gather(b_x, tl.minimum(o_j, C - 1), 1), 0.0), 0)


@triton.jit
def _add2(a, b, x, y):
    return a + x, b + y


@triton.jit
def _add4(a, b, c, d, x, y, z, w):
    return a + x, b + y, c + z, d + w


@triton.jit
def _contract(
    b_x, powers, o_k, f_re, f_im, p_sum, o_w, m_w, row, J: tl.constexpr, SIGN: tl.constexpr, COMPLEX: tl.constexpr
):
    """Stores sum_k conj(Abar^k) x_k; returns conj(f) sum_k k conj(Abar^k) x_k. x has SIGN times the imaginary part."""
    p_re, p_im = _powers(powers, o_k, o_w, m_w, row, J, COMPLEX)
    d_re, d_im = _parts(b_x, COMPLEX)
    d_re, d_im = _multiply(p_re, -p_im, d_re, SIGN * d_im, COMPLEX)
    b_k = o_k[:, None].to(tl.float32)
    # together: a sum over rows waits for all warps
    if COMPLEX:
        d_re, d_im, k_re, k_im = tl.reduce((d_re, d_im, b_k * d_re, b_k * d_im), 0, _add4)
        d_im, k_im = d_im[None, :], k_im[None, :]
    else:
        d_re, k_re = tl.reduce((d_re, b_k * d_re), 0, _add2)
        k_im = f_im
    d_re, k_re = d_re[None, :], k_re[None, :]
    tl.store(p_sum + o_w, _interleave(d_re, d_im, COMPLEX), mask=m_w)
    return _multiply(f_re, -f_im, k_re, k_im, COMPLEX)


@triton.jit
def _diagonals(b_x, COMPLEX: tl.constexpr):
    """sum conj(h) H, from the products of interleaved h and H."""
    W: tl.constexpr = b_x.shape[0]
    o_i, o_j = tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]
    b_same = tl.where(o_i == o_j, b_x, 0.0)
    if COMPLEX:
        b_cross = tl.where(o_i == (o_j ^ 1), tl.where(o_j % 2 == 0, -b_x, b_x), 0.0)
        d_re, d_im = tl.reduce((b_same, b_cross), 0, _add2)
        d_re = tl.sum(tl.reshape(d_re, [W // 2, 2]), 1)[None, :]
        d_im = tl.sum(tl.reshape(d_im, [W // 2, 2]), 1)[None, :]
    else:
        d_re = tl.sum(b_same, 0)[None, :]
        d_im = d_re
    return d_re, d_im


@triton.jit(do_not_specialize=["num_pieces", "num_steps", "num_chunks"])
def _lti_bwd_kernel(
    u,
    gate_in,
    gate_out,
    dy,
    small,
    saved,
    after,
    dend,
    du,
    dgate_in,
    dgate_out,
    dstart,
    partial,
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
    dy_stride_b,
    dy_stride_d,
    COMPLEX: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HALVED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED_TERMS: tl.constexpr,
    TAP_TERMS: tl.constexpr,
    MAP_TERMS: tl.constexpr,
    STATE_TERMS: tl.constexpr,
    STORE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The gradient recurrence of this module; du None: only dstart, the gradient H of the state before each piece.

    after [pieces, B, D, N] or None: H after each piece. dend [B, D, N] or None: of the state before chunk T // C.
    dstart [pieces, B, D, N] (du None), else [B, D, N] or None. partial [*, D, taps C, then Bbar, c, z each N].
    HALVED: segments are half as long as those of the forward pass.
    """
    i_d, i_gp = tl.program_id(0) % D, tl.program_id(0) // D
    i_p, i_g = i_gp % num_pieces, i_gp // num_pieces
    pair: tl.constexpr = 2 if COMPLEX else 1
    o_r, o_c = tl.arange(0, ROWS)[:, None], tl.arange(0, C)
    o_w = tl.arange(0, BLOCK_N * pair)[None, :]
    row = N * pair
    m_w = o_w < row
    # segments from the last to the first, as H goes
    o_b, o_s = i_g * (ROWS // SEGMENTS) + o_r // SEGMENTS, SEGMENTS - 1 - o_r % SEGMENTS
    i_wide = i_d
    if WIDE:
        o_b, i_wide = o_b.to(tl.int64), i_d.to(tl.int64)
    m_b, m_first = o_b < B, o_r % SEGMENTS == 0
    o_chunk = (i_p * SEGMENTS + o_s) * num_steps
    o_row = o_b * D + i_d
    o_state = ((i_p * B + o_b) * D + i_d) * row + o_w
    o_dy = o_b * dy_stride_b + i_wide * dy_stride_d
    o_out = o_b * out_stride_b + i_wide * out_stride_d
    NUM_POWERS: tl.constexpr = J + C // J + 8
    taps = small + i_d * (C + (2 + NUM_POWERS) * row)
    bbar, weight, powers = taps + C, taps + C + row, taps + C + 2 * row
    decays = powers + (J + C // J) * row
    a_re, a_im = _load_parts(decays, o_w, m_w, COMPLEX)
    r_re, r_im = _load_parts(decays + row, o_w, m_w, COMPLEX)
    w_re, w_im = _map(powers, weight, o_c, o_w, m_w, row, J, COMPLEX)
    w = _terms(_interleave(w_re, -w_im, COMPLEX), MAP_TERMS, HALF)
    if du is not None:
        e_re, e_im = _map(powers, bbar, C - 1 - o_c, o_w, m_w, row, J, COMPLEX)
        e = _transposed(_terms(_interleave(e_re, e_im, COMPLEX), MAP_TERMS, HALF))
        k = _terms(_toeplitz(taps, C), TAP_TERMS, HALF)

    # H, interleaved
    b_x = tl.zeros([ROWS, BLOCK_N * pair], tl.float32)
    if SEGMENTS > 1 or du is None:
        shift: tl.constexpr = 0 if du is None else 1
        o_behind = o_chunk + shift * num_steps
        m_behind = m_b & (o_s < SEGMENTS - shift)
        # one tile a step, where there is room for three
        stages: tl.constexpr = 2 * NUM_STAGES if gate_out is None else NUM_STAGES
        for i in tl.range(0, num_steps, num_stages=stages):
            i_chunk = o_behind + (num_steps - 1 - i)
            o_t = i_chunk * C + o_c[None, :]
            m_t = m_behind & (o_t < T)
            b_g = _load_tile(dy, o_dy, o_t, m_t)
            if gate_out is not None:
                b_g = b_g.to(tl.float32) * _load_tile(gate_out, o_out, o_t, m_t).to(tl.float32)
            g = _factors(b_g, GATED_TERMS, HALF)
            b_x = _add_product(_decayed(b_x, a_re, -a_im, r_re, -r_im, COMPLEX, HALF), g, w, HALF)
            if dend is not None:
                m_end = m_behind & m_w & (i_chunk == T // C)
                b_x += tl.load(dend + o_row * row + o_w, mask=m_end, other=0.0)
    if after is not None:
        b_x += tl.load(after + o_state, mask=m_b & m_first & m_w, other=0.0)
    if SEGMENTS > 1:
        segment = decays + (4 if HALVED else 2) * row
        x_re, x_im = _load_parts(segment, o_w, m_w, COMPLEX)
        s_re, s_im = _load_parts(segment + row, o_w, m_w, COMPLEX)
        b_x = _scan(b_x, x_re, -x_im, s_re, -s_im, SEGMENTS, COMPLEX, HALF)
    if du is None:
        tl.store(dstart + o_state, b_x, mask=m_b & (o_s == 0) & m_w)
    else:
        o_u = o_b * u_stride_b + i_wide * u_stride_d
        o_in = o_b * in_stride_b + i_wide * in_stride_d
        dk = tl.zeros([C, C], tl.float32)
        de = tl.zeros([C, BLOCK_N * pair], tl.float32)
        dw = tl.zeros([C, BLOCK_N * pair], tl.float32)
        # sums of h_r H_{r+1}, of which da is the part near the diagonal: cheaper than leaving the matrix units
        dd = tl.zeros([BLOCK_N * pair, BLOCK_N * pair], tl.float32)
        dtap = tl.zeros([ROWS], tl.float32)
        for i in tl.range(0, num_steps, num_stages=NUM_STAGES):
            i_chunk = o_chunk + (num_steps - 1 - i)
            o_t = i_chunk * C + o_c[None, :]
            m_t = m_b & (o_t < T)
            b_dy = _load_tile(dy, o_dy, o_t, m_t)
            b_u = _load_tile(u, o_u, o_t, m_t)
            o_saved = (o_row * num_chunks + i_chunk) * (BLOCK_N * pair) + o_w
            b_h = tl.load(saved + o_saved, mask=m_b & (i_chunk < num_chunks), other=0.0)
            b_g, b_v = b_dy, b_u
            if gate_out is not None:
                b_gate_out = _load_tile(gate_out, o_out, o_t, m_t).to(tl.float32)
                b_g = b_dy.to(tl.float32) * b_gate_out
            if gate_in is not None:
                b_gate_in = _load_tile(gate_in, o_in, o_t, m_t).to(tl.float32)
                b_v = b_u.to(tl.float32) * b_gate_in
            if gate_in is not None or gate_out is not None:
                # the gradient of D is this alone, and rounded v or g would lose more than the products do
                dtap += tl.sum(b_v.to(tl.float32) * b_g.to(tl.float32), 1)
            g, v = _factors(b_g, GATED_TERMS, HALF), _factors(b_v, GATED_TERMS, HALF)
            h, x = _factors(b_h, STATE_TERMS, HALF), _terms(b_x, STATE_TERMS, HALF)
            b_x = _add_product(_decayed(b_x, a_re, -a_im, r_re, -r_im, COMPLEX, HALF), g, w, HALF)
            if dend is not None:
                m_end = m_b & m_w & (i_chunk == T // C)
                b_x += tl.load(dend + o_row * row + o_w, mask=m_end, other=0.0)

            b_dv = _add_product(tl.zeros([ROWS, C], tl.float32), g, _transposed(k), HALF)
            b_dv = _add_product(b_dv, x, e, HALF)
            o_y = o_row * T + o_t
            if gate_in is not None:
                b_dgate = (b_dv * b_u.to(tl.float32)).to(dgate_in.dtype.element_ty)
                tl.store(dgate_in + o_y, b_dgate, mask=m_t, cache_modifier=STORE)
                b_dv *= b_gate_in
            b_du = b_dv.to(du.dtype.element_ty)
            if gate_out is not None:
                b_y = _add_product(tl.zeros([ROWS, C], tl.float32), v, k, HALF)
                b_y = _add_product(b_y, h, _transposed(w), HALF)
                b_dgate = (b_y * b_dy.to(tl.float32)).to(dgate_out.dtype.element_ty)
                tl.store(dgate_out + o_y, b_dgate, mask=m_t, cache_modifier=STORE)

            turned = _transposed(v)
            dk = _add_product(dk, turned, g, HALF)
            de = _add_product(de, turned, x, HALF)
            dw = _add_product(dw, _transposed(g), h, HALF)
            dd = _add_product(dd, _transposed(h), x, HALF)
            # last: products wait for what was stored before them, and x has left its shared memory
            tl.store(du + o_y, b_du, mask=m_t, cache_modifier=STORE)

        if dstart is not None:
            tl.store(dstart + o_row * row + o_w, b_x, mask=m_b & m_w & (i_p + o_s == 0))
        p_partial = partial + (i_gp.to(tl.int64) * D + i_d) * (C + 3 * row)
        b_taps = _tap_sums(dk)
        if gate_in is not None or gate_out is not None:
            b_taps = tl.where(o_c == 0, tl.sum(dtap, 0), b_taps)
        tl.store(p_partial + o_c, b_taps)
        p_partial += C
        # dBbar = sum conj(Abar^k) dE, and the share of dz is k conj(E) dE
        f_re, f_im = _load_parts(bbar, o_w, m_w, COMPLEX)
        dz_re, dz_im = _contract(de, powers, C - 1 - o_c, f_re, f_im, p_partial, o_w, m_w, row, J, 1, COMPLEX)
        # the same for c and dO, of which the imaginary part came negative
        f_re, f_im = _load_parts(weight, o_w, m_w, COMPLEX)
        x_re, x_im = _contract(dw, powers, o_c, f_re, f_im, p_partial + row, o_w, m_w, row, J, -1, COMPLEX)
        # and of the chunk decay: C conj(a) da
        d_re, d_im = _diagonals(dd, COMPLEX)
        f_re, f_im = _load_parts(decays, o_w, m_w, COMPLEX)
        d_re, d_im = _multiply(f_re, -f_im, d_re, d_im, COMPLEX)
        dz_re, dz_im = dz_re + x_re + C * d_re, dz_im + x_im + C * d_im
        tl.store(p_partial + 2 * row + o_w, _interleave(dz_re, dz_im, COMPLEX), mask=m_w)
