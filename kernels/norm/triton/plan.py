"""Tiles of the norm."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.device import num_processors
from kernels.launch import CompileOptions, cdiv, power_of_2


class Tuning(NamedTuple):
    """Sizes of tiles in elements."""

    forward: int = 2048
    """Elements in a tile of whole rows; a longer row is a tile of its own."""
    backward: int = 2048
    elements_of_warp: int = 512
    """Elements of a tile for each warp."""
    programs_of_processor: int = 4
    """Programs of the backward pass on each multiprocessor; each writes one row of partial sums."""


TUNING = Tuning()


class Plan(NamedTuple):
    """Tile and programs of one kernel."""

    rows: int
    block_d: int
    programs: int
    options: CompileOptions


def forward_plan(rows: int, width: int, tuning: Tuning) -> Plan:
    """The plan of the forward pass, in which every program computes one tile."""
    tile_rows, block_d, options = _tile(rows, width, tuning.forward, tuning)
    return Plan(tile_rows, block_d, cdiv(rows, tile_rows), options)


def backward_plan(rows: int, width: int, device: torch.device, tuning: Tuning) -> Plan:
    """The plan of the backward pass, in which all programs run at once and compute many tiles each."""
    tile_rows, block_d, options = _tile(rows, width, tuning.backward, tuning)
    programs = min(cdiv(rows, tile_rows), tuning.programs_of_processor * num_processors(device))
    return Plan(tile_rows, block_d, programs, options)


def _tile(rows: int, width: int, elements: int, tuning: Tuning) -> tuple[int, int, CompileOptions]:
    block_d = power_of_2(width)
    tile_rows = min(max(1, elements // block_d), power_of_2(rows))
    warps = max(1, min(16, tile_rows * block_d // tuning.elements_of_warp))
    return tile_rows, block_d, CompileOptions(num_warps=warps)
