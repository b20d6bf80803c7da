"""The plan of a launch divides batch, time and channels among the programs of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from subquad.kernels.launch import cdiv, power_of_2


@dataclass(frozen=True)
class Tuning:
    """Choices of the launchers, by measurements on one H200 (LOG.md)."""

    block_d: int = 64
    """Channels of a program, a power of two."""
    num_warps: int = 1
    steps: int = 8
    """Steps that are loaded at once."""
    busy_warps: int = 32
    """Time is cut into segments until a multiprocessor has that many warps."""
    min_segment: int = 128
    """Minimum steps of a segment."""


TUNING = Tuning()


class Plan(NamedTuple):
    """Division of [batch, T, D] among programs."""

    block_d: int
    num_warps: int
    steps: int
    segment: int
    """Steps of a segment, a multiple of `steps`."""
    splits: int
    """Number of segments."""
    programs: int


def choose_plan(shape: Sequence[int], processors: int, tuning: Tuning) -> Plan:
    """The plan for k of a shape [batch, T, D] on a GPU with so many processors."""
    batch, length, width = shape
    block_d = min(tuning.block_d, max(32, power_of_2(width)))
    warps = batch * cdiv(width, block_d) * tuning.num_warps
    splits = max(1, min(tuning.busy_warps * processors // warps, length // tuning.min_segment))
    segment = cdiv(cdiv(length, splits), tuning.steps) * tuning.steps
    splits = cdiv(length, segment)
    return Plan(block_d, tuning.num_warps, tuning.steps, segment, splits, batch * cdiv(width, block_d) * splits)
