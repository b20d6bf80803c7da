"""`_row_kernel` (one row) and `_rows_kernel` (up to 64 rows): y = act(f(x) W^T + b) + r, W is read once.

    f(x) = norm(x) * silu(gate), of one row; of several rows f(x) = x

An RMS norm over all of x is a factor of the whole row, so it multiplies the finished sum, and its mean square is
gathered while x is read for the product. A layer norm takes one pass over x before the product, and a norm of groups is
computed inside of each block, which holds whole groups. The first block of weights is loaded before anything else:
weights do not depend on the kernel before this one, which may still be running (`overlap_options`).

Layout:  x, gate [B, K] and residual [B, N] with contiguous channels; weight [N, K] with contiguous rows; y [B, N]
         dense.
float32: norms, gates, sums, activation and residual. `_rows_kernel` multiplies on matrix units, for which x is rounded
         to the dtype of the weight.
Cost:    2 N K bytes of weights in half precision, which every program reads for its own BLOCK_N outputs only; every
         program reads all of x. 2 B N K FLOPs.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subquad.kernels.launch import CompileOptions, cdiv, launch, overlap_options, power_of_2
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.skinny_linear import Norm

NONE, RMS, LAYER, GROUPS = 0, 1, 2, 3
"""Kinds of norms in the kernels."""
LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2}


class Tuning(NamedTuple):
    """Tile of one program: BLOCK_N outputs, in steps of BLOCK_K channels."""

    block_n: int
    block_k: int
    options: CompileOptions


@triton.jit
def prefetch(pointers, KEEP: tl.constexpr = False):
    """Fetches the lines at these addresses into the L2 cache, for NVIDIA GPUs. It is always safe: no value is read.

    KEEP: they are the last to leave it.
    """
    last: tl.constexpr = "prefetch.global.L2::evict_last [$1]; mov.u32 $0, 0;"
    asm: tl.constexpr = last if KEEP else "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _silu(b_p):
    return b_p / (1.0 + tl.exp(-b_p))


@triton.jit
def _activate(b_y, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        b_y = _silu(b_y)
    elif ACTIVATION == 2:
        # tanh(u) = 2 sigmoid(2 u) - 1, so that 0.5 y (1 + tanh(u)) = y sigmoid(2 u)
        b_y = b_y / (1.0 + tl.exp(-1.5957691216057308 * (b_y + 0.044715 * b_y * b_y * b_y)))
    return b_y


@triton.jit
def _moments(x, K, eps, BLOCK_K: tl.constexpr):
    """Mean and 1 / standard deviation of the row, by sums of x - x_0, which do not cancel."""
    b_first = tl.load(x).to(tl.float32)
    b_sum = tl.zeros([BLOCK_K], tl.float32)
    b_square = tl.zeros([BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_x = tl.load(x + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_x = tl.where(m_k, b_x - b_first, 0.0)
        b_sum += b_x
        b_square += b_x * b_x
    b_mean = tl.sum(b_sum) / K
    b_variance = tl.sum(b_square) / K - b_mean * b_mean
    return b_mean + b_first, tl.rsqrt(tl.maximum(b_variance, 0.0) + eps)


@triton.jit
def _prepare(
    b_x, gate, norm_weight, norm_bias, b_mean, b_scale, o_k, m_k, eps, NORM: tl.constexpr, GROUP: tl.constexpr
):
    """f(x) of one block [BLOCK_K] in float32; an RMS norm over the whole row is left without its scale."""
    BLOCK_K: tl.constexpr = b_x.shape[0]
    if NORM == 3:
        b_groups = tl.reshape(b_x, [BLOCK_K // GROUP, GROUP])
        b_square = tl.sum(b_groups * b_groups, 1) / GROUP
        b_x = tl.reshape(b_groups * tl.rsqrt(b_square + eps)[:, None], [BLOCK_K])
        b_x *= tl.load(norm_weight + o_k % GROUP, mask=m_k, other=0.0).to(tl.float32)
    elif NORM == 2:
        b_x = (b_x - b_mean) * b_scale * tl.load(norm_weight + o_k, mask=m_k, other=0.0).to(tl.float32)
        if norm_bias is not None:
            b_x += tl.load(norm_bias + o_k, mask=m_k, other=0.0).to(tl.float32)
    elif NORM == 1:
        b_x *= tl.load(norm_weight + o_k, mask=m_k, other=0.0).to(tl.float32)
    if gate is not None:
        b_x *= _silu(tl.load(gate + o_k, mask=m_k, other=0.0).to(tl.float32))
    return b_x


@triton.jit
def _row_kernel(
    x, weight, bias, norm_weight, norm_bias, gate, residual, y,
    N, K, eps, weight_stride_n,
    NORM: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of the only row."""
    K, weight_stride_n = K // UNIT * UNIT, weight_stride_n // UNIT * UNIT
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    p_w = weight + o_n.to(tl.int64)[:, None] * weight_stride_n
    o_first = tl.arange(0, BLOCK_K)
    b_w = tl.load(
        p_w + o_first[None, :], mask=m_n[:, None] & (o_first < K)[None, :], other=0.0, eviction_policy="evict_first"
    )
    if OVERLAP:
        if NORM and not GROUP:
            # one line by each program: all of them need the weights of the norm at the same time, and those of all
            # layers have room in the cache from one token to the next
            o_line = tl.program_id(0) * (LINE // norm_weight.dtype.element_ty.itemsize) + tl.arange(0, 1)
            prefetch(norm_weight + tl.minimum(o_line, K - 1), KEEP=True)
        gdc_launch_dependents()
        gdc_wait()
    if residual is not None:
        # read early, because it may have left the cache
        b_residual = tl.load(residual + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_mean, b_scale = 0.0, 0.0
    if NORM == 2:
        b_mean, b_scale = _moments(x, K, eps, BLOCK_K)
    b_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_square = tl.zeros([BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_x = tl.load(x + o_k, mask=m_k, other=0.0).to(tl.float32)
        if NORM == 1:
            b_square += b_x * b_x
        b_x = _prepare(b_x, gate, norm_weight, norm_bias, b_mean, b_scale, o_k, m_k, eps, NORM, GROUP)
        b_acc += b_w.to(tl.float32) * b_x[None, :]
        o_next = o_k + BLOCK_K
        b_w = tl.load(
            p_w + o_next[None, :], mask=m_n[:, None] & (o_next < K)[None, :], other=0.0, eviction_policy="evict_first"
        )
    b_y = tl.sum(b_acc, 1)
    if NORM == 1:
        b_y *= tl.rsqrt(tl.sum(b_square) / K + eps)
    if bias is not None:
        b_y += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_y = _activate(b_y, ACTIVATION)
    if residual is not None:
        b_y += b_residual
    tl.store(y + o_n, b_y.to(y.dtype.element_ty), mask=m_n)


@triton.jit
def _rows_kernel(
    x, weight, bias, residual, y,
    B, N, K, x_stride_b, residual_stride_b, weight_stride_n,
    ACTIVATION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows, of which there are at most BLOCK_B."""
    K, weight_stride_n, x_stride_b = K // UNIT * UNIT, weight_stride_n // UNIT * UNIT, x_stride_b // UNIT * UNIT
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_b = tl.arange(0, BLOCK_B)
    m_n, m_b = o_n < N, (o_b < B)[:, None]
    o_row = o_b.to(tl.int64)[:, None]
    p_w = weight + o_n.to(tl.int64)[None, :] * weight_stride_n
    b_acc = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_w = tl.load(p_w + o_k[:, None], mask=m_k[:, None] & m_n[None, :], other=0.0)
        b_x = tl.load(x + o_row * x_stride_b + o_k[None, :], mask=m_b & m_k[None, :], other=0.0)
        b_acc = tl.dot(b_x.to(b_w.dtype), b_w, b_acc)
    if bias is not None:
        b_acc += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    b_acc = _activate(b_acc, ACTIVATION)
    m_y = m_b & m_n[None, :]
    if residual is not None:
        p_residual = residual + o_row * residual_stride_b + o_n[None, :]
        b_acc += tl.load(p_residual, mask=m_y, other=0.0).to(tl.float32)
    tl.store(y + o_row * N + o_n[None, :], b_acc.to(y.dtype.element_ty), mask=m_y)


def tuning(rows: int, outputs: int, channels: int, group: int) -> Tuning:
    """The tile for B rows, N outputs and K channels; group: channels of a group of the norm, or 0."""
    widest = power_of_2(channels)
    if rows > 1:
        block_k = max(16, min(widest, 512 if rows <= 16 else 256))
        return Tuning(16, block_k, CompileOptions(num_warps=4, num_stages=3 if rows <= 16 else 4))
    if outputs < 1024:
        block_n, block_k, num_warps = 2, 4096, 8
    elif outputs < 4096:
        block_n, block_k, num_warps = 4, 1024, 4
    else:
        block_n, block_k, num_warps = 8, 512, 4
    return Tuning(block_n, max(min(widest, block_k), group), CompileOptions(num_warps=num_warps))


def skinny_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`skinny_linear` for arguments that were checked."""
    rows, channels = x.shape
    outputs = weight.shape[0]
    kind, group, eps, norm_weight, norm_bias = NONE, 0, 0.0, None, None
    if norm is not None:
        norm_weight, norm_bias, eps = dense(norm.weight), dense(norm.bias), norm.eps
        kind = RMS if norm.kind == "rms" else LAYER
        if norm.weight.shape[0] != channels:
            kind, group = GROUPS, norm.weight.shape[0]
    tile = tuning(rows, outputs, channels, group)
    x, gate, residual = dense_channels(x), dense_channels(gate), dense_channels(residual)
    dtype = weight.dtype if residual is None else torch.promote_types(weight.dtype, residual.dtype)
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    # Triton looks for multiples of 16 only, but those of 8 are enough for loads of 16 bytes
    sizes = channels | weight.stride(0) | (0 if rows == 1 else x.stride(0))
    unit = 8 if sizes % 16 == 8 else 1
    if rows == 1:
        launch(
            _row_kernel, cdiv(outputs, tile.block_n), x=x, weight=weight, bias=dense(bias), norm_weight=norm_weight,
            norm_bias=norm_bias, gate=gate, residual=residual, y=y, N=outputs, K=channels, eps=eps,
            weight_stride_n=weight.stride(0), NORM=kind, GROUP=group, ACTIVATION=ACTIVATIONS[activation],
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, UNIT=unit, **overlap_options(rows), **tile.options.keywords(),
        )  # fmt: skip
        return y
    launch(
        _rows_kernel, cdiv(outputs, tile.block_n), x=x, weight=weight, bias=dense(bias), residual=residual, y=y, B=rows,
        N=outputs, K=channels, x_stride_b=x.stride(0), residual_stride_b=0 if residual is None else residual.stride(0),
        weight_stride_n=weight.stride(0), ACTIVATION=ACTIVATIONS[activation], BLOCK_B=max(16, power_of_2(rows)),
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, UNIT=unit, **tile.options.keywords(),
    )  # fmt: skip
    return y
