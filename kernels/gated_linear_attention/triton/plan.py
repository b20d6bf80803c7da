"""What the kernels of one call share: sizes of tiles, precision, kept launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.launch import Form, Launch, cdiv, form, power_of_2

NONE, HEAD, CHANNEL = 0, 1, 2
"""What decays: nothing, a head (constant or by step), a channel."""

CHUNK = 64


class Config(NamedTuple):
    """Of a tile: channels of keys, of values."""

    block_k: int
    block_v: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    """Of a thread at most; None leaves it to the compiler."""


NARROWEST = 64
"""Numbers a tile is wide at least (module docstring)."""
# by kind of decay
SCORES = {HEAD: Config(64, 0, 4, 2), CHANNEL: Config(64, 0, 4, 2)}
STATES = {NONE: Config(64, 128, 4, 3), HEAD: Config(64, 64, 4, 3), CHANNEL: Config(64, 64, 4, 3)}
READ = {kind: Config(64, 128, 4, 3) for kind in (NONE, HEAD, CHANNEL)}
GRADS = {NONE: Config(64, 64, 4, 3), HEAD: Config(64, 64, 4, 3), CHANNEL: Config(32, 64, 4, 3)}
# by K, whose tile holds all of it
WALK = {64: Config(64, 64, 4, 3), 128: Config(128, 128, 8, 3), 256: Config(256, 128, 8, 2)}
FEW_STATES = 256, 512
"""Programs of `_states_kernel`: fewer than the first number walk segments, up to as many as the second."""
WARPS = 1024
"""Those of programs of `_walk_kernel` at a time: eight a multiprocessor, all that its registers hold."""
SHORTEST = 8
"""Chunks of a segment, at least."""


def decay_kind(g: Tensor | None) -> int:
    return NONE if g is None else HEAD if g.dim() == 3 else CHANNEL


def mild_limit(precision: str) -> float:
    """How far from the middle of a chunk factors may grow: within float32's range, where its rounding is no matter."""
    return 60.0 if precision == "tf32" else 2.0


def block_size(block: int, size: int) -> int:
    """No larger than a small size has use for."""
    return max(NARROWEST, min(block, power_of_2(size)))


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Of B, T, H."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def rows(x: Tensor) -> Tensor:
    """With dense channels, as every kernel reads them."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Plan(NamedTuple):
    """What the kernels of one call have in common, and of calls on tensors of the same forms."""

    chunk: int
    scale: float
    work: torch.dtype
    """Of operands of products and of kept states."""
    precision: str
    """Of products of float32 operands: half precision asks for no more than tf32."""
    table: Tensor | None
    """Of packed sequences, where each chunk starts and its sequence ends [chunks, 2]."""
    bounds: Tensor | None
    """Of packed sequences, the first chunk of each, and their number [sequences + 1]."""
    launches: dict[Any, Launch] | None
    """By kernel, configuration, and what the forms of the inputs leave open; None keeps none."""

    @property
    def larger(self) -> int:
        """How many times as large tiles are, whose operands stay in registers."""
        return self.work.itemsize // 2

    def num_chunks(self, length: int) -> int:
        return cdiv(length, self.chunk) if self.table is None else len(self.table)

    def num_sequences(self, x: Tensor) -> int:
        return x.shape[0] if self.bounds is None else len(self.bounds) - 1

    def launch(self, key: Any, arguments: Callable[[], tuple[Any, ...]], *tensors: Tensor | None) -> None:
        """arguments: gives kernel, grid, numbers and constants of what `key` stands for in this plan."""
        ready = None if self.launches is None else self.launches.get(key)
        if ready is None:
            kernel, grid, numbers, constants = arguments()
            ready = Launch(kernel, grid, *numbers, **constants)
            if self.launches is not None:
                self.launches[key] = ready
        ready(*tensors)


def make_plan(scale: float, *inputs: Tensor | None, ends: list[int] | None = None) -> Plan:
    """For products of the first three of all inputs of an operator; `ends`: 0 and the end of each packed sequence."""
    common = _plan(scale, CHUNK, *map(form, inputs))
    if ends is None:
        return common
    pairs = [(start, stop) for a, stop in pairwise(ends) for start in range(a, stop, CHUNK)]
    bounds = [0, *accumulate(cdiv(stop - a, CHUNK) for a, stop in pairwise(ends))]
    device = next(x.device for x in inputs if x is not None)
    table, firsts = (torch.tensor(x, dtype=torch.int32).to(device) for x in (pairs, bounds))
    return common._replace(table=table, bounds=firsts, launches=None)


@functools.lru_cache(256)
def _plan(scale: float, chunk: int, first: tuple[Any, ...], *others: Form) -> Plan:
    dtypes = {x[2] for x in (first, *others[:2]) if x is not None}
    work = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
    precision = "tf32" if torch.float32 not in dtypes else "ieee" if torch.version.hip else "tf32x3"
    # the interpreter is not in a hurry
    launches: dict[Any, Launch] | None = {} if first[3].type == "cuda" else None
    return Plan(chunk, scale, work, precision, None, None, launches)


def launch_options(config: Config, larger: int = 1) -> dict[str, int]:
    """Of a tile so many times as large."""
    options = {"num_warps": min(8, config.num_warps * larger), "num_stages": config.num_stages}
    return options if config.registers is None else options | {"maxnreg": config.registers}


Ends = tuple[Tensor | None, Tensor | None]
"""States [B, H, K, V] at the two ends of time: the one that is given and the one to be written."""
