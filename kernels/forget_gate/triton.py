"""`_gate_kernel`: log a and 1 - a of one tile of x; equations are in the package docstring.

Layout:  x [R, D] with contiguous channels; logits [layers, D] dense; results [R, D] dense, float32.
float32: everything between a load and a store.
Cost:    reads x once and writes both results; every program reads the logits of its channels.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense

BLOCK, ELEMENTS = 128, 2048
"""Channels of a program at most, and elements of x."""
MAX_AXIS = 65535
"""Maximum size of the second and of the third axis of a grid."""


# one kernel for all layers
@triton.jit(do_not_specialize=["layer"])
def _gate_kernel(
    x, logits, log_a, rest,
    R, D, x_stride_r, damping, layer,
    LAYERS: tl.constexpr, BLOCK_L: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS positions of BLOCK channels."""
    o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # two axes for the tiles of rows, because each ends at MAX_AXIS; neighbours in memory stay on the first
    i_r = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    o_r = (i_r * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    m = (o_r < R)[:, None] & (o_d < D)[None, :]
    b_x = tl.load(x + o_r[:, None] * x_stride_r + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    # exp of a number that is not positive: neither branch overflows
    b_e = tl.exp(-tl.abs(b_x))
    if logits is None:
        b_log = tl.minimum(b_x, 0.0) - _log1p(b_e)
        b_log /= damping
        if rest is not None:
            b_rest = -_expm1(b_log)
    else:
        o_l = tl.arange(0, BLOCK_L)
        m_l = (o_l < LAYERS)[:, None] & (o_d < D)[None, :]
        b_l = tl.load(logits + o_l[:, None] * D + o_d[None, :], mask=m_l, other=0.0).to(tl.float32)
        b_l = tl.where((o_l < LAYERS)[:, None], b_l, float("-inf"))
        b_w = tl.exp(b_l - tl.max(b_l, 0)[None, :])
        b_total = tl.sum(b_w, 0)
        m_bound = (o_l >= 1) & (o_l <= layer)
        b_bound = tl.sum(tl.where(m_bound[:, None], b_w, 0.0), 0) / b_total
        b_open = tl.sum(tl.where(m_bound[:, None], 0.0, b_w), 0) / b_total
        b_small = b_e / (1.0 + b_e)
        b_large = 1.0 / (1.0 + b_e)
        b_sigmoid = tl.where(b_x < 0, b_small, b_large)
        b_log = tl.log(b_bound[None, :] + b_open[None, :] * b_sigmoid)
        b_rest = b_open[None, :] * tl.where(b_x < 0, b_large, b_small)
    o_y = o_r[:, None] * D + o_d[None, :]
    tl.store(log_a + o_y, b_log, mask=m)
    if rest is not None:
        tl.store(rest + o_y, b_rest, mask=m)


@triton.jit
def _log1p(b_p):
    """log(1 + p) for 0 <= p <= 1, by the series of log((1 + s) / (1 - s)) with s = p / (2 + p) <= 1/3."""
    b_s = b_p / (2.0 + b_p)
    b_q = b_s * b_s
    b_y = 0.0
    for i in tl.static_range(17, 0, -2):
        b_y = b_y * b_q + 1.0 / i
    return 2.0 * b_s * b_y


@triton.jit
def _expm1(b_p):
    """exp(p) - 1 for p <= 0: its series where p is small, which exp(p) - 1 would round away."""
    b_y = 0.0 * b_p
    for i in tl.static_range(9, 0, -1):
        b_y = (b_y + 1.0) * b_p * (1.0 / i)
    return tl.where(b_p > -0.5, b_y, tl.exp(b_p) - 1.0)


def forget_gate_triton(
    x: Tensor, logits: Tensor | None, layer: int, damping: float, complement: bool
) -> tuple[Tensor, Tensor | None]:
    """`forget_gate` for arguments that were checked."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    log_a = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rest = torch.empty_like(log_a) if complement else None
    layers = 0 if logits is None else len(logits)
    block = min(BLOCK, power_of_2(width))
    tile_rows = min(power_of_2(len(rows)), ELEMENTS // block)
    tiles = cdiv(len(rows), tile_rows)
    slabs = cdiv(tiles, MAX_AXIS)
    launch(
        _gate_kernel,
        (cdiv(width, block), cdiv(tiles, slabs), slabs),
        x=rows,
        logits=dense(logits),
        log_a=log_a,
        rest=rest,
        R=len(rows),
        D=width,
        x_stride_r=rows.stride(0),
        damping=float(damping),
        layer=layer,
        LAYERS=layers,
        BLOCK_L=power_of_2(max(1, layers)),
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=4,
    )
    return log_a, rest
