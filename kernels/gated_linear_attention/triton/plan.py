"""Plan that the kernels of one call share: tuning, precision and packed sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from subquad.kernels.device import active_gpu, float32_products, interpreted, is_hopper
from subquad.kernels.launch import CompileOptions, cdiv, power_of_2

NONE, HEAD, CHANNEL = 0, 1, 2
"""Kinds of decay: none, one log-decay for each head, or one for each channel."""
Strides = tuple[int, ...]
Chosen = TypeVar("Chosen")


def decay_kind(log_decay: Tensor | None) -> int:
    """NONE without log-decays, HEAD for log-decays [B, T, H], CHANNEL for [B, T, H, K] or [B, T, H, V]."""
    return NONE if log_decay is None else HEAD if log_decay.dim() == 3 else CHANNEL


class Tile(NamedTuple):
    """Maximum width of a program's tiles in channels of keys and of values, and how the kernel is compiled."""

    block_k: int
    block_v: int
    options: CompileOptions


def _by_kind(none: Tile, head: Tile, channel: Tile) -> dict[int, Tile]:
    return {NONE: none, HEAD: head, CHANNEL: channel}


@dataclass(frozen=True, eq=False)
class Tuning:
    """Choices that change speed and memory and, apart from rounding, no result.

    The defaults were measured on an H200 for operands in bfloat16, and `FLOAT32` for operands in float32.

    `scores`, `states`, `read` and `grads` are the tiles of those kernels by kind of decay.
    """

    chunk: int = 64
    """Positions in a chunk, a power of two."""
    min_width: int = 64
    """Minimum tile width in elements. ptxas 12.8 miscompiles some kernels with chunks of 64 and narrower tiles (see
    LOG.md)."""
    scores: Mapping[int, Tile] = field(
        # tiles of scores have no channels of values
        default_factory=lambda: dict.fromkeys((HEAD, CHANNEL), Tile(64, 0, CompileOptions(4, 2)))
    )
    states: Mapping[int, Tile] = field(
        default_factory=lambda: _by_kind(
            none=Tile(64, 128, CompileOptions(4, 3)),
            head=Tile(64, 64, CompileOptions(4, 3)),
            channel=Tile(64, 64, CompileOptions(4, 3)),
        )
    )
    read: Mapping[int, Tile] = field(
        default_factory=lambda: dict.fromkeys((NONE, HEAD, CHANNEL), Tile(64, 128, CompileOptions(4, 3)))
    )
    grads: Mapping[int, Tile] = field(
        default_factory=lambda: _by_kind(
            none=Tile(64, 64, CompileOptions(4, 3)),
            head=Tile(64, 64, CompileOptions(4, 3)),
            channel=Tile(32, 64, CompileOptions(4, 3)),
        )
    )
    groups: Tile = field(default=Tile(64, 64, CompileOptions(4, 2)))
    """The tile of the kernels for heads that share queries and keys."""
    group_values: Tile = field(default=Tile(64, 64, CompileOptions(4, 1)))
    """The tile of `_group_values_kernel`, two programs of which fit on a multiprocessor."""
    lone: Tile = field(default=Tile(64, 64, CompileOptions(4, 2, 168)))
    """The tile of both kernels of gradients for lone heads (`Plan.is_lone`); three programs fit on a multiprocessor."""
    walk: Mapping[int, Tile] = field(
        default_factory=lambda: {
            64: Tile(64, 64, CompileOptions(4, 3)),
            128: Tile(128, 128, CompileOptions(8, 3)),
            256: Tile(256, 128, CompileOptions(8, 2)),
        }
    )
    """By the number of key channels, padded to a power of two: a tile holds all of them. `_walk_kernel` is used on
    Hopper in bfloat16; other GPUs have too little room for its state, or were not measured."""
    few_programs: int = 256
    """Number of programs of `_states_kernel` below which time is cut into segments."""
    enough_programs: int = 512
    """Number of programs of `_states_kernel` that the segments aim at."""
    walk_warps: int = 1024
    """Warps of `_walk_kernel` that run at the same time: 8 on each multiprocessor, as many as its registers allow."""
    min_segment: int = 8
    """Minimum number of chunks in a segment."""
    mild_half: float = 60.0
    """Maximum sum of -log_decay over half a chunk for which `_scores_kernel` and `_grads_kernel` factor the decays
    about the middle of the chunk. Both factors must stay within the range of float32."""
    mild_float32: float = 2.0
    """The same for float32 inputs, where in addition the rounding of the exponents must not be visible."""


def _float32_tuning() -> Tuning:
    """Chunks and tiles of half the size, because float32 operands take more registers and three times the products.

    Many small programs then run at once, where large ones kept most of their tiles in local memory. With narrow tiles,
    heads of few channels need no products with padding.
    """
    kinds = NONE, HEAD, CHANNEL
    pairs = Tile(32, 32, CompileOptions(2, 1))
    wide = Tile(32, 64, CompileOptions(4, 2))
    return Tuning(
        chunk=32,
        min_width=16,
        scores=dict.fromkeys(kinds, pairs),
        states=dict.fromkeys(kinds, wide),
        read=dict.fromkeys(kinds, wide),
        grads=dict.fromkeys(kinds, pairs),
        groups=pairs,
        group_values=pairs,
        lone=pairs,
    )


FLOAT32 = _float32_tuning()


class Plan(NamedTuple):
    """Settings that the kernels of one call share."""

    gpu: Any
    """The GPU that kernels are compiled for (`active_gpu`)."""
    tuning: Tuning
    chunk: int
    scale: float
    work: torch.dtype
    """The dtype of the operands of matrix products and of states in memory."""
    precision: str
    """Triton's `input_precision` for products of float32 operands. Inputs in half precision need only tf32."""
    mild: float
    """`Tuning.mild_half` or `Tuning.mild_float32`."""
    table: Tensor | None
    """For packed sequences [chunks, 2]: the start of each chunk and the end of its sequence."""
    bounds: Tensor | None
    """For packed sequences [sequences + 1]: the first chunk of each sequence, and the number of all chunks."""
    max_walk: int
    """Maximum number of key channels for which `_walk_kernel` is used; 0 where it is not used."""

    def num_chunks(self, length: int) -> int:
        return cdiv(length, self.chunk) if self.table is None else len(self.table)

    def num_sequences(self, batch: int) -> int:
        return batch if self.bounds is None else len(self.bounds) - 1

    def width(self, block: int, size: int) -> int:
        """Width of a tile over `size` channels: at most `block`, and no wider than needed."""
        return max(self.tuning.min_width, min(block, power_of_2(size)))

    def is_lone(self, key_shape: tuple[int, ...], value_shape: tuple[int, ...]) -> bool:
        """Whether heads of q [B, T, G, K] and v [B, T, H, V] share no keys, and the values of each are one block."""
        return key_shape[2] == value_shape[2] and value_shape[3] <= self.tuning.lone.block_v

    def constants(self, tile: Tile, heads: int, key_dim: int, value_dim: int) -> dict[str, Any]:
        """Sizes of heads, chunks and tiles and the options of a launch, as kernels over keys and values name them."""
        return {
            "H": heads,
            "K": key_dim,
            "V": value_dim,
            "C": self.chunk,
            "BK": self.width(tile.block_k, key_dim),
            "BV": self.width(tile.block_v, value_dim),
            "PRECISION": self.precision,
            **tile.options.keywords(),
        }


class Planner:
    """Makes plans, and keeps those of sequences that are not packed.

    tuning:  for operands in bfloat16.
    float32: for operands in float32; by default the same.
    """

    def __init__(self, tuning: Tuning, float32: Tuning | None = None) -> None:
        self._tunings = {torch.bfloat16: tuning, torch.float32: float32 or tuning}
        self._kept = functools.lru_cache(256)(self._make)

    def __call__(self, scale: float, *operands: Tensor, sequence_ends: Sequence[int] | None = None) -> Plan:
        """A plan for an operator.

        operands:      the inputs that products of matrices take.
        sequence_ends: 0 and where each packed sequence ends. None of the sequences is empty.
        """
        plan = self._kept(active_gpu(), scale, *[x.dtype for x in operands])
        if sequence_ends is None:
            return plan
        chunk = plan.chunk
        pairs = [(start, stop) for begin, stop in pairwise(sequence_ends) for start in range(begin, stop, chunk)]
        bounds = [0, *accumulate(cdiv(stop - begin, chunk) for begin, stop in pairwise(sequence_ends))]
        table, firsts = (torch.tensor(x, dtype=torch.int32).to(operands[0].device) for x in (pairs, bounds))
        return plan._replace(table=table, bounds=firsts)

    def _make(self, gpu: Any, scale: float, *dtypes: torch.dtype) -> Plan:
        half = torch.float32 not in dtypes
        work = torch.bfloat16 if set(dtypes) == {torch.bfloat16} else torch.float32
        tuning = self._tunings[work]
        return Plan(
            gpu=gpu,
            tuning=tuning,
            chunk=tuning.chunk,
            # a kernel is compiled apart for integers
            scale=float(scale),
            work=work,
            precision="tf32" if half else float32_products(),
            mild=tuning.mild_half if half else tuning.mild_float32,
            table=None,
            bounds=None,
            max_walk=max(tuning.walk) if work == torch.bfloat16 and (interpreted() or is_hopper()) else 0,
        )


PLANNER = Planner(Tuning(), FLOAT32)


class EndStates(NamedTuple):
    """States [B, H, K, V] at the two ends of a walk over time."""

    first: Tensor | None
    """The state from which the walk starts; None stands for zeros."""
    last: Tensor | None
    """Empty memory for the state with which the walk ends; None where it is not wanted."""

    def transposed(self) -> EndStates:
        first, last = (None if state is None else state.transpose(-1, -2) for state in self)
        return EndStates(first, last)


def position_strides(**strides: Strides | None) -> dict[str, int]:
    """The kernel arguments `x_stride_b`, `x_stride_t` and `x_stride_h` of every tensor [B, T, H, ...] called x.

    They are zero for a tensor that is not given.
    """
    return {
        f"{name}_stride_{axis}": 0 if x is None else x[i] for name, x in strides.items() for i, axis in enumerate("bth")
    }


def group_size(heads: int, groups: int) -> int:
    """The number of heads of values that share one of `groups` heads of queries and keys; one where there are none."""
    return heads // groups if groups else 1


def strides_of(x: Tensor | None) -> Strides | None:
    """The strides of x in elements, None where it is not given."""
    return None if x is None else x.stride()


class PositionStrides(tuple[Strides | None, ...]):
    """The strides of tensors [B, T, H, ...]; None for a tensor that is not given. `planned` keeps plans by them."""

    @classmethod
    def of(cls, *tensors: Tensor | None) -> PositionStrides:
        return cls([strides_of(x) for x in tensors])

    def arguments(self, names: str) -> dict[str, int]:
        """See `position_strides`. names: those that the kernel has for the tensors."""
        return position_strides(**dict(zip(names.split(), self, strict=True)))


def planned(make: Callable[..., Chosen]) -> Callable[..., Chosen]:
    """Keeps what a function of a plan, sizes and strides returns, by its arguments.

    Plans of packed sequences are left out, because their tables would be kept with them.
    """
    kept = functools.lru_cache(1024)(make)
    return lambda plan, *sizes: (kept if plan.table is None else make)(plan, *sizes)
