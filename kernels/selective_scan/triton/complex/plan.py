"""The plan of a launch divides batch, time and channels among the programs of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from subquad.kernels.launch import CompileOptions, cdiv, power_of_2


@dataclass(frozen=True)
class Tuning:
    """Choices of the launchers, by measurements on one H200 (LOG.md)."""

    lanes: int = 8
    """Threads that share a channel, unless it has fewer states."""
    num_warps: int = 4
    max_registers: int | None = None
    """Maximum number of registers of a thread of the backward kernel."""
    steps: int = 8
    """Steps of a group, which are unrolled; a channel with more states a thread has fewer."""
    part: int = 8
    """Steps of a group that backward finishes at once."""
    busy_warps: int = 16
    """Time is cut into segments until a multiprocessor has that many warps."""
    min_segment: int = 64
    """Minimum steps of a segment."""


TUNING = Tuning()


class Plan(NamedTuple):
    """Division of [batch, T, D] among programs."""

    states: int
    """States of a thread, NT."""
    lanes: int
    block_d: int
    """Channels of a program."""
    steps: int
    part: int
    """Steps that backward finishes at once."""
    segment: int
    """Steps of a segment, a multiple of `steps`."""
    splits: int
    """Number of segments."""
    num_warps: int
    backward: CompileOptions


def choose_plan(shape: Sequence[int], num_states: int, processors: int, tuning: Tuning) -> Plan:
    """The plan for x of a shape [batch, length, width] on a GPU with so many processors."""
    batch, length, width = shape
    padded = max(2, power_of_2(num_states))
    lanes = min(padded, tuning.lanes)
    # registers hold the states of a whole group
    steps = max(1, min(tuning.steps, 16 * lanes // padded))
    num_warps = min(tuning.num_warps, power_of_2(cdiv(width * lanes, 32)))
    block_d = 32 * num_warps // lanes
    warps = batch * cdiv(width, block_d) * num_warps
    most = max(1, length // tuning.min_segment)
    splits = max(1, min(tuning.busy_warps * processors // warps, most))
    segment = cdiv(cdiv(length, splits), steps) * steps
    backward = CompileOptions(num_warps, max_registers=tuning.max_registers)
    return Plan(
        states=padded // lanes,
        lanes=lanes,
        block_d=block_d,
        steps=steps,
        part=min(steps, tuning.part),
        segment=segment,
        splits=cdiv(length, segment),
        num_warps=num_warps,
        backward=backward,
    )
