"""Tiles of the norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.device import num_processors
from subquad.kernels.launch import CompileOptions, cdiv, power_of_2


class Tuning(NamedTuple):
    """Sizes of tiles in elements."""

    forward: int = 2048
    """Elements in a tile of whole rows; a longer row is a tile of its own."""
    backward: int = 2048
    elements_of_warp: int = 512
    """Elements of a tile for each warp."""
    programs_of_processor: int = 4
    """Programs of the backward pass on each multiprocessor; each writes one row of partial sums."""
    programs_with_heads: int = 3
    """The same where the weight has heads: a program has the weights and sums of several of them in registers, of which
    more programs would not find enough and begin when the others have ended."""


TUNING = Tuning()


class Options(NamedTuple):
    """Arguments of the norm that are not tensors, and the tuning."""

    kind: str
    eps: float
    gate_activation: str
    activation: str | None
    gate_first: bool
    out_dtype: torch.dtype
    tuning: Tuning = TUNING

    def constants(self) -> dict[str, bool]:
        """The options as both kernels name them."""
        return {
            "SIGMOID": self.gate_activation == "sigmoid",
            "PLAIN_GATE": self.gate_activation == "identity",
            "LAYER": self.kind == "layer",
            "L2": self.kind == "l2",
            "SILU": self.activation == "silu",
            "FIRST": self.gate_first,
        }


class Factors(NamedTuple):
    """Tensors by which normalised rows are multiplied, or which are added to them; None where they are not given."""

    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    skip: Tensor | None
    skip_scale: Tensor | None


class Plan(NamedTuple):
    """Tile and programs of one kernel."""

    rows: int
    block_d: int
    programs: int
    options: CompileOptions
    block_h: int = 1
    """Heads in a tile of the backward pass, whose rows are this many heads of every token."""


def forward_plan(rows: int, width: int, tuning: Tuning) -> Plan:
    """The plan of the forward pass, in which every program computes one tile."""
    tile_rows, block_d, options = _tile(rows, width, tuning.forward, tuning)
    return Plan(tile_rows, block_d, cdiv(rows, tile_rows), options)


def backward_plan(rows: int, width: int, heads: int, device: torch.device, tuning: Tuning) -> Plan:
    """The plan of the backward pass, in which all programs run at once and compute many tiles each.

    heads: rows of the weight. Programs that differ in heads are the inner axis of the grid.
    """
    tile_rows, block_d, options = _tile(rows, width, tuning.backward, tuning)
    # a power of two that divides the heads, so that no tile has rows of heads that do not exist
    block_h = min(tile_rows, heads & -heads)
    num_h = heads // block_h
    at_once = tuning.programs_of_processor if heads == 1 else tuning.programs_with_heads
    most = max(1, at_once * num_processors(device) // num_h)
    programs = num_h * min(cdiv(rows // heads, tile_rows // block_h), most)
    return Plan(tile_rows, block_d, programs, options, block_h)


def _tile(rows: int, width: int, elements: int, tuning: Tuning) -> tuple[int, int, CompileOptions]:
    block_d = power_of_2(width)
    tile_rows = min(max(1, elements // block_d), power_of_2(rows))
    warps = max(1, min(16, tile_rows * block_d // tuning.elements_of_warp))
    return tile_rows, block_d, CompileOptions(num_warps=warps)
