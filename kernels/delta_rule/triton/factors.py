"""`_factors_kernel`: scores of a chunk, the inverse of its triangular system, and the decays that reach its ends."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.delta_rule.triton.plan import ChunkFactors, Plan, is_whole
from subquad.kernels.delta_rule.triton.tiles import bounded_decays, cut_to_bfloat16, load_rows, store_rows
from subquad.kernels.float16_parts import halves, split_dot
from subquad.kernels.gated_linear_attention.triton.decays import (
    CHANNEL_DECAY,
    HEAD_DECAY,
    decay_matrix,
    exponential,
    from_middle,
    half_totals,
    head_prefix_suffix,
    load_head_decays,
    masked_sums,
    tree_level,
)
from subquad.kernels.gated_linear_attention.triton.plan import (
    CHANNEL,
    HEAD,
    Strides,
    decay_kind,
    group_size,
    planned,
    position_strides,
    strides_of,
)
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span
from subquad.kernels.launch import LaunchPlan, launch

BLOCK = tl.constexpr(16)
"""Rows of the blocks on the diagonal of the triangular system that are inverted side by side."""


LARGEST = tl.constexpr(65504.0)
"""The largest float16 number."""


@triton.jit
def split_product(b_left, b_right):
    """Multiplies float32 matrices, each as the sum of two float16 terms."""
    b_left_high, b_left_low = halves(b_left)
    b_right_high, b_right_low = halves(b_right)
    return split_dot(b_left_high, b_left_low, b_right_high, b_right_low)


@triton.jit
def merged(b_less, b_below):
    """Merging neighbouring blocks adds -(I + Y) L (I + Y) to Y = b_less, their inverses less the identity.

    b_below is the part L of the system between the two blocks of a pair.
    """
    b_product = b_below + split_product(b_less, b_below)
    return -(b_product + split_product(b_product, b_less))


@triton.jit
def below(o_i, size):
    """The mask selects pairs of positions o_i in two neighbouring blocks, the first of them in the second block."""
    o_block = o_i // size
    return (o_block[:, None] == o_block[None, :] + 1) & ((o_block & 1) == 1)[:, None]


@triton.jit
def inverse_by_halves(b_system, o_c, C: tl.constexpr, LEVELS: tl.constexpr):
    """(I + L)^-1 - I for a strictly lower triangular L [C, C], with products of float16 terms and sums in float32.

    Blocks of two rows have the inverse I - L. Neighbouring blocks are merged until one is left. Up to blocks of 16 rows
    the products are of 16 x 16, which every warp computes for itself, then of C x C.
    """
    NUM: tl.constexpr = C // BLOCK
    o_n, o_i = tl.arange(0, NUM), tl.arange(0, BLOCK)
    m_diagonal = o_n[:, None, None, None] == o_n[None, None, :, None]
    b_blocks = tl.sum(tl.where(m_diagonal, tl.reshape(b_system, (NUM, BLOCK, NUM, BLOCK)), 0.0), 2)
    b_less = tl.where(below(o_i, 1)[None, :, :], -b_blocks, 0.0)
    for level in tl.static_range(1, 4):
        b_less += merged(b_less, tl.where(below(o_i, 1 << level)[None, :, :], b_blocks, 0.0))
    b_inverse = tl.reshape(tl.where(m_diagonal, b_less[:, :, None, :], 0.0), (C, C))
    for level in tl.static_range(4, LEVELS):
        b_inverse += merged(b_inverse, tl.where(below(o_c, 1 << level), b_system, 0.0))
    return b_inverse


@triton.jit
def inverse_less_identity(b_system, o_c, C: tl.constexpr, MERGES: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 - I in float32 for a strictly lower triangular L [C, C].

    The blocks of 16 on the diagonal are inverted side by side, row i of each from the rows before it. Two neighbouring
    blocks are then merged by ((X_1, 0), (-X_2 L_21 X_1, X_2)), for all pairs at once, until one block is left: 2^MERGES
    blocks have C rows.
    """
    NUM: tl.constexpr = C // BLOCK
    o_n, o_i = tl.arange(0, NUM), tl.arange(0, BLOCK)
    m_diagonal = o_n[:, None, None, None] == o_n[None, None, :, None]
    b_blocks = tl.sum(tl.where(m_diagonal, tl.reshape(b_system, (NUM, BLOCK, NUM, BLOCK)), 0.0), 2)
    # with rows along the last axis, the coefficients of a row come out in the layout in which they are needed
    b_columns = tl.permute(b_blocks, (0, 2, 1))
    b_x = tl.zeros([NUM, BLOCK, BLOCK], tl.float32) + (o_i[:, None] == o_i[None, :]).to(tl.float32)[None, :, :]
    for i in range(1, BLOCK):
        b_row = tl.sum(tl.where((o_i == i)[None, None, :], b_columns, 0.0), 2)
        b_new = tl.sum(b_row[:, :, None] * b_x, 1)
        b_x -= tl.where((o_i == i)[None, :, None], b_new[:, None, :], 0.0)
    b_inverse = tl.reshape(tl.where(m_diagonal, b_x[:, :, None, :], 0.0), (C, C))
    for merge in tl.static_range(MERGES):
        o_half = o_c // (BLOCK << merge)
        m_below = (o_half[:, None] == o_half[None, :] + 1) & ((o_half & 1) == 1)[:, None]
        b_left = as_operand(b_inverse, tl.float32, PRECISION)
        b_below = as_operand(tl.where(m_below, b_system, 0.0), tl.float32, PRECISION)
        b_product = tl.dot(b_left, b_below, input_precision=PRECISION)
        b_inverse -= tl.dot(as_operand(b_product, tl.float32, PRECISION), b_left, input_precision=PRECISION)
    return tl.where(o_c[:, None] == o_c[None, :], 0.0, b_inverse)


@triton.jit
def _factors_kernel(
    q,
    k,
    beta,
    g,
    write,
    plain,
    inverse,
    inverse_low,
    scores,
    decay,
    row_in,
    row_out,
    q_in,
    k_in,
    k_out,
    prefix,
    suffix,
    reach,
    steep,
    plain_scores,
    plain_system,
    plain_out,
    table,
    T,
    num_t,
    scale,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    beta_stride_b,
    beta_stride_t,
    beta_stride_h,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    write_stride_b,
    write_stride_t,
    write_stride_h,
    plain_stride_b,
    plain_stride_t,
    plain_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    MERGES: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    DECAY: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
    STEEP: tl.constexpr,
):
    """For one chunk, with D_ij the sum of the log-decays in (j, i] and w_j = beta_j k_j the key that is written, or
    beta_j write_j for a decay of a channel where `write` is given:

        A_ij = scale sum_x q_ix w_jx exp(D_ijx), j <= i;    L_ij = sum_x k_ix w_jx exp(D_ijx), j < i;    (I + L)^-1 - I

    and what `ChunkFactors` says of the decays. The factors of a chunk are those of gated linear attention. Where
    `plain` is given, its keys e_j take the place of w_j in a second pair of scores, which is stored as it is:

        scale sum_x q_ix e_jx exp(D_ijx), j <= i;    sum_x k_ix e_jx exp(D_ijx), j < i

    GROUP heads share q and k. Each of their programs computes the products of q and k, which the inverse outlasts, so
    that no program waits for scores in memory.

    A decay of a channel takes two launches, because one program with both ways of factoring a chunk would need the
    registers of both. The first (STEEP false) factors every chunk about its middle and writes to `steep` where this may
    overflow; the second (STEEP true) factors only these chunks, by a tree.
    """
    i_t, i_bh = tl.program_id(0) % num_t, (tl.program_id(0) // num_t).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    dtype = scores.dtype.element_ty
    if STEEP:  # noqa: SIM102 (Triton decides this condition when it compiles, and the inner one at run time)
        if tl.load(steep + i_bh * num_t + i_t) == 0:
            return
    o_c = tl.arange(0, C)
    q += i_b * q_stride_b + i_h // GROUP * q_stride_h
    k += i_b * k_stride_b + i_h // GROUP * k_stride_h
    beta += i_b * beta_stride_b + i_h * beta_stride_h
    o_head = i_b * T * H + i_h
    start, end = chunk_span(table, i_t, T, C)
    o_t = start + o_c
    o_rows, m_t = i_bh * T + o_t, o_t < end
    b_beta = tl.load(beta + o_t.to(tl.int64) * beta_stride_t, mask=m_t, other=0.0).to(tl.float32)
    b_beta_out = b_beta
    b_scores, b_system = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    if DECAY == CHANNEL_DECAY:
        NARROW: tl.constexpr = g.dtype.element_ty == tl.bfloat16
        g += i_b * g_stride_b + i_h * g_stride_h
        m_past = o_c[:, None] >= o_c[None, :]
        b_lowest = tl.zeros([BK], tl.float32)
        if plain is not None:
            plain += i_b * plain_stride_b + i_h * plain_stride_h
            b_plain_scores, b_plain_system = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    if DECAY == HEAD_DECAY:
        # before the loop, so that nothing waits for them behind it
        g += i_b * g_stride_b + i_h * g_stride_h
        b_prefix, b_suffix = head_prefix_suffix(g, g_stride_t, o_t, o_c, end, C)
        b_g_head = load_head_decays(g, g_stride_t, o_t, m_t)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_q = load_rows(q, q_stride_t, start, o_c, o_k, end, K, WHOLE)
        b_k = load_rows(k, k_stride_t, start, o_c, o_k, end, K, WHOLE)
        if DECAY == CHANNEL_DECAY:
            b_w = b_k
            if write is not None:
                p_write = write + i_b * write_stride_b + i_h * write_stride_h
                b_w = load_rows(p_write, write_stride_t, start, o_c, o_k, end, K, WHOLE)
            b_w = b_w.to(tl.float32) * b_beta[:, None]
            b_g = load_rows(g, g_stride_t, start, o_c, o_k, end, K, WHOLE)
            if plain is not None and not STEEP:
                # before anything is stored, so that one wait serves all loads
                b_e = load_rows(plain, plain_stride_t, start, o_c, o_k, end, K, WHOLE)
            b_g = bounded_decays(b_g, plain)
            b_first, b_second = half_totals(b_g, o_c, C)
            o_dense = o_head * K
            if not STEEP:
                b_all = exponential(b_first + b_second, PRECISION)
                tl.store(decay + (i_bh * num_t + i_t) * K + o_k, b_all, mask=o_k < K)
                b_lowest = tl.minimum(b_lowest, tl.minimum(b_first, b_second))
                b_exponent = masked_sums(from_middle(o_c, C), b_g, NARROW, PRECISION)
                # written keys, queries and keys are finished one after the other, so that registers hold one of them
                b_w *= exponential(-b_exponent, PRECISION)
                b_right = tl.trans(as_operand(b_w, dtype, PRECISION))
                b_out = as_operand(b_w * exponential(b_second, PRECISION)[None, :], dtype, PRECISION)
                store_rows(k_out + o_dense, H * K, start, o_c, o_k, end, K, b_out, WHOLE)
                if plain is not None:
                    b_e = b_e.to(tl.float32)
                    b_e *= exponential(-b_exponent, PRECISION)
                    b_plain = tl.trans(as_operand(b_e, dtype, PRECISION))
                    b_out = as_operand(b_e * exponential(b_second, PRECISION)[None, :], dtype, PRECISION)
                    store_rows(plain_out + o_dense, H * K, start, o_c, o_k, end, K, b_out, WHOLE)
                b_factor, b_start = exponential(b_exponent, PRECISION), exponential(b_first, PRECISION)[None, :]
                b_read = b_q.to(tl.float32) * scale * b_factor
                b_left = as_operand(b_read, dtype, PRECISION)
                b_scores = tl.dot(b_left, b_right, b_scores, input_precision=PRECISION)
                if plain is not None:
                    b_plain_scores = tl.dot(b_left, b_plain, b_plain_scores, input_precision=PRECISION)
                b_in = as_operand(b_read * b_start, dtype, PRECISION)
                store_rows(q_in + o_dense, H * K, start, o_c, o_k, end, K, b_in, WHOLE)
                b_read = b_k.to(tl.float32) * b_factor
                b_left = as_operand(b_read, dtype, PRECISION)
                b_system = tl.dot(b_left, b_right, b_system, input_precision=PRECISION)
                if plain is not None:
                    b_plain_system = tl.dot(b_left, b_plain, b_plain_system, input_precision=PRECISION)
                b_in = as_operand(b_read * b_start, dtype, PRECISION)
                store_rows(k_in + o_dense, H * K, start, o_c, o_k, end, K, b_in, WHOLE)
            else:
                b_q32, b_k32 = b_q.to(tl.float32) * scale, b_k.to(tl.float32)
                m_diagonal = o_c[:, None] == o_c[None, :]
                b_scores += tl.where(m_diagonal, tl.sum(b_q32 * b_w, 1)[:, None], 0.0)
                if plain is not None:
                    b_e = load_rows(plain, plain_stride_t, start, o_c, o_k, end, K, WHOLE).to(tl.float32)
                    b_plain_scores += tl.where(m_diagonal, tl.sum(b_q32 * b_e, 1)[:, None], 0.0)
                for level in range(LEVELS):
                    b_factor, m_pair = tree_level(b_g, o_c, level, NARROW, PRECISION)
                    b_right = tl.trans(as_operand(b_w * b_factor, dtype, PRECISION))
                    b_left = as_operand(b_q32 * b_factor, dtype, PRECISION)
                    b_left_k = as_operand(b_k32 * b_factor, dtype, PRECISION)
                    b_scores += tl.where(m_pair, tl.dot(b_left, b_right, input_precision=PRECISION), 0.0)
                    b_system += tl.where(m_pair, tl.dot(b_left_k, b_right, input_precision=PRECISION), 0.0)
                    if plain is not None:
                        b_right = tl.trans(as_operand(b_e * b_factor, dtype, PRECISION))
                        b_plain_scores += tl.where(m_pair, tl.dot(b_left, b_right, input_precision=PRECISION), 0.0)
                        b_plain_system += tl.where(m_pair, tl.dot(b_left_k, b_right, input_precision=PRECISION), 0.0)
                b_prefix = exponential(masked_sums(m_past, b_g, NARROW, PRECISION), PRECISION)
                b_suffix = masked_sums(o_c[:, None] < o_c[None, :], b_g, NARROW, PRECISION)
                b_in = as_operand(b_q32 * b_prefix, dtype, PRECISION)
                store_rows(q_in + o_dense, H * K, start, o_c, o_k, end, K, b_in, WHOLE)
                b_in = as_operand(b_k32 * b_prefix, dtype, PRECISION)
                store_rows(k_in + o_dense, H * K, start, o_c, o_k, end, K, b_in, WHOLE)
                b_out = as_operand(b_w * exponential(b_suffix, PRECISION), dtype, PRECISION)
                store_rows(k_out + o_dense, H * K, start, o_c, o_k, end, K, b_out, WHOLE)
                if plain is not None:
                    b_out = as_operand(b_e * exponential(b_suffix, PRECISION), dtype, PRECISION)
                    store_rows(plain_out + o_dense, H * K, start, o_c, o_k, end, K, b_out, WHOLE)
        else:
            b_right = tl.trans(b_k.to(dtype))
            b_scores = tl.dot(b_q.to(dtype), b_right, b_scores, input_precision=PRECISION)
            b_system = tl.dot(b_k.to(dtype), b_right, b_system, input_precision=PRECISION)
    if DECAY == HEAD_DECAY:
        tl.store(row_in + o_rows, exponential(b_prefix, PRECISION), mask=m_t)
        if prefix is not None:
            tl.store(prefix + o_rows, b_prefix, mask=m_t)
            tl.store(suffix + o_rows, b_suffix, mask=m_t)
        b_beta_out = b_beta * exponential(b_suffix, PRECISION)
        tl.store(decay + i_bh * num_t + i_t, exponential(tl.sum(b_g_head, 0), PRECISION))
        b_pairs = decay_matrix(b_g_head, b_prefix, o_c, PRECISION)
        b_scores *= b_pairs
        b_system *= b_pairs
    if DECAY == CHANNEL_DECAY and not STEEP:
        is_steep = tl.min(b_lowest, 0) <= -LIMIT
        tl.store(steep + i_bh * num_t + i_t, is_steep.to(tl.int32))
        b_scores = tl.where(m_past, b_scores, 0.0)
        # a steep chunk may have overflowed, and the second launch computes it anew; a system of zeros spares it the
        # slower inverse below
        b_system = tl.where(is_steep, 0.0, b_system)
    if DECAY != CHANNEL_DECAY:
        tl.store(row_out + o_rows, b_beta_out, mask=m_t)
        b_scores = tl.where(o_c[:, None] >= o_c[None, :], b_scores, 0.0) * (scale * b_beta)[None, :]
        b_system *= b_beta[None, :]
        if reach is not None:
            # between 0 and 2, beta |k|^2 lengthens no state
            b_growth = tl.abs(1.0 - tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_system, 0.0), 1))
            # NaN must stay, where a maximum would drop it, so that no chunk with NaN is taken to fade
            b_growth = tl.where(b_growth < 1.0, 1.0, b_growth)
            tl.store(reach + i_bh * num_t + i_t, tl.sum(b_g_head, 0) + tl.sum(tl.log(b_growth), 0))
    b_system = tl.where(o_c[:, None] > o_c[None, :], b_system, 0.0)
    o_dense = o_head * C
    if plain is not None:
        b_plain = as_operand(tl.where(m_past, b_plain_scores, 0.0), dtype, PRECISION)
        store_rows(plain_scores + o_dense, H * C, start, o_c, o_c, end, C, b_plain, WHOLE)
        b_plain = as_operand(tl.where(o_c[:, None] > o_c[None, :], b_plain_system, 0.0), dtype, PRECISION)
        store_rows(plain_system + o_dense, H * C, start, o_c, o_c, end, C, b_plain, WHOLE)
    store_rows(scores + o_dense, H * C, start, o_c, o_c, end, C, as_operand(b_scores, dtype, PRECISION), WHOLE)
    if dtype == tl.bfloat16:
        b_inverse = inverse_by_halves(b_system, o_c, C, LEVELS)
        # the inverse can grow beyond float16 where b |k|^2 exceeds 2, which leaves infinity or NaN
        if tl.sum((tl.abs(b_inverse) <= LARGEST).to(tl.int32)) < C * C:
            b_inverse = inverse_less_identity(b_system, o_c, C, MERGES, PRECISION)
        b_high = cut_to_bfloat16(b_inverse)
    else:
        b_inverse = inverse_less_identity(b_system, o_c, C, MERGES, PRECISION)
        b_high = as_operand(b_inverse, dtype, PRECISION)
    store_rows(inverse + o_dense, H * C, start, o_c, o_c, end, C, b_high, WHOLE)
    if inverse_low is not None:
        b_low = b_inverse - b_high.to(tl.float32)
        store_rows(inverse_low + o_dense, H * C, start, o_c, o_c, end, C, b_low, WHOLE)


@planned
def _factors_plan(
    plan: Plan,
    kind: int,
    shape: tuple[int, ...],
    groups: int,
    q: Strides,
    k: Strides,
    beta: Strides,
    g: Strides | None,
    write: Strides | None,
    plain: Strides | None,
    steep: bool,
) -> LaunchPlan:
    """The plan of the chunks that are factored by a tree (`steep`) or of the others."""
    batch, length, heads, key_dim = shape
    tile, num_chunks = plan.tuning.scores[kind], plan.num_chunks(length)
    block_k = plan.width(tile.block_k, key_dim)
    without_masks = kind != CHANNEL or (plain is not None and not steep)
    return LaunchPlan(
        batch * heads * num_chunks,
        T=length,
        num_t=num_chunks,
        scale=plan.scale,
        **position_strides(q=q, k=k, beta=beta, g=g, write=write, plain=plain),
        H=heads,
        K=key_dim,
        C=plan.chunk,
        LEVELS=plan.chunk.bit_length() - 1,
        MERGES=plan.chunk.bit_length() - BLOCK.value.bit_length(),
        BK=block_k,
        GROUP=group_size(heads, groups),
        DECAY=kind,
        LIMIT=plan.mild,
        PRECISION=plan.precision,
        WHOLE=without_masks and is_whole(plan, length, (key_dim, block_k), strides=(q, k, g, write, plain)),
        STEEP=steep,
        **tile.options.keywords(),
    )


def delta_factors(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    write: Tensor | None = None,
    plain: Tensor | None = None,
    *,
    keep: bool = False,
    bounded: bool = False,
) -> ChunkFactors:
    """Factors of all chunks for q, k [B, T, G, K], beta [B, T, H] and log-decays [B, T, H], [B, T, H, K] or None.

    write: [B, T, H, K] or None; see the public operator.
    plain: [B, T, H, K] or None, for a decay of a channel: keys under which v is written without being read first.
    keep:    with a decay of a head, `prefix` and `suffix` are computed.
    bounded: with a decay of a head, `reach` is computed.
    """
    (batch, length, heads), (*_, groups, key_dim) = beta.shape, k.shape
    num_chunks, kind = plan.num_chunks(length), decay_kind(g)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return k.new_empty(shape, dtype=dtype)

    inverse, scores = (new(batch, length, heads, plan.chunk, dtype=plan.work) for _ in range(2))
    inverse_low = torch.empty_like(inverse) if plan.work == torch.bfloat16 else None
    decay = row_in = q_in = k_in = k_out = prefix = suffix = reach = steep = plain_scores = plain_system = plain_out = (
        None
    )
    row_out = None if kind == CHANNEL else new(batch, heads, length)
    if kind == HEAD:
        decay, row_in = new(batch, heads, num_chunks), new(batch, heads, length)
        prefix, suffix = (torch.empty_like(row_in) if keep else None for _ in range(2))
        reach = torch.empty_like(decay) if bounded else None
    elif kind == CHANNEL:
        decay = new(batch, heads, num_chunks, key_dim)
        q_in, k_in, k_out = (new(batch, length, heads, key_dim, dtype=plan.work) for _ in range(3))
        steep = new(batch, heads, num_chunks, dtype=torch.int32)
        if plain is not None:
            plain_scores, plain_system, plain_out = (
                torch.empty_like(scores),
                torch.empty_like(scores),
                torch.empty_like(q_in),
            )

    strides = q.stride(), k.stride(), beta.stride(), strides_of(g), strides_of(write), strides_of(plain)
    ends = decay, row_in, row_out, q_in, k_in, k_out, prefix, suffix, reach, steep
    factors = ChunkFactors(inverse, inverse_low, scores, *ends, plain_scores, plain_system, plain_out)
    for for_steep in (False,) if steep is None else (False, True):
        launch(
            _factors_kernel,
            _factors_plan(plan, kind, (batch, length, heads, key_dim), groups, *strides, for_steep),
            q=q,
            k=k,
            beta=beta,
            g=g,
            write=write,
            plain=plain,
            **factors._asdict(),
            table=plan.table,
        )
    return factors
