"""One step of the recurrence, for decoding: the state is read and written once, which bounds the time."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.device import speaks_ptx
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.selective_scan.triton.arithmetic import LOG2E, decay_of, sigmoid, step_size
from subquad.kernels.selective_scan.triton.complex.step import _complex_step_kernel

STATE_ELEMENTS = 1024
"""Number of elements of the state on which one program works; a complex number is two."""
STRIDES = (
    "b_stride_b", "c_stride_b", "b_stride_d", "c_stride_d", "b_stride_n", "c_stride_n",
    "s_stride_b", "s_stride_d", "s_stride_n",
)  # fmt: skip
"""The strides of B, C and the state, in the order of the parameters of `_step_kernel`."""


@triton.jit
def _step_kernel(
    x, dt, A, B, C, skip, z, bias, state, y,
    D, x_stride_b, dt_stride_b, z_stride_b, b_stride_b, c_stride_b, b_stride_d, c_stride_d,
    b_stride_n, c_stride_n, s_stride_b, s_stride_d, s_stride_n,
    N: tl.constexpr, NP: tl.constexpr, BLOCK_D: tl.constexpr, SOFTPLUS: tl.constexpr, PTX: tl.constexpr,
    NEGATIVE: tl.constexpr,
):  # fmt: skip
    """One step for BLOCK_D channels of one batch row; the state [batch, D, N] is updated in place.

    x, dt, z, y: [batch, D] with contiguous channels.   A: [D, N], skip, bias: [D], contiguous.
    B, C:        any strides along batch, channels and states; NP is N rounded up to a power of two.
    """
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
    # the time is that of the memory traffic, so precise exponentials cost nothing
    b_dt = step_size(tl.load(dt + i_b * dt_stride_b + o_d, mask=m_d, other=0.0), b_bias, SOFTPLUS, PTX)
    b_decay = decay_of(b_dt[:, None] * b_a * (1.0 if PTX else LOG2E), PTX, NEGATIVE)
    b_h = b_decay * b_h + (b_dt * b_x)[:, None] * b_b.to(tl.float32)
    tl.store(p_state, b_h.to(state.dtype.element_ty), mask=m)
    b_y = tl.sum(b_c.to(tl.float32) * b_h, 1)
    if skip is not None:
        b_y += tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32) * b_x
    if z is not None:
        b_z = tl.load(z + i_b * z_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_y *= b_z * sigmoid(b_z, PTX)
    tl.store(y + i_b * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


def selective_scan_step_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    skip: Tensor | None = None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    softplus: bool = False,
    negative: bool = False,
) -> Tensor:
    """`selective_scan_step` without gradients, for arguments whose shapes were checked.

    skip is the paper's D, bias is added to dt. Returns y [batch, D] in the dtype of x; the state [batch, D, N] is
    updated in place and may have any strides. It is complex64 where A, B or C is complex.
    """
    batch, width = x.shape
    num_states = A.shape[1]
    padded = power_of_2(num_states)
    is_complex = any(m.is_complex() for m in (A, B, C, state))
    if is_complex:
        A, B, C = (m.to(torch.complex64).resolve_conj() for m in (A, B, C))
    block_d = max(1, STATE_ELEMENTS // (2 * padded if is_complex else padded))
    y = torch.empty(batch, width, dtype=x.dtype, device=x.device)
    x, dt, z = dense_channels(x), dense_channels(dt), dense_channels(z)
    (b_b, b_d, b_n), (c_b, c_d, c_n) = _map_strides(B), _map_strides(C)
    strides = dict(zip(STRIDES, (b_b, c_b, b_d, c_d, b_n, c_n, *state.stride()), strict=True))
    if is_complex:
        # in floats, and in the order of the kernel's parameters
        strides = {name: 2 * strides[name] for name in sorted(strides)}
    launch(
        _complex_step_kernel if is_complex else _step_kernel,
        batch * cdiv(width, block_d),
        x=x,
        dt=dt,
        A=dense(A),
        B=B,
        C=C,
        skip=dense(skip),
        z=z,
        bias=dense(bias),
        state=state,
        y=y,
        D=width,
        x_stride_b=x.stride(0),
        dt_stride_b=dt.stride(0),
        z_stride_b=0 if z is None else z.stride(0),
        **strides,
        N=num_states,
        NP=padded,
        BLOCK_D=block_d,
        SOFTPLUS=softplus,
        PTX=speaks_ptx(),
        **({} if is_complex else {"NEGATIVE": negative}),
        num_warps=4,
    )
    return y


def _map_strides(rows: Tensor) -> tuple[int, int, int]:
    """Strides along batch, channels and states of B or C, given as [batch, N], [batch, D, N] or, for all, [1, D, N]."""
    if rows.ndim == 2:
        return rows.stride(0), 0, rows.stride(1)
    return rows.stride(0) if rows.shape[0] > 1 else 0, rows.stride(1), rows.stride(2)
