"""sLSTM in Triton; letters and formulas are those of `kernels.slstm`.

A program owns the rows of a tile of the batch in one head and goes through time. The matrices R of its head stay in
registers, and h R is a product on matrix units, BLOCK_B rows at a time. Gates, states and their gradients are float32;
h and R are multiplied in the dtype of x, float32 numbers as `_plan` says.

Forward keeps c, n and m of every step, 12 bytes for each channel. Backward computes the gates again from x and the
output of the step before, and goes back through time with the gradients of h, c and n:

    da^o = dh sigmoid(a^o) (1 - sigmoid(a^o)) c / n,    dc += dh sigmoid(a^o) / n,    dn -= dh h / n
    da^z = dc i (1 - tanh(a^z)^2),   da^i = i (dc tanh(a^z) + dn),   da^f = f sigmoid(-a^f) (dc c_{t-1} + dn n_{t-1})
    dh_{t-1} = dy_{t-1} + sum over g of da^g (R^g)^T,   dc_{t-1} = f dc,   dn_{t-1} = f dn

with i = exp(a^i - m_t) and f = exp(log sigmoid(a^f) + m_{t-1} - m_t). The gradient of R^g is the sum of h_{t-1}^T da^g
over batch and time. Its terms do not wait for each other, so another kernel adds them up. Results are deterministic.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.device import float32_products
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.slstm.reference import EMPTY

BLOCK_B = 16
"""Rows of the batch in a program, the least that a product on matrix units takes."""
CHUNK = 1024
"""Number of positions, counted over all rows of the batch, whose terms one program adds to the gradient of R."""
BLOCK_R = 64
"""Number of positions that one matrix product sums over."""


@triton.jit
def _product(b_a, b_b, PRECISION: tl.constexpr):
    """a b in float32, of operands of one dtype."""
    return tl.dot(b_a, b_b, input_precision=PRECISION)


@triton.jit
def _log_sigmoid(b_a):
    return tl.minimum(b_a, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(b_a)))


@triton.jit
def _tanh(b_a):
    return 2.0 * tl.sigmoid(2.0 * b_a) - 1.0


@triton.jit
def _matrix(recurrent, i_gate, i_h, o_k, m_k, H, K, dtype: tl.constexpr):
    """R^g [K, K] of a head, in the dtype of the products."""
    p = recurrent + (i_gate * H + i_h).to(tl.int64) * K * K + o_k[:, None] * K + o_k[None, :]
    return tl.load(p, mask=m_k[:, None] & m_k[None, :], other=0.0).to(dtype)


@triton.jit
def _bias(bias, i_gate, i_h, o_k, m_k, H, K):
    """b^g [1, K] of a head in float32; zeros where there is none."""
    b = tl.zeros(o_k.shape, tl.float32)
    if bias is not None:
        b = tl.load(bias + (i_gate * H + i_h) * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    return b[None, :]


@triton.jit
def _gate(p_x, m, b_bias, b_last, r, PRECISION: tl.constexpr):
    """a^g = x^g + b^g + h R^g in float32."""
    return tl.load(p_x, mask=m, other=0.0).to(tl.float32) + b_bias + _product(b_last, r, PRECISION)


@triton.jit
def _state(states, o_b, i_part, i_h, o_k, m, stride_b, stride_p, H, K, EMPTY_SCALE: tl.constexpr):
    """One part of states [rows, parts, H, K] in float32; where there are none, zero or the empty scale."""
    b = tl.zeros(m.shape, tl.float32) + EMPTY_SCALE
    if states is not None:
        p = states + o_b[:, None] * stride_b + i_part * stride_p + i_h * K + o_k[None, :]
        b = tl.load(p, mask=m, other=0.0).to(tl.float32)
    return b


@triton.jit
def _slstm_fwd_kernel(
    x, recurrent, bias, initial, y, states, final,
    B, T, H, K, x_stride_b, x_stride_t, x_stride_g, x_stride_h, s_stride_b, s_stride_p,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """h [B, T, H, K], c, n and m of every step [B, T, 3, H, K] where `states` is given, and the final state."""
    i_h, i_b = tl.program_id(0) % H, tl.program_id(0) // H
    o_b = (i_b * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < K
    m = (o_b < B)[:, None] & m_k[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    r_i = _matrix(recurrent, 0, i_h, o_k, m_k, H, K, dtype)
    r_f = _matrix(recurrent, 1, i_h, o_k, m_k, H, K, dtype)
    r_z = _matrix(recurrent, 2, i_h, o_k, m_k, H, K, dtype)
    r_o = _matrix(recurrent, 3, i_h, o_k, m_k, H, K, dtype)
    bias_i = _bias(bias, 0, i_h, o_k, m_k, H, K)
    bias_f = _bias(bias, 1, i_h, o_k, m_k, H, K)
    bias_z = _bias(bias, 2, i_h, o_k, m_k, H, K)
    bias_o = _bias(bias, 3, i_h, o_k, m_k, H, K)
    b_h = _state(initial, o_b, 0, i_h, o_k, m, s_stride_b, s_stride_p, H, K, 0.0)
    b_c = _state(initial, o_b, 1, i_h, o_k, m, s_stride_b, s_stride_p, H, K, 0.0)
    b_n = _state(initial, o_b, 2, i_h, o_k, m, s_stride_b, s_stride_p, H, K, 0.0)
    b_m = _state(initial, o_b, 3, i_h, o_k, m, s_stride_b, s_stride_p, H, K, EMPTY)
    # a pointer for each gate, because multiples of the stride may exceed int32
    x_f = x + x_stride_g
    x_z = x_f + x_stride_g
    x_o = x_z + x_stride_g
    o_x = i_h.to(tl.int64) * x_stride_h + o_b[:, None] * x_stride_b + o_k[None, :]
    p_y = y + (o_b * T * H)[:, None] * K + i_h * K + o_k[None, :]
    for t in range(T):
        b_last = b_h.to(dtype)
        b_i = _gate(x + o_x, m, bias_i, b_last, r_i, PRECISION)
        b_f = _gate(x_f + o_x, m, bias_f, b_last, r_f, PRECISION)
        b_z = _gate(x_z + o_x, m, bias_z, b_last, r_z, PRECISION)
        b_o = _gate(x_o + o_x, m, bias_o, b_last, r_o, PRECISION)
        b_kept = _log_sigmoid(b_f) + b_m
        b_m = tl.maximum(b_kept, b_i)
        b_keep, b_write = tl.exp(b_kept - b_m), tl.exp(b_i - b_m)
        b_c = b_keep * b_c + b_write * _tanh(b_z)
        b_n = b_keep * b_n + b_write
        b_h = tl.sigmoid(b_o) * b_c / tl.maximum(b_n, 1.0)
        tl.store(p_y, b_h.to(y.dtype.element_ty), mask=m)
        if states is not None:
            p_s = states + ((o_b * T + t) * 3 * H)[:, None] * K + i_h * K + o_k[None, :]
            tl.store(p_s, b_c, mask=m)
            tl.store(p_s + H * K, b_n, mask=m)
            tl.store(p_s + 2 * H * K, b_m, mask=m)
        o_x += x_stride_t
        p_y += H * K
    if final is not None:
        p_final = final + o_b[:, None] * s_stride_b + i_h * K + o_k[None, :]
        tl.store(p_final, b_h.to(final.dtype.element_ty), mask=m)
        tl.store(p_final + s_stride_p, b_c.to(final.dtype.element_ty), mask=m)
        tl.store(p_final + 2 * s_stride_p, b_n.to(final.dtype.element_ty), mask=m)
        tl.store(p_final + 3 * s_stride_p, b_m.to(final.dtype.element_ty), mask=m)


@triton.jit
def _slstm_bwd_kernel(
    x, recurrent, bias, initial, y, states, dy, dfinal, dx, dinitial,
    B, T, H, K, x_stride_b, x_stride_t, x_stride_g, x_stride_h,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Computes dx [B, T, 4, H, K] and the gradient of the initial state.

    y, states, dy, dfinal, dx and dinitial are dense.
    """
    i_h, i_b = tl.program_id(0) % H, tl.program_id(0) // H
    o_b = (i_b * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < K
    m = (o_b < B)[:, None] & m_k[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    r_i = _matrix(recurrent, 0, i_h, o_k, m_k, H, K, dtype)
    r_f = _matrix(recurrent, 1, i_h, o_k, m_k, H, K, dtype)
    r_z = _matrix(recurrent, 2, i_h, o_k, m_k, H, K, dtype)
    r_o = _matrix(recurrent, 3, i_h, o_k, m_k, H, K, dtype)
    bias_i = _bias(bias, 0, i_h, o_k, m_k, H, K)
    bias_f = _bias(bias, 1, i_h, o_k, m_k, H, K)
    bias_z = _bias(bias, 2, i_h, o_k, m_k, H, K)
    bias_o = _bias(bias, 3, i_h, o_k, m_k, H, K)
    width = 4 * H * K
    b_dh = _state(dfinal, o_b, 0, i_h, o_k, m, width, H * K, H, K, 0.0)
    b_dc = _state(dfinal, o_b, 1, i_h, o_k, m, width, H * K, H, K, 0.0)
    b_dn = _state(dfinal, o_b, 2, i_h, o_k, m, width, H * K, H, K, 0.0)
    o_x = tl.cast(T - 1, tl.int64) * x_stride_t + i_h.to(tl.int64) * x_stride_h
    p_x = x + o_b[:, None] * x_stride_b + o_x + o_k[None, :]
    stride_g = tl.cast(x_stride_g, tl.int64)
    p_y = ((o_b * T + T - 1) * H)[:, None] * K + i_h * K + o_k[None, :]
    p_s = states + ((o_b * T + T - 1) * 3 * H)[:, None] * K + i_h * K + o_k[None, :]
    p_dx = dx + ((o_b * T + T - 1) * 4 * H)[:, None] * K + i_h * K + o_k[None, :]
    for back in range(T):
        first = back == T - 1
        # the state before this step: that of the step before, or the initial one
        m_before = m & (not first)
        b_last = tl.load(y + p_y - H * K, mask=m_before, other=0.0)
        b_c_last = tl.load(p_s - 3 * H * K, mask=m_before, other=0.0)
        b_n_last = tl.load(p_s - 2 * H * K, mask=m_before, other=0.0)
        b_m_last = tl.load(p_s - H * K, mask=m_before, other=EMPTY)
        if first:
            b_last = _state(initial, o_b, 0, i_h, o_k, m, width, H * K, H, K, 0.0).to(dtype)
            b_c_last = _state(initial, o_b, 1, i_h, o_k, m, width, H * K, H, K, 0.0)
            b_n_last = _state(initial, o_b, 2, i_h, o_k, m, width, H * K, H, K, 0.0)
            b_m_last = _state(initial, o_b, 3, i_h, o_k, m, width, H * K, H, K, EMPTY)
        b_i = _gate(p_x, m, bias_i, b_last, r_i, PRECISION)
        b_f = _gate(p_x + stride_g, m, bias_f, b_last, r_f, PRECISION)
        b_z = _gate(p_x + 2 * stride_g, m, bias_z, b_last, r_z, PRECISION)
        b_o = _gate(p_x + 3 * stride_g, m, bias_o, b_last, r_o, PRECISION)
        b_c = tl.load(p_s, mask=m, other=0.0)
        b_n = tl.maximum(tl.load(p_s + H * K, mask=m, other=1.0), 1.0)
        b_m = tl.load(p_s + 2 * H * K, mask=m, other=0.0)
        b_keep = tl.exp(_log_sigmoid(b_f) + b_m_last - b_m)
        b_write = tl.exp(b_i - b_m)
        b_cell, b_open = _tanh(b_z), tl.sigmoid(b_o)
        b_dh += tl.load(dy + p_y, mask=m, other=0.0).to(tl.float32)
        b_mean = b_c / b_n
        b_do = b_dh * b_mean * b_open * (1.0 - b_open)
        b_dmean = b_dh * b_open / b_n
        b_dc += b_dmean
        b_dn -= b_dmean * b_mean
        b_dz = b_dc * b_write * (1.0 - b_cell * b_cell)
        b_di = b_write * (b_dc * b_cell + b_dn)
        b_df = b_keep * tl.sigmoid(-b_f) * (b_dc * b_c_last + b_dn * b_n_last)
        b_dc *= b_keep
        b_dn *= b_keep
        g_i, g_f, g_z, g_o = b_di.to(dtype), b_df.to(dtype), b_dz.to(dtype), b_do.to(dtype)
        tl.store(p_dx, g_i, mask=m)
        tl.store(p_dx + H * K, g_f, mask=m)
        tl.store(p_dx + 2 * H * K, g_z, mask=m)
        tl.store(p_dx + 3 * H * K, g_o, mask=m)
        b_dh = _product(g_i, tl.trans(r_i), PRECISION) + _product(g_f, tl.trans(r_f), PRECISION)
        b_dh += _product(g_z, tl.trans(r_z), PRECISION) + _product(g_o, tl.trans(r_o), PRECISION)
        p_x -= x_stride_t
        p_y -= H * K
        p_s -= 3 * H * K
        p_dx -= 4 * H * K
    if dinitial is not None:
        p_first = dinitial + o_b[:, None] * width + i_h * K + o_k[None, :]
        tl.store(p_first, b_dh, mask=m)
        tl.store(p_first + H * K, b_dc, mask=m)
        tl.store(p_first + 2 * H * K, b_dn, mask=m)
        tl.store(p_first + 3 * H * K, tl.zeros_like(b_dn), mask=m)


@triton.jit
def _slstm_weights_kernel(
    initial, y, dx, partial, B, T, H, K,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums h_{t-1}^T da^g over one chunk of positions, into partial [chunks, 4, H, K, K]. All tensors are dense."""
    i_m, i_chunk = tl.program_id(0) % (4 * H), tl.program_id(0) // (4 * H)
    i_h = i_m % H
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < K
    b_dr = tl.zeros([BLOCK_K, BLOCK_K], tl.float32)
    for start in range(0, CHUNK, BLOCK_R):
        o_r = i_chunk.to(tl.int64) * CHUNK + start + tl.arange(0, BLOCK_R)
        o_b = o_r // T
        m = (o_b < B)[:, None] & m_k[None, :]
        # the first position of a row has no output before it
        m_first = o_r == o_b * T
        b_h = tl.load(y + ((o_r - 1) * H + i_h)[:, None] * K + o_k[None, :], mask=m & ~m_first[:, None], other=0.0)
        if initial is not None:
            p_initial = initial + (o_b * 4 * H + i_h)[:, None] * K + o_k[None, :]
            b_first = tl.load(p_initial, mask=m & m_first[:, None], other=0.0).to(b_h.dtype)
            b_h = tl.where(m_first[:, None], b_first, b_h)
        b_da = tl.load(dx + (o_r * 4 * H + i_m)[:, None] * K + o_k[None, :], mask=m, other=0.0)
        b_dr += _product(tl.trans(b_h), b_da, PRECISION)
    p_partial = partial + (i_chunk.to(tl.int64) * 4 * H + i_m) * K * K + o_k[:, None] * K + o_k[None, :]
    tl.store(p_partial, b_dr, mask=m_k[:, None] & m_k[None, :])


class Plan(NamedTuple):
    """Number of programs and shared arguments of the two kernels that go through time."""

    programs: int
    sizes: dict[str, Any]
    options: dict[str, Any]


def _plan(x: Tensor) -> Plan:
    batch, length, _, heads, width = x.shape
    tiles, block_k = cdiv(batch, BLOCK_B), max(16, power_of_2(width))
    stride_b, stride_t, stride_g, stride_h, _ = x.stride()
    sizes = {
        "B": batch, "T": length, "H": heads, "K": width,
        "x_stride_b": stride_b, "x_stride_t": stride_t, "x_stride_g": stride_g, "x_stride_h": stride_h,
    }  # fmt: skip
    # at K 64, matrices that are split into tf32 parts would take more shared memory than an H200 has
    precision = "tf32" if x.dtype != torch.float32 else float32_products() if block_k <= 32 else "ieee"
    options = {"BLOCK_B": BLOCK_B, "BLOCK_K": block_k, "PRECISION": precision, "EMPTY": EMPTY}
    return Plan(tiles * heads, sizes, {**options, "num_warps": 4 if block_k <= 32 else 8})


def _forward(
    x: Tensor, recurrent: Tensor, bias: Tensor | None, initial: Tensor | None, final: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """h of every step, and c, n and m of every step where they are to be kept. `final` is filled."""
    batch, length, _, heads, width = x.shape
    y = torch.empty(batch, length, heads, width, dtype=x.dtype, device=x.device)
    states = torch.empty(batch, length, 3, heads, width, dtype=torch.float32, device=x.device) if keep else None
    work = _plan(x)
    given = initial if initial is not None else final
    stride_b, stride_p = (0, 0) if given is None else given.stride()[:2]
    launch(
        _slstm_fwd_kernel, work.programs, x=x, recurrent=recurrent, bias=bias, initial=initial, y=y, states=states,
        final=final, **work.sizes, s_stride_b=stride_b, s_stride_p=stride_p, **work.options,
    )  # fmt: skip
    return y, states


def _weights(initial: Tensor | None, y: Tensor, dx: Tensor, work: Plan) -> Tensor:
    """Returns dR [4, H, K, K] in float32."""
    batch, length, _, heads, width = dx.shape
    chunks = cdiv(batch * length, CHUNK)
    partial = torch.empty(chunks, 4, heads, width, width, dtype=torch.float32, device=dx.device)
    launch(
        _slstm_weights_kernel, chunks * 4 * heads, initial=initial, y=y, dx=dx, partial=partial,
        B=batch, T=length, H=heads, K=width, BLOCK_R=BLOCK_R, BLOCK_K=work.options["BLOCK_K"], CHUNK=CHUNK,
        PRECISION=work.options["PRECISION"], num_warps=4,
    )  # fmt: skip
    return partial.sum(0)


def _empty_like(x: Tensor) -> Tensor:
    batch, _, _, heads, width = x.shape
    return torch.empty(batch, 4, heads, width, dtype=torch.float32, device=x.device)


class SLSTM(OnceDifferentiable):
    """sLSTM of inputs with contiguous channels; gradients for all tensors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, recurrent: Tensor, bias: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        final = _empty_like(x)
        y, states = _forward(x, recurrent, bias, initial, final, keep=True)
        save(ctx, x, recurrent, bias, initial, y, states)
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, recurrent, bias, initial, y, states = saved(ctx)
        dy = torch.zeros_like(y) if dy is None else dense(dy)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dinitial = None if initial is None else _empty_like(x)
        work = _plan(x)
        launch(
            _slstm_bwd_kernel, work.programs, x=x, recurrent=recurrent, bias=bias, initial=initial, y=y, states=states,
            dy=dy, dfinal=dense(dfinal), dx=dx, dinitial=dinitial, **work.sizes, **work.options,
        )  # fmt: skip
        drecurrent = _weights(initial, y, dx, work)
        if dinitial is not None:
            dinitial = dinitial.to(initial.dtype)
        dbias = None if bias is None else dx.sum((0, 1), dtype=torch.float32).to(bias.dtype)
        return dx, drecurrent.to(recurrent.dtype), dbias, dinitial


def slstm_triton(
    x: Tensor,
    recurrent: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    return_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`slstm` for arguments whose shapes were checked: h, and the final state in float32, which may be None."""
    x, recurrent, bias = dense_channels(x), dense(recurrent), dense(bias)
    initial = None if initial_state is None else dense(initial_state.float())
    if needs_gradient(x, recurrent, bias, initial):
        y, final = SLSTM.apply(x, recurrent, bias, initial)
        return y, final
    state = _empty_like(x) if return_final_state else None
    y, _ = _forward(x, recurrent, bias, initial, state, keep=False)
    return y, state


def slstm_step_triton(x: Tensor, recurrent: Tensor, bias: Tensor | None, state: Tensor) -> Tensor:
    """`slstm_step` without gradients, for arguments whose shapes were checked.

    The state is updated in place where its heads and channels are dense, else by a copy.
    """
    x, recurrent, bias = dense_channels(x.unsqueeze(1)), dense(recurrent), dense(bias)
    place = state if state.stride()[2:] == (x.shape[-1], 1) else state.contiguous()
    # a program reads its part of the state before it writes it
    y, _ = _forward(x, recurrent, bias, place, place, keep=False)
    if place is not state:
        state.copy_(place)
    return y.squeeze(1)
