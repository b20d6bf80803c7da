"""Tiles and layouts of the short causal convolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.launch import CompileOptions, cdiv, power_of_2


class Tile(NamedTuple):
    """Work of one program: `tiles` tiles, one after another in time."""

    block_d: int
    """Number of channels in a tile."""
    groups: int
    """Number of groups of consecutive steps in a tile."""
    steps: int
    """Number of steps in a group: 4, 8 or 16; channel-first, as many as make 16 bytes."""
    tiles: int
    options: CompileOptions

    def for_heads(self, size: int) -> Tile:
        """This tile with the channels of one head and as many of them for each thread; programs cover as many steps."""
        block_d = power_of_2(size)
        warps = max(1, self.options.num_warps * block_d // self.block_d)
        # with more than 8 warps a thread may have too few registers
        fewer = max(1, warps // 8)
        options = self.options._replace(num_warps=warps // fewer)
        return self._replace(block_d=block_d, groups=self.groups // fewer, tiles=self.tiles * fewer, options=options)


@dataclass(frozen=True)
class Tuning:
    """Tiles by (whether x is channel-first, whether y is, bytes of an element of x)."""

    forward: Mapping[tuple[bool, bool, int], Tile]
    backward: Mapping[tuple[bool, bool, int], Tile]


# as measured on an H200, and those of two layouts on an H100 (LOG.md), except for two estimates: forward in float32,
# timed with four warps only, and backward in half precision. Backward, with eight channels a thread the kernel would
# run out of registers
TUNING = Tuning(
    forward={
        (False, False, 2): Tile(128, 2, 16, 1, CompileOptions(num_warps=2)),
        (False, False, 4): Tile(32, 16, 8, 1, CompileOptions(num_warps=4)),
        (True, True, 2): Tile(1, 128, 8, 2, CompileOptions(num_warps=2)),
        (True, True, 4): Tile(1, 256, 4, 1, CompileOptions(num_warps=4)),
        (False, True, 2): Tile(64, 8, 8, 1, CompileOptions(num_warps=4)),
        (False, True, 4): Tile(32, 16, 8, 1, CompileOptions(num_warps=8)),
    },
    backward={
        (False, False, 2): Tile(64, 4, 8, 8, CompileOptions(num_warps=2)),
        (False, False, 4): Tile(32, 16, 8, 4, CompileOptions(num_warps=4)),
        (True, True, 2): Tile(1, 128, 8, 8, CompileOptions(num_warps=2)),
        (True, True, 4): Tile(1, 256, 4, 4, CompileOptions(num_warps=4)),
        (False, True, 2): Tile(64, 8, 8, 4, CompileOptions(num_warps=4)),
        (False, True, 4): Tile(32, 8, 8, 4, CompileOptions(num_warps=4)),
    },
)


class Cover(NamedTuple):
    """Division of x [B, T, D] among programs."""

    rows: int
    """Number of programs along B and T."""
    programs: int
    """Number of all programs."""
    block_d: int
    num_tiles: int
    """Number of tiles that one program computes."""


def cover(x: Tensor, tile: Tile, unit: int = 0) -> Cover:
    """Divides x among programs of one tile size, which is made smaller if x is small.

    unit: channels of a head, where each head has programs of its own; else 0.
    """
    batch, length, width = x.shape
    block_d = min(tile.block_d, power_of_2(width))
    in_time = cdiv(length, tile.groups * tile.steps)
    num_tiles = min(tile.tiles, in_time)
    rows = batch * cdiv(in_time, num_tiles)
    return Cover(rows, rows * cdiv(width, unit or block_d), block_d, num_tiles)


def is_channel_first(x: Tensor) -> bool:
    """Whether x [B, T, D] has time contiguous; views without a contiguous axis count as channel-last."""
    _, stride_t, stride_d = x.stride()
    return stride_t == 1 and (stride_d != 1 or x.shape[2] == 1)


def empty_in_layout(x: Tensor, channel_first: bool) -> Tensor:
    """An empty dense tensor of the shape and dtype of x."""
    batch, length, width = x.shape
    if channel_first:
        return torch.empty(batch, width, length, dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty(batch, length, width, dtype=x.dtype, device=x.device)
