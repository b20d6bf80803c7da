"""One step of the recurrence with a complex state, which is read and written once."""

# Triton lets a name change its type while it traces
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.selective_scan.triton.arithmetic import LOG2E, exp_or_exp2, sigmoid, step_size
from subquad.kernels.selective_scan.triton.complex.arithmetic import sin_cos


@triton.jit
def _complex_step_kernel(
    x, dt, A, B, C, skip, z, bias, state, y,
    D, x_stride_b, dt_stride_b, z_stride_b, b_stride_b, b_stride_d, b_stride_n, c_stride_b, c_stride_d, c_stride_n,
    s_stride_b, s_stride_d, s_stride_n,
    N: tl.constexpr, NP: tl.constexpr, BLOCK_D: tl.constexpr, SOFTPLUS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One step for BLOCK_D channels of one batch row; the state [batch, D, N, 2] is updated in place.

    x, dt, z, y: [batch, D] with contiguous channels.   A: [D, N, 2], skip, bias: [D], contiguous.
    B, C:        any strides along batch, channels and states, in floats; NP is N rounded up to a power of two.
    """
    num_d = tl.cdiv(D, BLOCK_D)
    i_b = (tl.program_id(0) // num_d).to(tl.int64)
    o_d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, NP)[None, :]
    m_d = o_d < D
    m = m_d[:, None] & (o_n < N)
    o_row = o_d.to(tl.int64)[:, None]
    p_state = state + i_b * s_stride_b + o_row * s_stride_d + o_n * s_stride_n
    p_a, p_b = A + (o_row * N + o_n) * 2, B + i_b * b_stride_b + o_row * b_stride_d + o_n * b_stride_n
    p_c = C + i_b * c_stride_b + o_row * c_stride_d + o_n * c_stride_n
    h_re, h_im = tl.load(p_state, mask=m, other=0.0), tl.load(p_state + 1, mask=m, other=0.0)
    a_re, a_im = tl.load(p_a, mask=m, other=0.0), tl.load(p_a + 1, mask=m, other=0.0)
    b_x = tl.load(x + i_b * x_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_bias = 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_dt = step_size(tl.load(dt + i_b * dt_stride_b + o_d, mask=m_d, other=0.0), b_bias, SOFTPLUS, PTX)
    b_size = exp_or_exp2(b_dt[:, None] * a_re * (1.0 if PTX else LOG2E), PTX)
    b_sin, b_cos = sin_cos(b_dt[:, None] * a_im)
    b_u = (b_dt * b_x)[:, None]
    new_re = b_size * (b_cos * h_re - b_sin * h_im) + b_u * tl.load(p_b, mask=m, other=0.0)
    new_im = b_size * (b_cos * h_im + b_sin * h_re) + b_u * tl.load(p_b + 1, mask=m, other=0.0)
    tl.store(p_state, new_re, mask=m)
    tl.store(p_state + 1, new_im, mask=m)
    b_y = tl.sum(tl.load(p_c, mask=m, other=0.0) * new_re - tl.load(p_c + 1, mask=m, other=0.0) * new_im, 1)
    if skip is not None:
        b_y += tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32) * b_x
    if z is not None:
        b_z = tl.load(z + i_b * z_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_y *= b_z * sigmoid(b_z, PTX)
    tl.store(y + i_b * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)
