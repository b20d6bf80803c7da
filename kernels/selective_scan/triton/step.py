"""One step of the recurrence, for decoding."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2, speaks_ptx
from kernels.selective_scan.triton.arithmetic import LOG2E, _decay, _sigmoid, _step_size

STEP_BLOCK = 1024
"""State elements of one program of the single step."""


@triton.jit
def _step_kernel(
    x, dt, A, B, C, skip, z, bias, state, y,
    D, x_stride_b, dt_stride_b, z_stride_b, b_stride_b, c_stride_b, b_stride_d, c_stride_d,
    b_stride_n, c_stride_n, s_stride_b, s_stride_d, s_stride_n,
    N: tl.constexpr, NP: tl.constexpr, BLOCK_D: tl.constexpr, SOFTPLUS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One step of this module's recurrence for BLOCK_D channels of one row; the state is updated in place."""
    num_d = tl.cdiv(D, BLOCK_D)
    i_b = (tl.program_id(0) // num_d).to(tl.int64)
    o_d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, NP)
    m_d = o_d < D
    m = m_d[:, None] & (o_n < N)[None, :]
    p_state = state + i_b * s_stride_b + o_d.to(tl.int64)[:, None] * s_stride_d + o_n[None, :] * s_stride_n
    b_h = tl.load(p_state, mask=m, other=0.0).to(tl.float32)
    b_a = tl.load(A + o_d[:, None] * N + o_n[None, :], mask=m, other=0.0).to(tl.float32)
    b_b = tl.load(B + i_b * b_stride_b + o_d[:, None] * b_stride_d + o_n[None, :] * b_stride_n, mask=m, other=0.0)
    b_c = tl.load(C + i_b * c_stride_b + o_d[:, None] * c_stride_d + o_n[None, :] * c_stride_n, mask=m, other=0.0)
    b_x = tl.load(x + i_b * x_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_bias = 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    # memory decides, so the precise exponentials are free
    b_dt = _step_size(tl.load(dt + i_b * dt_stride_b + o_d, mask=m_d, other=0.0), b_bias, SOFTPLUS, PTX)
    b_h = _decay(b_dt[:, None] * b_a * (1.0 if PTX else LOG2E), PTX) * b_h + (b_dt * b_x)[:, None] * b_b.to(tl.float32)
    tl.store(p_state, b_h.to(state.dtype.element_ty), mask=m)
    b_y = tl.sum(b_c.to(tl.float32) * b_h, 1)
    if skip is not None:
        b_y += tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32) * b_x
    if z is not None:
        b_z = tl.load(z + i_b * z_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_y *= b_z * _sigmoid(b_z, PTX)
    tl.store(y + i_b * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


def selective_scan_step_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """`selective_scan_step` for arguments that it has checked, without gradients; the state is updated in place."""
    batch, width = x.shape
    num_states = A.shape[1]
    padded = power_of_2(num_states)
    block_d = max(1, STEP_BLOCK // padded)
    y = torch.empty((batch, width), dtype=x.dtype, device=x.device)
    x, dt, z = (m if m is None or m.stride(1) == 1 else m.contiguous() for m in (x, dt, z))
    A, skip, bias = (m if m is None else m.contiguous() for m in (A, D, dt_bias))
    # [B, N] or [1, D, N]
    b_b, b_d, b_n = (B.stride(0), 0, B.stride(1)) if B.ndim == 2 else (0, *B.stride()[1:])
    c_b, c_d, c_n = (C.stride(0), 0, C.stride(1)) if C.ndim == 2 else (0, *C.stride()[1:])
    launch(
        _step_kernel, batch * cdiv(width, block_d),
        x, dt, A, B, C, skip, z, bias, state, y,
        width, x.stride(0), dt.stride(0), 0 if z is None else z.stride(0), b_b, c_b, b_d, c_d, b_n, c_n,
        *state.stride(), N=num_states, NP=padded, BLOCK_D=block_d, SOFTPLUS=dt_softplus, PTX=speaks_ptx(), num_warps=4,
    )  # fmt: skip
    return y
