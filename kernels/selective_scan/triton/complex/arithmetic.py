"""Complex arithmetic, loads and stores of the kernels; a state is a tuple of NT real and NT imaginary parts."""

# Triton lets a name change its type while it traces: a tuple of tensors that grows
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.selective_scan.triton.arithmetic import LOG2E, exp_or_exp2, step_size


@triton.jit
def sin_cos(b_x):
    """sin(x) and cos(x), with an error of a rounding for |x| < 10^4 and bounded for every x.

    x = k pi / 2 + r with |r| <= pi / 4. The three parts of pi / 2 have so few bits that the products with k are exact.
    The polynomials are those of Moshier's Cephes library.
    """
    b_k = tl.floor(b_x * 0.6366197723675814 + 0.5)
    b_r = ((b_x - b_k * 1.5703125) - b_k * 4.837512969970703125e-4) - b_k * 7.549789948768648e-8
    # r is wrong where x is very large; it must stay finite there, because it is multiplied by a decay of zero
    b_r = tl.minimum(tl.maximum(b_r, -1.0), 1.0)
    b_s = b_r * b_r
    b_sin = ((-1.9515295891e-4 * b_s + 8.3321608736e-3) * b_s - 1.6666654611e-1) * b_s * b_r + b_r
    b_cos = ((2.443315711809948e-5 * b_s - 1.388731625493765e-3) * b_s + 4.166664568298827e-2) * b_s * b_s
    b_cos += 1.0 - 0.5 * b_s
    # the quarter of the circle, of a number that the conversion to an integer cannot overflow
    b_quarter = (b_k - tl.floor(b_k * 0.25) * 4.0).to(tl.int32)
    b_odd = (b_quarter & 1) == 1
    b_first, b_second = tl.where(b_odd, b_cos, b_sin), tl.where(b_odd, b_sin, b_cos)
    b_first = tl.where(b_quarter >= 2, -b_first, b_first)
    return b_first, tl.where((b_quarter == 1) | (b_quarter == 2), -b_second, b_second)


@triton.jit
def decays(a, b_dt, NT: tl.constexpr, PRECISE: tl.constexpr):
    """exp(dt A) for the eigenvalues of `scaled_by_log2e`."""
    real = ()
    imaginary = ()
    for i in tl.static_range(NT):
        b_size = exp_or_exp2(b_dt * a[i], PRECISE)
        b_sin, b_cos = sin_cos(b_dt * a[NT + i])
        real += (b_size * b_cos,)
        imaginary += (b_size * b_sin,)
    return real + imaginary


@triton.jit
def scaled_by_log2e(given, NT: tl.constexpr, PRECISE: tl.constexpr):
    """A with real parts times log2(e) unless PRECISE, as `decays` takes it (`exp_or_exp2`)."""
    a = ()
    for i in tl.static_range(2 * NT):
        if i < NT and not PRECISE:
            a += (given[i] * LOG2E,)
        else:
            a += (given[i],)
    return a


@triton.jit
def product(a, h, NT: tl.constexpr):
    """a h for each state."""
    real = ()
    imaginary = ()
    for i in tl.static_range(NT):
        real += (a[i] * h[i] - a[NT + i] * h[NT + i],)
        imaginary += (a[i] * h[NT + i] + a[NT + i] * h[i],)
    return real + imaginary


@triton.jit
def conjugate(h, NT: tl.constexpr):
    """conj(h) for each state."""
    conjugates = ()
    for i in tl.static_range(2 * NT):
        conjugates += (h[i] if i < NT else -h[i],)
    return conjugates


@triton.jit
def conjugate_product(a, h, NT: tl.constexpr):
    """conj(a) h for each state."""
    real = ()
    imaginary = ()
    for i in tl.static_range(NT):
        real += (a[i] * h[i] + a[NT + i] * h[NT + i],)
        imaginary += (a[i] * h[NT + i] - a[NT + i] * h[i],)
    return real + imaginary


@triton.jit
def real_dot(a, h, NT: tl.constexpr, SIGN: tl.constexpr):
    """The sum over the states of a channel of Re(a h) if SIGN is -1, and of Re(conj(a) h) if it is 1."""
    b_sum = a[0] * h[0] + SIGN * (a[NT] * h[NT])
    for i in tl.static_range(1, NT):
        b_sum += a[i] * h[i] + SIGN * (a[NT + i] * h[NT + i])
    return tl.sum(b_sum, 1)


@triton.jit
def add_scaled(sums, states, b_factor):
    """sums + factor states, for a real factor."""
    added = ()
    for i in tl.static_range(len(sums)):
        added += (sums[i] + b_factor * states[i],)
    return added


@triton.jit
def multiply_add(a, h, b_u, row, NT: tl.constexpr):
    """a h + u row for each state, with a real u."""
    return add_scaled(product(a, h, NT), row, b_u)


@triton.jit
def zeros(NT: tl.constexpr, BLOCK_D: tl.constexpr, LANES: tl.constexpr):
    """The zero state."""
    states = ()
    for _ in tl.static_range(2 * NT):
        states += (tl.zeros([BLOCK_D, LANES], tl.float32),)
    return states


@triton.jit
def locate(D, splits, BLOCK_D: tl.constexpr, LANES: tl.constexpr):
    """i_d, i_s, i_b: block of channels, segment and batch row of a program; o_d, m_d, o_q: channels and lanes."""
    num_d = tl.cdiv(D, BLOCK_D)
    i_d = tl.program_id(0) % num_d
    i_s = tl.program_id(0) // num_d % splits
    i_b = (tl.program_id(0) // num_d // splits).to(tl.int64)
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    return i_d, i_s, i_b, o_d, o_d < D, tl.arange(0, LANES)


@triton.jit
def load_states(p, o_d, m_d, o_q, N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr):
    """States [D, N] with real and imaginary parts side by side; zeros beyond."""
    real = ()
    imaginary = ()
    for i in tl.static_range(NT):
        o_n = i * LANES + o_q
        m = m_d[:, None] & (o_n < N)[None, :]
        p_state = p + 2 * (o_d.to(tl.int64)[:, None] * N + o_n[None, :])
        real += (tl.load(p_state, mask=m, other=0.0),)
        imaginary += (tl.load(p_state + 1, mask=m, other=0.0),)
    return real + imaginary


@triton.jit
def store_states(p, states, o_d, m_d, o_q, N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr):
    """The inverse of `load_states`."""
    for i in tl.static_range(NT):
        o_n = i * LANES + o_q
        m = m_d[:, None] & (o_n < N)[None, :]
        p_state = p + 2 * (o_d.to(tl.int64)[:, None] * N + o_n[None, :])
        tl.store(p_state, states[i], mask=m)
        tl.store(p_state + 1, states[NT + i], mask=m)


@triton.jit
def load_tiles(p, D, o_d, m_d, o_q, NUM: tl.constexpr, LANES: tl.constexpr):
    """NUM tensors [D, LANES] one behind the other, the layout of the states that only the kernels read."""
    tiles = ()
    for i in tl.static_range(NUM):
        p_tile = p + (i * D + o_d.to(tl.int64))[:, None] * LANES + o_q[None, :]
        tiles += (tl.load(p_tile, mask=m_d[:, None], other=0.0),)
    return tiles


@triton.jit
def store_tiles(p, tiles, D, o_d, m_d, o_q, LANES: tl.constexpr):
    """The inverse of `load_tiles`."""
    for i in tl.static_range(len(tiles)):
        p_tile = p + (i * D + o_d.to(tl.int64))[:, None] * LANES + o_q[None, :]
        tl.store(p_tile, tiles[i], mask=m_d[:, None])


@triton.jit
def step_of(t, j, like):
    """t + j as a tensor: in the interpreter the step of a loop is a Python integer."""
    return t + j + 0 * like


@triton.jit
def load_steps(p, stride_t, t, t_last, o_d, m_d, STEPS: tl.constexpr):
    """STEPS steps of a sequence from t on, each [BLOCK_D]; zeros from t_last on."""
    steps = ()
    for j in tl.static_range(STEPS):
        o_t = step_of(t, j, o_d)
        steps += (tl.load(p + o_t.to(tl.int64) * stride_t + o_d, mask=m_d & (o_t < t_last), other=0.0),)
    return steps


@triton.jit
def load_rows(p, stride_t, t, t_last, o_q, N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr):
    """STEPS rows of a map that depends on time, each NT real and NT imaginary parts [1, LANES]."""
    rows = ()
    for j in tl.static_range(STEPS):
        real = ()
        imaginary = ()
        for i in tl.static_range(NT):
            o_n = i * LANES + o_q
            o_t = step_of(t, j, o_n)
            p_row = p + o_t.to(tl.int64) * stride_t + 2 * o_n
            m = (o_n < N) & (o_t < t_last)
            real += (tl.load(p_row, mask=m, other=0.0)[None, :],)
            imaginary += (tl.load(p_row + 1, mask=m, other=0.0)[None, :],)
        rows += real + imaginary
    return rows


@triton.jit
def masked_step_size(b_dt, b_bias, m_t, SOFTPLUS: tl.constexpr, PRECISE: tl.constexpr):
    """The step size, and zero where not m_t: a step of size zero does not change the state."""
    return tl.where(m_t, step_size(b_dt, b_bias, SOFTPLUS, PRECISE), 0.0)


@triton.jit
def _join_halves(tensors):
    """Tensor k beside tensor k + half, along a new last axis."""
    joined = ()
    for k in tl.static_range(len(tensors) // 2):
        joined += (tl.join(tensors[k], tensors[k + len(tensors) // 2]),)
    return joined


@triton.constexpr_function
def _log2(count):
    return count.bit_length() - 1


@triton.jit
def _join(tensors):
    """A power of two of equal tensors as one, along new last axes of size two."""
    LEVELS: tl.constexpr = _log2(len(tensors))
    for _ in tl.static_range(LEVELS):
        tensors = _join_halves(tensors)
    return tensors[0]


@triton.jit
def sum_channels(terms):
    """Sums over the channels of a program for tensors [BLOCK_D, LANES], as one tensor [LANES, number of tensors].

    One reduction for all of them, because every reduction over the warps of a program waits for all of them.
    """
    LANES: tl.constexpr = terms[0].shape[1]
    COUNT: tl.constexpr = len(terms)
    return tl.reshape(tl.sum(_join(terms), 0), [LANES, COUNT])


@triton.jit
def store_steps(p, steps, t, t_last, D, o_d, m_d):
    """Stores steps of a contiguous sequence [T, D] from t on, each [BLOCK_D], those from t_last on excepted.

    All at once, because threads exchange what they store, and wait for each other to do so.
    """
    BLOCK_D: tl.constexpr = steps[0].shape[0]
    COUNT: tl.constexpr = len(steps)
    b_steps = tl.reshape(_join(steps), [BLOCK_D, COUNT])
    o_t = step_of(t, tl.arange(0, COUNT), 0)
    p_steps = p + o_t.to(tl.int64)[None, :] * D + o_d[:, None]
    tl.store(p_steps, b_steps.to(p.dtype.element_ty), mask=m_d[:, None] & (o_t < t_last)[None, :])
