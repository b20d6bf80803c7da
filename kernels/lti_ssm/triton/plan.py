"""Division of a batch of sequences among programs, and the constants with which the kernels are compiled.

The words chunk, segment, tile and piece are those of the package docstring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from subquad.kernels.device import num_processors
from subquad.kernels.launch import CompileOptions, cdiv, power_of_2


class Tile(NamedTuple):
    """Sizes and compiler options of the kernels for one class of input dtypes."""

    chunk: int
    """Steps of a chunk."""
    rows: int
    """Rows of a tile, each of them a segment."""
    gated_terms: int
    """bfloat16 terms whose sum stands for a gated input or gradient (v, g)."""
    tap_terms: int
    """The same for the Toeplitz matrix K."""
    map_terms: int
    """The same for the input map E and the output map W."""
    state_terms: int
    """The same for the states h and their gradients dh."""
    sum_terms: int
    """Products that are summed over time, which give states, their gradients and the gradients of parameters, take this
    many of the terms of E, W, h and dh."""
    store: str
    """Cache modifier of what the kernels write."""
    warps: tuple[int, int]
    """Warps of a program, forward and backward."""
    stages: tuple[int, int]
    """Pipeline stages, forward and backward: a tile is loaded stages - 1 steps before it is needed."""


class Tuning(NamedTuple):
    """Every choice of the launchers that comes from a measurement; tests pass other values in through a `Planner`."""

    narrow: Tile = Tile(
        chunk=64,
        rows=64,
        gated_terms=1,
        tap_terms=2,
        map_terms=1,
        state_terms=1,
        sum_terms=1,
        store=".cs",
        warps=(4, 4),
        stages=(6, 3),
    )
    """For bfloat16 inputs."""
    wide: Tile = Tile(
        chunk=32,
        rows=64,
        gated_terms=1,
        tap_terms=1,
        map_terms=1,
        state_terms=1,
        sum_terms=1,
        store=".cs",
        warps=(8, 8),
        stages=(2, 2),
    )
    """For float32 and float16 inputs."""
    averaging_length: int = 512
    """Sequences shorter than this get two bfloat16 terms of every factor: their outputs may be sums of a few products,
    in which the rounding errors of the factors do not average out."""
    programs_per_processor: int = 3
    """Programs that run at the same time on a multiprocessor."""
    programs: int | None = None
    """Programs that run at the same time on the device; None: `programs_per_processor` for each multiprocessor."""
    sequences: int | None = None
    """Sequences that share a tile, a power of two; None: the cheapest number."""
    pieces: int | None = None
    """Pieces that a sequence is cut into; None: as many as fill the device."""
    setup_steps: int = 5
    """Cost of the setup of a program, in steps of its loop (one chunk of every row of a tile)."""
    max_pairs: int = 32
    """Complex modes for which a backward pass in float32, or with states in two terms, has shared memory."""
    short_steps: int = 2
    """Longest forward loop that is compiled with two pipeline stages: in a loop this short, tiles that are loaded
    further ahead only take shared memory, and without them four programs fit on a multiprocessor."""
    short_registers: int = 128
    """Registers that a thread of such a program may use, so that four programs fit."""
    tall_steps: int = 8
    """Shortest backward loop that is halved: twice the rows and warps, each row a segment of half the length."""
    int64_elements: int = 2**31
    """Number of elements of a tensor from which on offsets are computed in 64 bits."""

    def tile(self, dtype: torch.dtype, length: int, num_states: int, is_complex: bool, gated: bool) -> Tile:
        """The configuration for inputs of a dtype and length, a real or complex system, and with or without gates."""
        tile = self.narrow if dtype == torch.bfloat16 else self.wide
        if length < self.averaging_length:
            return tile._replace(gated_terms=2, tap_terms=2, map_terms=2, state_terms=2, sum_terms=2)
        if gated and dtype == torch.bfloat16:
            # a gate multiplies what is left of the rounding errors in an output; where both are large, the product is
            # more than the accuracy rule allows. For many states two terms of the maps are enough, and all there is
            # shared memory for: two passes of half the states would round their outputs to bfloat16 before the sum
            many = is_complex and num_states > self.max_pairs
            tile = tile._replace(map_terms=2, state_terms=1 if many else 2)
        # the gradient of dt of slow modes is a small difference of large sums
        return tile if is_complex else tile._replace(gated_terms=2)

    def needs_two_passes(self, u: torch.Tensor, num_states: int) -> bool:
        """Whether a backward pass of a complex system with inputs u [B, T, D] takes more shared memory than there is.

        It does where more than `max_pairs` states are multiplied in two bfloat16 terms or in float32.
        """
        return num_states > self.max_pairs and (u.dtype != torch.bfloat16 or u.shape[1] < self.averaging_length)

    def programs_on(self, device: torch.device) -> int:
        """Programs that run at the same time on a device."""
        return self.programs or self.programs_per_processor * num_processors(device)


TUNING = Tuning()


class Division(NamedTuple):
    """Division of the sequences [B, T] of one channel into tiles."""

    chunks: int
    """Number of chunks in a sequence."""
    rows: int
    """Number of rows in a tile."""
    segments: int
    """Number of rows of a tile that belong to one sequence."""
    steps: int
    """Number of chunks in a segment, which is the number of iterations of a program's loop."""
    pieces: int
    """Number of pieces in a sequence, each of which has `segments` segments."""
    groups: int
    """Number of groups of sequences; the sequences of a group share a tile."""
    tile: Tile

    @property
    def chunk(self) -> int:
        """Steps of a chunk."""
        return self.tile.chunk

    @property
    def programs(self) -> int:
        """Programs for one channel."""
        return self.groups * self.pieces


def cheapest_division(
    batch: int, length: int, width: int, with_end: bool, programs: int, tile: Tile, tuning: Tuning
) -> Division:
    """The forward division of least cost, in steps of a loop, over all numbers of sequences that share a tile.

    with_end: whether the final state is asked for.   programs: how many run at the same time.
    """
    # the state after the last whole chunk stands before a chunk that may be empty
    chunks = length // tile.chunk + 1 if with_end else cdiv(length, tile.chunk)

    def shared_by(sequences: int) -> tuple[int, Division]:
        segments, groups = tile.rows // sequences, cdiv(batch, sequences)
        # pieces cost a launch and reading twice, so they are used only where half of the GPU would be idle
        pieces = tuning.pieces or max(1, programs // (groups * width))
        steps = cdiv(chunks, segments * pieces)
        pieces = cdiv(chunks, segments * steps)
        division = Division(
            chunks=chunks,
            rows=tile.rows,
            segments=segments,
            steps=steps,
            pieces=pieces,
            groups=groups,
            tile=tile,
        )
        # a step that only passes states on costs about half of one that gives outputs
        cost = 2 * tuning.setup_steps + steps * (2 + (segments > 1) + (pieces > 1))
        return cdiv(division.programs * width, programs) * cost, division

    if tuning.sequences is not None:
        return shared_by(tuning.sequences)[1]
    sizes = [2**i for i in range(tile.rows.bit_length())]
    return min((shared_by(size) for size in sizes if size < 2 * batch), key=lambda pair: pair[0])[1]


def backward_division(division: Division, fits: bool, tuning: Tuning) -> Division:
    """The backward division for a forward division: the same, or twice the rows with segments of half the length.

    The same sequences share a tile either way. fits: whether twice the rows fit into shared memory.
    """
    one_term = division.tile.map_terms == division.tile.state_terms == 1
    # half segments of a piece must end where the piece does
    divisible = division.steps % 2 == 0 or division.pieces == 1
    if not (fits and one_term and divisible) or division.steps < tuning.tall_steps or division.segments == 1:
        return division
    return division._replace(rows=2 * division.rows, segments=2 * division.segments, steps=cdiv(division.steps, 2))


def padded_states(num_states: int, is_complex: bool) -> int:
    """Width of a tile of states, in states, so that its real parts and imaginary parts are 64 columns or more.

    Narrower tiles are slower, and for one kind of them the compiler gives wrong code.
    """
    return max(32 if is_complex else 64, power_of_2(num_states))


def num_near(chunk: int) -> int:
    """Number of powers of Abar in the near table of a chunk; the far table holds the powers at multiples of it."""
    return int(2 ** (chunk.bit_length() // 2))


def kernel_constants(
    division: Division,
    num_states: int,
    *,
    is_complex: bool,
    dtype: torch.dtype,
    gated: bool,
    int64: bool,
    backward: bool,
    tuning: Tuning,
) -> dict[str, Any]:
    """Constexprs and compiler options of the forward or the backward kernel.

    gated: whether there is any gate.   int64: whether offsets are computed in 64 bits.
    """
    tile, bf16 = division.tile, dtype == torch.bfloat16
    block = padded_states(num_states, is_complex)
    warps, stages = tile.warps[backward], tile.stages[backward]
    halved = division.rows > tile.rows
    if gated:
        # a step loads three to five tiles
        stages = min(stages, 3)
    wide_state = block * (2 if is_complex else 1) > 64
    short = bf16 and not (backward or gated or wide_state) and division.steps <= tuning.short_steps
    if short:
        stages = min(stages, 2)
    if backward and (gated or halved or wide_state):
        # the accumulators do not fit into the registers of four warps
        warps = 8
    constants = {
        "COMPLEX": is_complex,
        "BF16": bf16,
        "CHUNK": division.chunk,
        "NEAR": num_near(division.chunk),
        "ROWS": division.rows,
        "SEGMENTS": division.segments,
        "INT64": int64,
        "BLOCK_N": block,
        "GATED_TERMS": tile.gated_terms,
        "TAP_TERMS": tile.tap_terms,
        "MAP_TERMS": tile.map_terms,
        "STATE_TERMS": tile.state_terms,
        "SUM_TERMS": tile.sum_terms,
        "STORE": tile.store,
        "NUM_STAGES": stages,
    }
    if backward:
        constants["HALVED"] = halved
    options = CompileOptions(warps, max_registers=tuning.short_registers if short else None)
    return constants | options.keywords()
