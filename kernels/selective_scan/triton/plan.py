"""Choice of tiles and segments of time, and the strides that the kernels take."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from kernels.launch import cdiv, num_processors, power_of_2, speaks_ptx


class Tile(NamedTuple):
    """Work of one thread and the size of a program."""

    states: int
    """Maximum number of states of a channel that one thread holds."""
    channels: int
    """Channels of a thread."""
    steps: int
    """Steps of time in one unrolled group; a group is loaded while the one before it is computed."""
    num_warps: int
    registers: int | None = None
    """Maximum number of registers of a thread, so that more warps fit; the compiler spills the rest to local memory."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """Choices that change speed and memory and, apart from rounding, no result.

    Two tunings are equal only if they are the same object, so a tuning is a cheap key of a cache.
    """

    forward: Tile
    """Forward with a gate. Without one, this many registers make the compiler wait for loads too early."""
    forward_narrow: Tile
    """Forward where two channels a thread leave the chip half empty and one channel does not."""
    forward_segments: Tile
    """Forward without a gate or over many segments of time: few registers, so that more warps run side by side."""
    backward_ends: Tile
    backward: Tile
    backward_portable: Tile
    """Backward on GPUs without PTX, where Triton takes minutes to compile a larger tile."""
    chunk: int
    """Steps between two states saved for backward."""
    enough_warps: int
    """Warps for each multiprocessor below which time is cut into segments."""
    busy_warps: int
    """Warps for each multiprocessor that the segments aim at."""
    min_segment: int
    """Minimum length of a segment."""
    short: int
    """Maximum length that is never cut, since cutting takes two more launches each way."""


TUNING = Tuning(
    forward=Tile(states=4, channels=2, steps=16, num_warps=1, registers=200),
    forward_narrow=Tile(states=4, channels=1, steps=32, num_warps=1, registers=255),
    forward_segments=Tile(states=4, channels=2, steps=16, num_warps=1, registers=128),
    backward_ends=Tile(states=4, channels=2, steps=16, num_warps=1, registers=128),
    backward=Tile(states=4, channels=2, steps=8, num_warps=8),
    backward_portable=Tile(states=4, channels=1, steps=4, num_warps=4),
    chunk=64,
    enough_warps=5,
    busy_warps=16,
    min_segment=64,
    short=256,
)


class Plan(NamedTuple):
    """How a kernel covers [B, T, D]: `splits` segments of `segment` steps, a multiple of the chunk length."""

    segment: int
    splits: int
    block_d: int
    programs: int
    constants: dict[str, Any]
    """Of the kernel, as far as they follow from the plan."""

    @property
    def warps(self) -> int:
        return self.programs * int(self.constants["num_warps"])


def _padded(state: int) -> int:
    """States of a row of maps."""
    return max(4, power_of_2(state))


def _plan(x: Tensor, state: int, *tiles: Tile, tuning: Tuning, splits: int | None = None) -> Plan:
    """The first tile that fills the chip over whole sequences, or if none does, the last tile over segments of time."""
    return _choose(x.shape, state, tiles, tuning, splits, num_processors(x.device), speaks_ptx())


@functools.lru_cache(1024)
def _choose(
    shape: tuple[int, ...],
    state: int,
    tiles: tuple[Tile, ...],
    tuning: Tuning,
    splits: int | None,
    processors: int,
    ptx: bool,
) -> Plan:
    if splits is None:
        whole = [_cover(shape, state, tile, 1, tuning.chunk, ptx) for tile in tiles]
        for plan in whole:
            if plan.warps >= tuning.enough_warps * processors:
                return plan
        most = 1 if shape[1] <= tuning.short else shape[1] // tuning.min_segment
        splits = max(1, min(round(tuning.busy_warps * processors / whole[-1].warps), most))
    return _cover(shape, state, tiles[-1], splits, tuning.chunk, ptx)


def _cover(shape: tuple[int, ...], state: int, tile: Tile, splits: int, chunk: int, ptx: bool) -> Plan:
    assert chunk % tile.steps == 0
    batch, length, width = shape
    padded = _padded(state)
    # a lane of a channel has at least a step of each group
    lanes = min(cdiv(padded, tile.states), tile.steps, 8)
    # the sums over the warps of a program share 48 KiB
    num_warps = min(tile.num_warps, power_of_2(cdiv(width * lanes, 32 * tile.channels)), 256 // padded)
    block_d = 32 * num_warps // lanes * tile.channels
    num_d = cdiv(width, block_d)
    segment = cdiv(cdiv(length, splits), chunk) * chunk
    splits = cdiv(length, segment)
    constants = {
        "N": state, "NT": padded // lanes, "LANES": lanes, "CHANNELS": tile.channels, "BLOCK_D": block_d,
        "STEPS": tile.steps, "num_warps": num_warps,
    }  # fmt: skip
    if tile.registers and ptx:
        constants["maxnreg"] = tile.registers
    return Plan(segment, splits, block_d, batch * splits * num_d, constants)


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    if tensor is None:
        return 0, 0
    in_batch, in_time, _ = tensor.stride()
    # what the stride of a single step is does not matter, and it may be anything
    return in_batch, in_time if tensor.shape[1] > 1 else 0


def _channel_last(tensor: Tensor) -> Tensor:
    # the kernels count a stride in bytes of 32 bits
    _, in_time, in_width = tensor.stride()
    fits = in_width == 1 and in_time * tensor.element_size() < 2**31
    return tensor if fits else tensor.contiguous()
