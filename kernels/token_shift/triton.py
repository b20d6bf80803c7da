"""Token shift in Triton: one pass over memory in each direction (letters: package docstring, weighs="before").

    w_u,t = mu_u + delta_u,t,    c_t = x_{t-1} - x_t,    y_u,t = x_t + c_t w_u,t

The backward pass reads the same inputs again. With dX the gradient of X, and n_t the part of dy_t that belongs to the
input before t:

    n_t = sum_u dy_u,t w_u,t,        dx_t = sum_u dy_u,t - n_t + n_{t+1},        dx_0 = n_1 for the initial state x_0
    ddelta_u,t = dy_u,t c_t,         dmu_u = sum over all positions of dy_u,t c_t

n_{t+1} is zero behind the last position of a sequence. A program of the backward pass goes through CHUNK positions from
the last one to the first, so that n_{t+1} and x_t are in registers when they are needed, and reads one position more,
behind its own. It adds its own terms of dmu, and torch adds these partial sums, always in the same order.

Layout:  x, every y_u and their gradients [R, D] dense with R = B T positions; delta [U, R, D] dense; a program takes
         BLOCK_D channels.
float32: everything between a load and a store.
Bytes:   with n for the size of an element of x, R D n (1 + U) forward without delta, of which 1 is read, and
         R D n (1 + 2 U) with it; R D n (2 + U) backward without delta, of which 1 is written, and R D n (2 + 3 U) with
         it, of which 1 + U are written. The partial sums are 8 U D R / CHUNK, written and read.
FLOPs:   about 4 U R D forward and 7 U R D backward. Deterministic.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.launch import CompileOptions, cdiv, launch, power_of_2
from subquad.kernels.layout import dense
from subquad.kernels.token_shift import MAX_USES

MAX_BLOCK_D, NUM_WARPS = 512, 4
"""Maximum channels of a tile: four for each thread, because the backward pass holds several tiles for each use."""
ELEMENTS = 2048
"""Elements of a tile of the forward pass, which has several positions."""
CHUNK = 32
"""Positions of a program of the backward pass."""
BACKWARD = CompileOptions(NUM_WARPS, max_registers=96)
"""Without the limit three programs of U = 5 with delta run on a multiprocessor at once, with it five."""


@triton.jit
def _load(x, o, m):
    return tl.load(x + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _store(x, o, b_x, m):
    tl.store(x + o, b_x.to(x.dtype.element_ty), mask=m)


@triton.jit
def _token_shift_fwd_kernel(
    x, mu, delta, initial, y_0, y_1, y_2, y_3, y_4, y_5,
    R, T, D, U: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """ROWS positions of BLOCK_D channels."""
    ys = (y_0, y_1, y_2, y_3, y_4, y_5)
    num_d = tl.cdiv(D, BLOCK_D)
    i_d, i_r = tl.program_id(0) % num_d, tl.program_id(0) // num_d
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    first = i_r.to(tl.int64) * ROWS
    o_t = ((first % T).to(tl.int32) + tl.arange(0, ROWS))[:, None]
    o_r = (first + tl.arange(0, ROWS))[:, None]
    m_d = o_d < D
    m = (o_r < R) & m_d
    # a tile may begin in one sequence and end in another
    m_first = o_t % T == 0
    o = o_r * D + o_d
    size = tl.cast(R, tl.int64) * D
    b_x = _load(x, o, m)
    b_before = _load(x, o - D, m & ~m_first)
    if initial is not None:
        b_before += _load(initial, (first // T + o_t // T) * D + o_d, m & m_first)
    b_change = b_before - b_x
    for u in tl.static_range(U):
        b_w = _load(mu, u * D + o_d, m_d)
        if delta is not None:
            b_w += _load(delta, u * size + o, m)
        _store(ys[u], o, b_x + b_change * b_w, m)


@triton.jit
def _token_shift_bwd_kernel(
    x, mu, delta, initial, dy_0, dy_1, dy_2, dy_3, dy_4, dy_5, dx, ddelta, dinitial, partial,
    R, T, D, U: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """CHUNK positions of BLOCK_D channels, from the last to the first; partial is [programs along R, U, D]."""
    dys = (dy_0, dy_1, dy_2, dy_3, dy_4, dy_5)
    num_d = tl.cdiv(D, BLOCK_D)
    i_d, i_r = tl.program_id(0) % num_d, tl.program_id(0) // num_d
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    size = tl.cast(R, tl.int64) * D
    first = i_r.to(tl.int64) * CHUNK
    end = tl.minimum(first + CHUNK, R)
    # the position behind the chunk, where the sequence goes on there
    m_next = o_d < tl.where((end < R) & (end % T != 0), D, 0)
    b_next = tl.zeros([BLOCK_D], tl.float32)
    weights, sums = (), ()
    for u in tl.static_range(U):
        b_w = _load(mu, u * D + o_d, m_d)
        weights += (b_w,)
        sums += (tl.zeros([BLOCK_D], tl.float32),)
        if delta is not None:
            b_w += _load(delta, u * size + end * D + o_d, m_next)
        b_next += _load(dys[u], end * D + o_d, m_next) * b_w
    b_x = _load(x, (end - 1) * D + o_d, m_d)
    # counted down, because a division of 64 bits at every position would take longer than the arithmetic
    i_b, t = (end - 1) // T, (end - 1) % T
    for i in range(CHUNK):
        row = end - 1 - i
        is_first = t == 0
        m = o_d < tl.where(row >= first, D, 0)
        m_last = o_d < tl.where((row >= first) & (row > 0), D, 0)
        m_first = o_d < tl.where((row >= first) & is_first, D, 0)
        o = row * D + o_d
        # the input of the row before is the next one to be worked on, even where another sequence begins
        b_last = _load(x, o - D, m_last)
        b_before = tl.where(is_first, 0.0, b_last)
        if initial is not None:
            b_before += _load(initial, i_b * D + o_d, m_first)
        b_change = b_before - b_x
        b_dx = b_next
        b_next = tl.zeros([BLOCK_D], tl.float32)
        new_sums = ()
        for u in tl.static_range(U):
            b_dy = _load(dys[u], o, m)
            b_w = weights[u]
            if delta is not None:
                b_w += _load(delta, u * size + o, m)
            b_dw = b_dy * b_change
            if delta is not None:
                _store(ddelta, u * size + o, b_dw, m)
            new_sums += (sums[u] + b_dw,)
            b_dx += b_dy
            b_next += b_dy * b_w
        sums = new_sums
        _store(dx, o, b_dx - b_next, m)
        if initial is not None:
            _store(dinitial, i_b * D + o_d, b_next, m_first)
        b_next = tl.where(is_first, 0.0, b_next)
        b_x = b_last
        i_b = tl.where(is_first, i_b - 1, i_b)
        t = tl.where(is_first, T - 1, t - 1)
    for u in tl.static_range(U):
        tl.store(partial + (i_r.to(tl.int64) * U + u) * D + o_d, sums[u], mask=m_d)


def _sizes(x: Tensor, uses: int) -> tuple[int, int, dict[str, int]]:
    """Tiles along D, the width of a tile, and the arguments that the kernels share, for x [B, T, D]."""
    batch, length, width = x.shape
    block_d = min(MAX_BLOCK_D, power_of_2(width))
    return cdiv(width, block_d), block_d, {"R": batch * length, "T": length, "D": width, "U": uses}


def _named(name: str, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The tensors of all uses as arguments; those of uses that do not exist are not touched."""
    return {f"{name}_{u}": tensors[min(u, len(tensors) - 1)] for u in range(MAX_USES)}


def token_shift_fwd(x: Tensor, mu: Tensor, delta: Tensor | None, initial: Tensor | None) -> tuple[Tensor, ...]:
    """y_1 .. y_U of inputs that are contiguous."""
    ys = tuple(torch.empty_like(x) for _ in range(len(mu)))
    num_d, block_d, sizes = _sizes(x, len(mu))
    rows = ELEMENTS // block_d
    launch(
        _token_shift_fwd_kernel, num_d * cdiv(sizes["R"], rows), x=x, mu=mu, delta=delta, initial=initial,
        **_named("y", ys), **sizes, ROWS=rows, BLOCK_D=block_d, num_warps=NUM_WARPS,
    )  # fmt: skip
    return ys


def token_shift_bwd(
    x: Tensor, mu: Tensor, delta: Tensor | None, initial: Tensor | None, gradients: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, mu, delta and initial, from those of the results."""
    num_d, block_d, sizes = _sizes(x, len(mu))
    programs = cdiv(sizes["R"], CHUNK)
    dx, ddelta, dinitial = (None if z is None else torch.empty_like(z) for z in (x, delta, initial))
    partial = torch.empty(programs, *mu.shape, dtype=torch.float32, device=x.device)
    launch(
        _token_shift_bwd_kernel, num_d * programs, x=x, mu=mu, delta=delta, initial=initial,
        **_named("dy", tuple(dense(z) for z in gradients)), dx=dx, ddelta=ddelta, dinitial=dinitial, partial=partial,
        **sizes, CHUNK=CHUNK, BLOCK_D=block_d, **BACKWARD.keywords(),
    )  # fmt: skip
    return dx, partial.sum(0).to(mu.dtype), ddelta, dinitial


class TokenShift(OnceDifferentiable):
    """x, mu, delta and the initial state to y_1 .. y_U."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mu: Tensor, delta: Tensor | None, initial: Tensor | None) -> tuple[Tensor, ...]:
        save(ctx, x, mu, delta, initial)
        return token_shift_fwd(x, mu, delta, initial)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mu, delta, initial = saved(ctx)
        return token_shift_bwd(x, mu, delta, initial, gradients)


def token_shift_triton(x: Tensor, mu: Tensor, delta: Tensor | None, initial: Tensor | None) -> tuple[Tensor, ...]:
    """`token_shift` for arguments that were checked, with mu as the weight of the input before."""
    inputs = dense(x), dense(mu), dense(delta), dense(initial)
    return TokenShift.apply(*inputs) if needs_gradient(*inputs) else token_shift_fwd(*inputs)
