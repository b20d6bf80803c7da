"""Division of [batch, T, D] among programs: tiles of channels and states, and segments of time.

A program takes BLOCK_D channels of one batch row through one segment of time. Where few channels leave the chip empty,
time is cut into several segments that run side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from subquad.kernels.device import speaks_ptx
from subquad.kernels.launch import CompileOptions, cdiv, power_of_2


@dataclass(frozen=True, eq=False)
class Tile:
    """The work of one thread, and the options with which its kernel is compiled.

    Tiles, like tunings, are equal only if they are the same object, which makes them cheap keys of a cache.
    """

    states: int
    """Maximum number of states of a channel that one thread holds."""
    channels: int
    """Number of channels of a thread."""
    steps: int
    """Steps of time in one unrolled group; a group is loaded while the one before it is computed."""
    options: CompileOptions
    """num_warps is a maximum here: narrow inputs take fewer warps."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """Choices that change speed and memory and, apart from rounding, no result."""

    forward: Tile
    """Forward pass with a gate. Without a gate, so many registers make the compiler wait for loads too early."""
    forward_matrix: Tile
    """Forward pass on the matrix units."""
    forward_narrow: Tile
    """Forward pass where two channels for each thread leave the GPU half empty and one channel does not."""
    forward_segments: Tile
    """Forward pass without a gate, or over many segments of time: few registers, so that more warps run at once."""
    backward_ends: Tile
    """Kernel of the ends of the segments in the backward pass."""
    backward: Tile
    """Kernel of the gradients."""
    backward_portable: Tile
    """Kernel of the gradients on GPUs without PTX, where Triton takes minutes to compile a larger tile."""
    chunk: int
    """Number of steps between two states that are kept for the backward pass."""
    enough_warps: int
    """Number of warps for each multiprocessor below which time is cut into segments."""
    busy_warps: int
    """Number of warps for each multiprocessor that the segments aim at."""
    min_segment: int
    """Minimum length of a segment."""
    uncut: int
    """Maximum length that is never cut: segments take two more launches forward and two backward."""
    matrix: bool = True
    """Whether the kernels on the matrix units run where they can (`matrix.py`)."""
    kept_steps: int = 6
    """Steps of a group of eight whose decays these keep in registers in the backward pass."""


TUNING = Tuning(
    forward=Tile(states=4, channels=2, steps=16, options=CompileOptions(num_warps=1, max_registers=200)),
    forward_matrix=Tile(states=4, channels=2, steps=8, options=CompileOptions(num_warps=2, max_registers=128)),
    forward_narrow=Tile(states=4, channels=1, steps=32, options=CompileOptions(num_warps=1, max_registers=255)),
    forward_segments=Tile(states=4, channels=2, steps=16, options=CompileOptions(num_warps=1, max_registers=128)),
    backward_ends=Tile(states=4, channels=2, steps=16, options=CompileOptions(num_warps=1, max_registers=128)),
    backward=Tile(states=4, channels=2, steps=8, options=CompileOptions(num_warps=8)),
    backward_portable=Tile(states=4, channels=1, steps=4, options=CompileOptions(num_warps=4)),
    chunk=64,
    enough_warps=5,
    busy_warps=16,
    min_segment=64,
    uncut=256,
)
"""Chosen by measurements on one H200 (LOG.md)."""

MAX_LANES = 8
"""Maximum number of threads that share a channel; the exchange between lanes supports no more."""
SHARED_ROWS = 256
"""Maximum product of warps and padded states, so that the sums over the warps of a program fit into 48 KiB."""


class Division(NamedTuple):
    """Division of [batch, T, D] among the programs of one kernel."""

    segment: int
    """Number of steps in a segment, a multiple of the chunk length."""
    splits: int
    """Number of segments."""
    block_d: int
    """Number of channels of a program."""
    programs: int
    constants: dict[str, Any]
    """The constexprs and compile options that follow from the division, as keyword arguments of the launch."""

    @property
    def fits_matrix(self) -> bool:
        """Whether a thread has the channels, states and steps that the kernels on the matrix units expect."""
        return [self.constants[name] for name in ("NT", "LANES", "CHANNELS")] == [4, 4, 2] and self.constants[
            "STEPS"
        ] >= 8

    def matrix_constants(self) -> dict[str, Any]:
        """The part of `constants` that the kernels on the matrix units take."""
        names = ("N", "BLOCK_D", "num_warps", "num_stages", "maxnreg")
        return {name: self.constants[name] for name in names if name in self.constants}

    @property
    def num_warps(self) -> int:
        """Warps of all programs together."""
        return self.programs * int(self.constants["num_warps"])


def padded_states(num_states: int) -> int:
    """States in a row of B or C as the kernels read it: a power of two, at least 4."""
    return max(4, power_of_2(num_states))


def choose_division(
    shape: Sequence[int],
    num_states: int,
    processors: int,
    *tiles: Tile,
    tuning: Tuning,
    splits: int | None = None,
) -> Division:
    """The first tile that fills the chip over whole sequences, or if none does, the last tile over segments of time.

    shape: [batch, T, D].   processors: of the GPU.   splits: takes the last tile over that many segments.
    """
    cover = functools.partial(_cover, shape, num_states, chunk=tuning.chunk, ptx=speaks_ptx())
    if splits is None:
        whole = [cover(tile, splits=1) for tile in tiles]
        for division in whole:
            if division.num_warps >= tuning.enough_warps * processors:
                return division
        most = 1 if shape[1] <= tuning.uncut else shape[1] // tuning.min_segment
        splits = max(1, min(round(tuning.busy_warps * processors / whole[-1].num_warps), most))
    return cover(tiles[-1], splits=splits)


def _cover(shape: Sequence[int], num_states: int, tile: Tile, *, splits: int, chunk: int, ptx: bool) -> Division:
    """Covers [batch, T, D] by programs of a tile, in at most `splits` segments."""
    assert chunk % tile.steps == 0
    batch, length, width = shape
    padded = padded_states(num_states)
    # each lane of a channel does the work of at least one step of a group
    lanes = min(cdiv(padded, tile.states), tile.steps, MAX_LANES)
    needed_warps = power_of_2(cdiv(width * lanes, 32 * tile.channels))
    num_warps = min(tile.options.num_warps, needed_warps, SHARED_ROWS // padded)
    options = tile.options._replace(num_warps=num_warps, max_registers=tile.options.max_registers if ptx else None)
    block_d = 32 * num_warps // lanes * tile.channels
    segment = cdiv(cdiv(length, splits), chunk) * chunk
    splits = cdiv(length, segment)
    constants = {
        "N": num_states,
        "NT": padded // lanes,
        "LANES": lanes,
        "CHANNELS": tile.channels,
        "BLOCK_D": block_d,
        "STEPS": tile.steps,
        **options.keywords(),
    }
    return Division(segment, splits, block_d, batch * splits * cdiv(width, block_d), constants)
