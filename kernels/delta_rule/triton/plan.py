"""Tuning of the kernels of the delta rule. Plans are those of gated linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.device import speaks_ptx
from subquad.kernels.gated_linear_attention.triton.plan import CHANNEL, HEAD, NONE, Plan, Planner, Strides, Tile, Tuning
from subquad.kernels.launch import INT32_END, CompileOptions, cdiv, power_of_2

__all__ = ["PLANNER", "SHORT_CHUNKS", "ChunkFactors", "Plan", "Planner", "Tuning", "default_tuning"]

ALL_KINDS = (NONE, HEAD, CHANNEL)


def default_tuning() -> dict[str, object]:
    """Fields of `Tuning` that differ from those of gated linear attention, measured on an H200 at K 128, V 128.

    `scores` are the tiles of `_factors_kernel`, `walk` those of both walks, `grads` those of `_row_grads_kernel` and
    `_mild_grads_kernel` and, with at most 32 keys and 64 values, those of `_grads_kernel` and `_pairs_kernel`; `states`
    and `read` are not used.
    `few_programs` is the number of programs of a walk that run at the same time, and `enough_programs` that of the walk
    to the ends of segments where no decay is that of a channel, on 132 multiprocessors.
    """
    grads = Tile(64, 64, CompileOptions(4, 2))
    return {
        "scores": dict.fromkeys(ALL_KINDS, Tile(64, 0, CompileOptions(4, 2)))
        | dict.fromkeys((NONE, HEAD), Tile(64, 0, CompileOptions(4, 2, 168))),
        "walk": {
            64: Tile(64, 64, CompileOptions(4, 2)),
            128: Tile(128, 128, CompileOptions(8, 2)),
            256: Tile(256, 64, CompileOptions(4, 2)),
        },
        "grads": {NONE: grads, HEAD: grads, CHANNEL: Tile(64, 128, CompileOptions(4, 2))},
        "few_programs": 132,
        "enough_programs": 396,
    }


def float32_tuning() -> dict[str, object]:
    """Fields of `Tuning` for operands in float32, which take more registers and three times the products (LOG.md)."""
    return default_tuning() | {
        "chunk": 16,
        "min_width": 16,
        "scores": dict.fromkeys(ALL_KINDS, Tile(32, 0, CompileOptions(1, 1))),
        "walk": {keys: Tile(keys, 64, CompileOptions(4, 1)) for keys in (64, 128, 256)},
        "grads": dict.fromkeys(ALL_KINDS, Tile(32, 32, CompileOptions(2, 1))),
    }


def short_chunks() -> dict[str, object]:
    """Fields of `Tuning` with chunks of 32, which halve the triangular systems and what a walk keeps in registers.

    Two programs of a walk then share a multiprocessor. Without the wgmma instructions of Hopper, longer chunks spill.
    The gradients take longer with them on Hopper (LOG.md).
    """
    return default_tuning() | {
        "chunk": 32,
        "scores": dict.fromkeys((NONE, HEAD), Tile(64, 0, CompileOptions(2, 2))),
        "walk": {
            64: Tile(64, 64, CompileOptions(4, 3)),
            128: Tile(128, 64, CompileOptions(4, 4)),
            256: Tile(256, 64, CompileOptions(4, 2)),
        },
        "few_programs": 264,
    }


PLANNER = Planner(Tuning(**default_tuning()), Tuning(**float32_tuning()))  # type: ignore[arg-type]
SHORT_CHUNKS = Planner(Tuning(**short_chunks()), Tuning(**float32_tuning()))  # type: ignore[arg-type]


class ChunkFactors(NamedTuple):
    """Outputs of `_factors_kernel`. Those that a kind of decay does not need are None."""

    inverse: Tensor
    """(I + L)^-1 - I of every chunk, [B, T, H, C]: row i belongs to position i."""
    inverse_low: Tensor | None
    """The remainder that `inverse` loses as it is rounded to bfloat16, as bfloat16; None where it is float32."""
    scores: Tensor
    """A, the scores of queries with written keys, [B, T, H, C]."""
    decay: Tensor | None
    """Decay over a whole chunk, [B, H, chunks] for a decay of a head and [B, H, chunks, K] for one of a channel."""
    row_in: Tensor | None
    """With a decay of a head, this is the decay from the start of the chunk up to each position, [B, H, T], float32."""
    row_out: Tensor | None
    """This is beta times the decay from after each position to the end of the chunk, [B, H, T], float32, which without
    a decay is beta. The positions of a head are neighbours in memory, since a walk waits for these factors in every
    chunk."""
    q_in: Tensor | None
    """With a decay of a channel, these are scaled queries times the decay from the start of the chunk, [B, T, H, K]."""
    k_in: Tensor | None
    """These are likewise keys times the decay from the start of the chunk."""
    k_out: Tensor | None
    """These are likewise keys times beta and the decay to the end of the chunk."""
    prefix: Tensor | None
    """With a decay of a head and a gradient, the sum of the log-decays from the start of the chunk up to each position,
    [B, H, T], float32."""
    suffix: Tensor | None
    """Likewise from after each position to the end of the chunk."""
    reach: Tensor | None
    """With a decay of a head, where time is cut into segments, this bounds what a chunk keeps of a state,
    as a logarithm, [B, H, chunks], float32 (see segments.py)."""
    steep: Tensor | None
    """With a decay of a channel, this is 1 for every chunk that is factored by a tree, and 0 for one that is factored
    about its middle, [B, H, chunks], int32."""
    plain_scores: Tensor | None = None
    """This tensor holds the scores of queries with the keys of `plain`, where it is given (see `delta_factors`),
    [B, T, H, C]."""
    plain_system: Tensor | None = None
    """This one holds the scores of keys that are read with the keys of `plain` at earlier positions, [B, T, H, C]."""
    plain_out: Tensor | None = None
    """This one holds the keys of `plain` times the decay to the end of the chunk, [B, T, H, K]."""

    @property
    def kind(self) -> int:
        """The kind of decay."""
        return CHANNEL if self.k_out is not None else NONE if self.row_in is None else HEAD


def walk_tile(
    plan: Plan, key_dim: int, value_dim: int, *, by_rows: bool = True, plain: bool = False, num_heads: int = 0
) -> Tile:
    """The tile of a walk: all keys in their padded number, and, in bfloat16, four warps for every 64 values.

    The values are the rows of its products, of which four warps take 64 at a time; more warps would repeat their work.

    by_rows: no decay is that of a channel. With such a decay, two stages of what a walk loads fit into the 227 kB of
        shared memory of Hopper for up to 128 keys, and not for 256 (272 kB).
    plain: values are added under keys of their own. A walk then loads half as much again for each chunk, of which two
        stages fit for up to 64 keys (168 kB) and not for 128 (272 kB), and into the 64 kB of GPUs of AMD not at all.
    num_heads: of all sequences, or zero. With a decay of a channel, a program has 64 values in place of 128 where that
        occupies the multiprocessors, which two segments of the time would otherwise do in two walks (LOG.md).
    """
    tile = plan.tuning.walk[max(min(plan.tuning.walk), power_of_2(key_dim))]
    block_k, block_v = plan.width(tile.block_k, key_dim), plan.width(tile.block_v, value_dim)
    halves, most = 2 * num_heads * cdiv(value_dim, block_v), plan.tuning.few_programs
    if not by_rows and block_v == 128 and most < 2 * halves <= 2 * most:
        block_v = 64
    if plan.work == torch.float32:
        return Tile(block_k, block_v, tile.options)
    too_much = block_k > 64 or not speaks_ptx() if plain else block_k > 128 and not by_rows
    stages = 1 if too_much else tile.options.num_stages
    return Tile(block_k, block_v, tile.options._replace(num_warps=max(4, block_v // 16), num_stages=stages))


class EndsTile(NamedTuple):
    """A tile of the walk that finds the states at the ends of segments, and how many of its programs run."""

    tile: Tile
    num_programs: int
    """Number of programs that run at the same time."""


def ends_tile(
    plan: Plan, key_dim: int, value_dim: int, *, by_rows: bool, plain: bool = False, num_heads: int = 0
) -> EndsTile:
    """Three programs share a multiprocessor where no decay is that of a channel, because the walk reads neither queries
    nor scores; 168 registers are the most that this allows.
    """
    block_k, block_v, options = tile = walk_tile(
        plan, key_dim, value_dim, by_rows=by_rows, plain=plain, num_heads=num_heads
    )
    if plan.work == torch.float32 or not by_rows:
        return EndsTile(tile, plan.tuning.few_programs)
    narrow = Tile(block_k, min(block_v, 64), CompileOptions(4, options.num_stages, 168))
    return EndsTile(narrow, plan.tuning.enough_programs)


def back_tile(
    plan: Plan, key_dim: int, value_dim: int, *, by_rows: bool, plain: bool = False, num_heads: int = 0
) -> Tile:
    """The tile of the walk back. by_rows: no decay is that of a channel, which leaves memory for a third stage."""
    block_k, block_v, options = walk_tile(plan, key_dim, value_dim, by_rows=by_rows, plain=plain, num_heads=num_heads)
    if plan.work == torch.bfloat16 and by_rows and block_k == 128:
        options = options._replace(num_stages=3)
    return Tile(block_k, block_v, options)


def is_whole(plan: Plan, length: int, *sizes: tuple[int, int], strides: Sequence[Strides | None]) -> bool:
    """Whether a kernel in bfloat16 needs no masks: all sequences end with a chunk, and all channels with a tile.

    Without masks, offsets within a chunk are int32 (`load_rows`), so the positions of a chunk must be near in memory.

    sizes:   pairs of a number of channels and the width of their tiles.
    strides: of inputs [B, T, H, ...].
    """
    pairs = (length, plan.chunk), *sizes
    if any(x and plan.chunk * x[1] >= INT32_END for x in strides):
        return False
    return plan.work == torch.bfloat16 and plan.table is None and all(size % width == 0 for size, width in pairs)
