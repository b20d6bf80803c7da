"""The gradient of a lookup: `_runs_kernel` and `_join_kernel` add the rows of equal tokens, sorted before.

    dweight[v] = sum_{i: token_i = v} dy_i

A program of `_runs_kernel` takes CHUNK rows in the order of their tokens. It adds the rows of each run of equal tokens
by a segmented scan. A run within the chunk is complete and is written. Of a run that crosses the end of the chunk, the
sum so far is the head of the run, and of one that crosses its start the sum is a tail. A program of `_join_kernel` adds
the tails of the chunks that follow to one head, JOIN of them at a time.

Layout:  sorted tokens [R] and their places `order` [R]; dy [R, D] with contiguous channels; heads, tails [chunks, D];
         dweight [V, D], dense, zero before.
float32: everything.
Limits:  none; offsets are int64. No atomics: two calls give the same bits.
Cost:    reads dy once and writes the rows of the tokens that occur; 1 FLOP an element, and a sort of R integers.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense_channels

CHUNK = 64
"""Rows of a program."""
BLOCK_D = 64
"""Maximum number of channels of a program."""
JOIN = 32
"""Tails that are added at once."""


@triton.jit
def _add_segments(a_sum, a_starts, b_sum, b_starts):
    """Joins two neighbouring spans: the sum of the last segment, and whether a segment starts in the span."""
    return tl.where(b_starts != 0, b_sum, a_sum + b_sum), a_starts | b_starts


@triton.jit
def _runs_kernel(tokens, order, dy, dweight, heads, tails, R, D, dy_stride, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sums of the runs of one chunk."""
    i_c = tl.program_id(0).to(tl.int64)
    o_r = i_c * CHUNK + tl.arange(0, CHUNK)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_r, m_d = o_r < R, o_d < D
    b_token = tl.load(tokens + o_r, mask=m_r, other=-1).to(tl.int64)
    b_before = tl.load(tokens + o_r - 1, mask=m_r & (o_r > 0), other=-1).to(tl.int64)
    b_after = tl.load(tokens + o_r + 1, mask=o_r + 1 < R, other=-1).to(tl.int64)
    m = m_r[:, None] & m_d[None, :]
    b_row = tl.load(order + o_r, mask=m_r, other=0).to(tl.int64)
    b_x = tl.load(dy + b_row[:, None] * dy_stride + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    b_starts = (b_token != b_before).to(tl.int32)
    b_sum, b_started = tl.associative_scan((b_x, b_starts[:, None] + tl.zeros_like(b_x).to(tl.int32)), 0, _add_segments)
    m_last, m_end = m & (b_token != b_after)[:, None], m & (o_r % CHUNK == CHUNK - 1)[:, None]
    m_head = b_started != 0
    tl.store(dweight + b_token[:, None] * D + o_d[None, :], b_sum.to(dweight.dtype.element_ty), mask=m_last & m_head)
    o_c = i_c * D + o_d[None, :] + tl.zeros_like(b_row)[:, None]
    tl.store(tails + o_c, b_sum, mask=(m_last | m_end) & (b_started == 0))
    tl.store(heads + o_c, b_sum, mask=m_end & (b_token == b_after)[:, None] & m_head)


@triton.jit
def _join_kernel(tokens, dweight, heads, tails, R, D, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, JOIN: tl.constexpr):
    """The sum of the run that starts in this chunk and crosses its end, where there is one."""
    i_c = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    start, end = i_c * CHUNK, (i_c + 1) * CHUNK
    token = tl.load(tokens + end - 1)
    crosses = tl.load(tokens + end) == token
    # a chunk that the run fills from an earlier one on has no head
    begins = (tl.load(tokens + start) != token) | (tl.load(tokens + tl.maximum(start - 1, 0)) != token) | (i_c == 0)
    if crosses & begins:
        b_sum = tl.load(heads + i_c * D + o_d, mask=m_d, other=0.0)
        first, more = i_c + 1, True
        while more:
            o_c = first + tl.arange(0, JOIN)
            m_c = o_c * CHUNK < R
            m_c = m_c & (tl.load(tokens + o_c * CHUNK, mask=m_c, other=-1) == token)
            b_tails = tl.load(tails + o_c[:, None] * D + o_d[None, :], mask=m_c[:, None] & m_d[None, :], other=0.0)
            b_sum += tl.sum(b_tails, 0)
            first += JOIN
            more = tl.min(m_c.to(tl.int32), 0) != 0
        tl.store(dweight + token.to(tl.int64) * D + o_d, b_sum.to(dweight.dtype.element_ty), mask=m_d)


def embedding_gradient(tokens: Tensor, dy: Tensor, num_tokens: int, dtype: torch.dtype | None = None) -> Tensor:
    """dweight [num_tokens, D] in `dtype`, or that of dy, from tokens [R] and dy [R, D] with R >= 1."""
    rows, width = dy.shape
    # a radix sort takes a pass for each byte
    narrow = torch.int16 if num_tokens <= 1 << 15 else torch.int32
    tokens, order = tokens.to(narrow).sort(stable=True)
    dy = dense_channels(dy)
    num_chunks, block_d = cdiv(rows, CHUNK), min(BLOCK_D, power_of_2(width))
    dweight = torch.zeros((num_tokens, width), dtype=dtype or dy.dtype, device=dy.device)
    heads, tails = (torch.empty(num_chunks, width, dtype=torch.float32, device=dy.device) for _ in range(2))
    launch(
        _runs_kernel, (num_chunks, cdiv(width, block_d)), tokens=tokens, order=order, dy=dy, dweight=dweight,
        heads=heads, tails=tails, R=rows, D=width, dy_stride=dy.stride(0), CHUNK=CHUNK, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    # the run at the end of the last chunk ends there
    if num_chunks > 1:
        launch(
            _join_kernel, (num_chunks - 1, cdiv(width, block_d)), tokens=tokens, dweight=dweight, heads=heads,
            tails=tails, R=rows, D=width, CHUNK=CHUNK, BLOCK_D=block_d, JOIN=JOIN, num_warps=4,
        )  # fmt: skip
    return dweight


class Embedding(OnceDifferentiable):
    """(tokens [...], weight [V, D]) to [..., D]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_tokens, ctx.dtype = len(weight), weight.dtype
        return F.embedding(tokens.long(), weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, embedding_gradient(tokens.flatten(), dy.reshape(-1, dy.shape[-1]), ctx.num_tokens, ctx.dtype)


def embedding_triton(tokens: Tensor, weight: Tensor) -> Tensor:
    """`embedding` for arguments that were checked."""
    if tokens.numel() and needs_gradient(weight):
        return Embedding.apply(tokens, weight)
    return F.embedding(tokens.long(), weight)
