"""How the kernels cover a batch of sequences, and what they are compiled with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.launch import cdiv, power_of_2


class Config(NamedTuple):
    """What a program takes at once.

    chunk, rows:  C and ROWS.
    gated, taps, maps, states: bfloat16 terms of gated v and g, of K, of E and O, of h and H.
    store: the cache modifier of what is written.
    warps, stages: forward, backward. A tile is asked for stages - 1 steps before it is needed.
    """

    chunk: int
    rows: int
    gated: int
    taps: int
    maps: int
    states: int
    store: str
    warps: tuple[int, int]
    stages: tuple[int, int]


class Tuning(NamedTuple):
    """Every choice of the launchers that comes from a measurement; tests pass others in through a `Planner`."""

    narrow: Config = Config(64, 64, 1, 2, 1, 1, ".cs", (4, 4), (6, 3))
    """For bfloat16 inputs."""
    wide: Config = Config(32, 64, 1, 1, 1, 1, ".cs", (8, 8), (2, 2))
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
    """Cost of the setup of a program, in steps (one chunk of every row of a tile)."""
    max_pairs: int = 32
    """Complex modes for which a backward pass in float32, or with states in two terms, has shared memory."""
    short_steps: int = 2
    """Longest forward loop that is compiled with two pipeline stages: in a loop this short, tiles that are loaded
    further ahead only take shared memory, and without them four programs fit on a multiprocessor."""
    short_registers: int = 128
    """Registers that a thread of such a program may use, so that four programs fit."""
    tall_steps: int = 8
    """Shortest backward loop that is halved: twice the rows and warps, each row a segment of half the length."""
    wide_offsets: int = 2**31
    """Number of elements of a tensor from which on offsets are computed in 64 bits."""


TUNING = Tuning()


class Plan(NamedTuple):
    """How the kernels cover [B, D, T]: a tile of `rows` rows holds `segments` segments, `steps` chunks each, of some
    sequences of one channel; longer sequences have several `pieces` of segments."""

    chunk: int
    chunks: int
    rows: int
    segments: int
    steps: int
    pieces: int
    groups: int
    """Of sequences, that share a tile."""
    config: Config

    @property
    def programs(self) -> int:
        """For one channel."""
        return self.groups * self.pieces


def _padded(num_states: int, is_complex: bool) -> int:
    """Tiles 64 wide: narrower ones are slower, and one of their kinds the compiler gets wrong."""
    return max(32 if is_complex else 64, power_of_2(num_states))


def _config(dtype: torch.dtype, length: int, is_complex: bool, tuning: Tuning) -> Config:
    config = tuning.narrow if dtype == torch.bfloat16 else tuning.wide
    if length < tuning.averaging_length:
        return config._replace(gated=2, taps=2, maps=2, states=2)
    # the gradient of dt of slow modes is a small difference of large sums
    return config if is_complex else config._replace(gated=2)


def cheapest_plan(
    batch: int, length: int, width: int, with_end: bool, programs: int, config: Config, tuning: Tuning
) -> Plan:
    """The cheapest of all ways to share a tile, counted in steps of a program; `programs` run at the same time."""
    # the state after the last whole chunk stands before a chunk that may be empty
    chunks = length // config.chunk + 1 if with_end else cdiv(length, config.chunk)

    def shared_by(sequences: int) -> tuple[int, Plan]:
        segments, groups = config.rows // sequences, cdiv(batch, sequences)
        # a piece costs a launch and another reading, so only where half of the chip would be idle
        pieces = tuning.pieces or max(1, programs // (groups * width))
        steps = cdiv(chunks, segments * pieces)
        pieces = cdiv(chunks, segments * steps)
        plan = Plan(config.chunk, chunks, config.rows, segments, steps, pieces, groups, config)
        # states come first, at about half the cost of outputs
        cost = 2 * tuning.setup_steps + steps * (2 + (segments > 1) + (pieces > 1))
        return cdiv(plan.programs * width, programs) * cost, plan

    if tuning.sequences is not None:
        return shared_by(tuning.sequences)[1]
    sizes = [2**i for i in range(config.rows.bit_length())]
    return min((shared_by(size) for size in sizes if size < 2 * batch), key=lambda pair: pair[0])[1]


def backward_plan(plan: Plan, fits: bool, tall_steps: int) -> Plan:
    """Long loops are halved where twice the rows fit into shared memory; the same sequences share a tile."""
    single, whole = plan.config.maps == plan.config.states == 1, plan.steps % 2 == 0 or plan.pieces == 1
    if not (fits and single and whole) or plan.steps < tall_steps or plan.segments == 1:
        return plan
    return plan._replace(rows=2 * plan.rows, segments=2 * plan.segments, steps=cdiv(plan.steps, 2))


def _inner(chunk: int) -> int:
    return int(2 ** (chunk.bit_length() // 2))


def _constants(
    plan: Plan,
    is_complex: bool,
    num_states: int,
    dtype: torch.dtype,
    gated: bool,
    wide: bool,
    backward: bool,
    ptx: bool,
    tuning: Tuning,
) -> dict[str, Any]:
    block = _padded(num_states, is_complex)
    warps, stages = plan.config.warps[backward], plan.config.stages[backward]
    halved = plan.rows > plan.config.rows
    if gated:
        # three to five tiles a step
        stages = min(stages, 3)
    wide_state = block * (2 if is_complex else 1) > 64
    short = dtype == torch.bfloat16 and not (backward or gated or wide_state) and plan.steps <= tuning.short_steps
    if short:
        stages = min(stages, 2)
    if backward and (gated or halved or wide_state):
        # four have no room for so many sums, or rows
        warps = 8
    constants = {
        "COMPLEX": is_complex,
        "HALF": dtype == torch.bfloat16,
        "C": plan.chunk,
        "J": _inner(plan.chunk),
        "ROWS": plan.rows,
        "SEGMENTS": plan.segments,
        "WIDE": wide,
        "BLOCK_N": block,
        "GATED_TERMS": plan.config.gated,
        "TAP_TERMS": plan.config.taps,
        "MAP_TERMS": plan.config.maps,
        "STATE_TERMS": plan.config.states,
        "STORE": plan.config.store,
        "NUM_STAGES": stages,
        "num_warps": warps,
    }
    if backward:
        constants["HALVED"] = halved
    return constants | {"maxnreg": tuning.short_registers} if short and ptx else constants
