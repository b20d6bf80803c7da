"""Matrices of the discrete Fourier transforms in `spectra.py` and `taps_gradient.py`, which depend on sizes alone.

A block has SIZE = R N steps, t = N p + q, and SIZE frequencies, f = j + R a, a quarter off the usual ones. With
e(z) = exp(2 pi i z) its spectrum

    X[j + R a] = sum_t e(-(j + R a + 1/4) t / SIZE) x[t]
               = sum_q e(-q a / N) e(-(j + 1/4) q / SIZE) sum_p e(-(j + 1/4) p / R) x[N p + q]

is two products with small matrices, `inner` and `outer`, and a twiddle factor (`turns` in the kernels) for each element
between them. What goes around a block once comes back times i, so that blocks need no padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from subquad.kernels.fft_conv.triton.plan import RADIX, LongPlan

Kept = TypeVar("Kept", bound=tuple[Tensor, ...] | Tensor)


class Tables(NamedTuple):
    """The matrices of one N. Their parts are real and imaginary part."""

    inner: Tensor
    """[4, R, R], e(-(j + 1/4) p / R): each part in bfloat16, followed by what rounding leaves of it in bfloat16."""
    turns: Tensor
    """[2, R, N], the twiddle factors e(-(j + 1/4) q / SIZE): both parts in float16."""
    outer: Tensor
    """[3, N, N], e(-q a / N): both parts and minus the second, in float16."""
    quarter: Tensor
    """[SIZE, 2], e(m / 4 SIZE): both parts in float32."""
    half_inner: Tensor
    """[2, R, R], `inner` with both parts in float16."""


def make_tables(columns: int, device: torch.device) -> Tables:
    """The tables of N = columns."""
    size = RADIX * columns
    row, column, step = (torch.arange(i, dtype=torch.float64, device=device) for i in (RADIX, columns, size))

    def e(turns: Tensor) -> tuple[Tensor, Tensor]:
        return (2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()

    inner = []
    for part in e(-(row[:, None] + 0.25) * row / RADIX):
        rounded = part.bfloat16()
        inner += [rounded, (part - rounded.double()).bfloat16()]
    turns = e(-(row[:, None] + 0.25) * column / size)
    real, imaginary = e(-column[:, None] * column / columns)
    outer = torch.stack([real, imaginary, -imaginary])
    quarter = torch.stack(e(step / (4 * size)), 1)
    half = torch.stack(e(-(row[:, None] + 0.25) * row / RADIX)).half()
    return Tables(torch.stack(inner), torch.stack(turns).half(), outer.half(), quarter.float(), half)


class LongTables(NamedTuple):
    """The matrices of the outer stage of a transform of whole sequences (`outer_stage.py`), both parts in float16."""

    matrix: Tensor
    """[2, PADDED, PADDED], e(-(j + 1/4) p / M); zero where j or p is no row."""
    turns: Tensor
    """[2, PADDED, SIZE], the twiddle factors e(-(j + 1/4 - M / 4) q / M SIZE); zero where j is no row."""


def make_long_tables(num_rows: int, device: torch.device) -> LongTables:
    """The tables of M = num_rows."""
    plan = LongPlan(num_rows)
    row, step = (torch.arange(i, dtype=torch.float64, device=device) for i in (num_rows, plan.size))
    padding = plan.padded - num_rows

    def parts(turns: Tensor, *widths: int) -> Tensor:
        both = torch.stack([(2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()])
        return torch.nn.functional.pad(both, widths).half()

    matrix = parts(-(row[:, None] + 0.25) * row / num_rows, 0, padding, 0, padding)
    shifted = row[:, None] + 0.25 - num_rows / 4
    return LongTables(matrix, parts(-shifted * step / (num_rows * plan.size), 0, 0, 0, padding))


class TableCache(Generic[Kept]):
    """Tables by size and device. Making them takes some forty small kernels, as long as a short convolution."""

    def __init__(self, make: Callable[[int, torch.device], Kept]) -> None:
        self.make = make
        self._kept: dict[tuple[int, torch.device], Kept] = {}

    def get(self, size: int, device: torch.device) -> Kept:
        """The tables of a size, N or M, made at first use.

        Tables that are made while a CUDA graph is captured belong to its memory, and those of fake tensors have none;
        both are not kept.
        """
        tables = self._kept.get((size, device))
        if tables is None:
            tables = self.make(size, device)
            is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not (is_captured or isinstance(tables[0], FakeTensor)):
                self._kept[size, device] = tables
        return tables


TABLES = TableCache(make_tables)
LONG_TABLES = TableCache(make_long_tables)
