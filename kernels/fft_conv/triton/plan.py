"""Choice of the algorithm and of the tiles of the long convolution."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from subquad.kernels.device import float32_products
from subquad.kernels.launch import CompileOptions, cdiv, power_of_2


class ToeplitzTile(NamedTuple):
    """Tile of one program of `products.py`. Lengths are in steps of time."""

    chunk: int
    """C: every row of a tile is a chunk of C consecutive steps."""
    rows: int
    parts: int
    """Accumulators that share the rows; with two, the part nearer to the start of the sequence stops earlier."""
    step: int
    """K: steps of x that one product takes."""
    copies: int
    """SHIFTS: copies of the taps, each shifted by one more tap."""
    options: CompileOptions


class Operands(enum.Enum):
    """The numbers that products with Toeplitz matrices multiply."""

    FLOAT32 = "float32"
    """Inputs and taps of float32, as three products of TF32 numbers."""
    ROUNDED = "rounded"
    """Inputs and taps of bfloat16."""
    TERMS = "terms"
    """For each tap a sum of two bfloat16 numbers, and inputs of bfloat16; gated ones are such sums too."""
    HALVES = "halves"
    """For each float32 input and each tap a scaled sum of two float16 numbers (`kernels/float16_parts.py`)."""

    @property
    def num_terms(self) -> int:
        """Number of stored numbers whose sum is a tap."""
        return 2 if self in (Operands.TERMS, Operands.HALVES) else 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored numbers of a tap."""
        return {Operands.FLOAT32: torch.float32, Operands.HALVES: torch.float16}.get(self, torch.bfloat16)


TOEPLITZ_TILES = MappingProxyType(
    {
        Operands.FLOAT32: ToeplitzTile(64, 64, 1, 32, 1, CompileOptions(num_warps=4, num_stages=2)),
        Operands.ROUNDED: ToeplitzTile(128, 128, 2, 64, 4, CompileOptions(num_warps=4, num_stages=3)),
        Operands.TERMS: ToeplitzTile(64, 128, 1, 64, 4, CompileOptions(num_warps=4, num_stages=2)),
        Operands.HALVES: ToeplitzTile(64, 128, 1, 64, 4, CompileOptions(num_warps=4, num_stages=2)),
    }
)
RADIX = 64
"""R of all spectra: number of rows of the smallest matrix product. A block has R N steps."""
GRADIENT_OPTIONS = MappingProxyType(
    {16: CompileOptions(4, num_stages=2, max_registers=128), 32: CompileOptions(4, num_stages=3, max_registers=168)}
)
"""For the gradient of the taps, by N; with these registers four and three programs fit on a multiprocessor."""
CONV_COLUMNS = (16, 32)
"""N of the blocks that a convolution by spectra may have."""
LONG_COLUMNS = 32
"""N of the rows in a transform of whole sequences."""
CONV_REGISTERS = MappingProxyType({2: 128, 4: 168, 8: 255})
"""Maximum number of blocks of a sequence to the registers that a thread of a convolution by spectra may use. They
grow with the blocks, because a program keeps the spectra of all of them."""

LONG_ROWS = 128
"""Maximum number of rows in the outer stage of a transform of whole sequences."""


@dataclass(frozen=True)
class Tuning:
    """Limits between the algorithms, as measured on an H200. `lags` are taps that meet the input: min(L, T)."""

    max_lags_bfloat16: int = 16384
    max_lags_others: int = 1024
    """Maximum number of taps for inputs of a dtype; longer filters take the FFT of `chunked.py`."""
    halves_steps: int = 2048
    """Maximum number of steps of float32 inputs that are split into halves, with any number of taps."""
    averaging_lags: int = 512
    """Minimum number of taps for rounded operands; with fewer, the rounding errors of an output do not average out."""
    spectra_lags: int = 1024
    spectra_rows: int = 8192
    """Minimum number of taps, and of taps times sequences, for a convolution by spectra; below, products are used."""
    long_steps: int = 16385
    long_lags: int = 2048
    """Minimum number of steps, and of taps, for transforms of whole sequences."""
    diagonal_lags: int = 128
    """Maximum number of taps whose gradient comes from products of chunks (`chunks_gradient.py`) where x and g are
    bfloat16. It always does where they are sums of two numbers."""

    def max_lags(self, dtype: torch.dtype) -> int:
        """Maximum number of taps that the kernels take for u of a dtype."""
        return self.max_lags_bfloat16 if dtype == torch.bfloat16 else self.max_lags_others


TUNING = Tuning()


class ToeplitzPlan(NamedTuple):
    """Division of the chunks of all sequences of a channel into tiles of `rows` rows, of `batch` sequences each."""

    operands: Operands
    rows: int
    parts: int
    batch: int
    batch_groups: int
    num_groups: int
    tile: ToeplitzTile

    @property
    def precision(self) -> str | None:
        """Triton's `input_precision` of the products; None where their operands have 16 bits."""
        return float32_products() if self.operands is Operands.FLOAT32 else None


class SpectraPlan(NamedTuple):
    """Blocks of RADIX N steps that cover a sequence and the taps."""

    columns: int
    """N."""
    num_chunks: int
    """Number of blocks in a sequence."""
    num_k: int
    """Number of blocks of the taps, and one more if the taps of the last reach into another block of the sequence."""

    @property
    def size(self) -> int:
        """Number of steps in a block."""
        return RADIX * self.columns


class LongPlan(NamedTuple):
    """Rows of RADIX N elements between the two stages of a transform of whole sequences (`outer_stage.py`)."""

    num_rows: int
    """M, the number of pieces of RADIX N steps that cover a sequence."""

    @property
    def size(self) -> int:
        """Number of elements in a row."""
        return RADIX * LONG_COLUMNS

    @property
    def padded(self) -> int:
        """The number of rows with which the outer stage multiplies."""
        return max(16, power_of_2(self.num_rows))

    @property
    def tile(self) -> int:
        """Number of neighbouring elements of every row that a program of the outer stage makes."""
        return 128 if self.padded <= 32 else 64

    @property
    def outer_options(self) -> CompileOptions:
        """The options of the outer stage."""
        return CompileOptions(8 if self.padded > 64 else 4, num_stages=1)

    @property
    def inner_options(self) -> CompileOptions:
        """The options of the inner stage."""
        return CompileOptions(4, num_stages=1)


def operands_of(dtype: torch.dtype, length: int, lags: int, tuning: Tuning) -> Operands:
    """The operands of the products that convolve u of some dtype and length."""
    if takes_halves(length, dtype, tuning):
        return Operands.HALVES
    if dtype != torch.bfloat16:
        return Operands.FLOAT32
    return Operands.ROUNDED if lags >= tuning.averaging_lags else Operands.TERMS


def takes_halves(length: int, dtype: torch.dtype, tuning: Tuning) -> bool:
    """Whether inputs are split into halves: float32 ones of which one program sees a whole sequence."""
    return dtype == torch.float32 and length <= tuning.halves_steps


def takes_spectra(batch: int, padded_length: int, dtype: torch.dtype, lags: int, tuning: Tuning) -> bool:
    """Whether spectra convolve the inputs [B, padded_length, D] of a dtype, as `gates.gated` gives them."""
    enough = lags >= tuning.spectra_lags and batch * lags >= tuning.spectra_rows
    return enough and fits_spectra(padded_length, dtype, lags)


def fits_spectra(padded_length: int, dtype: torch.dtype, lags: int) -> bool:
    """Whether the registers of a program can hold the spectra of a sequence."""
    return dtype == torch.bfloat16 and conv_plan(padded_length, lags).num_chunks <= max(CONV_REGISTERS)


def fits_long(length: int, dtype: torch.dtype) -> bool:
    """Whether there are transforms of whole sequences of some length and dtype."""
    return dtype == torch.bfloat16 and long_plan(length).num_rows <= LONG_ROWS


def takes_long(length: int, dtype: torch.dtype, lags: int, tuning: Tuning) -> bool:
    """Whether transforms of whole sequences convolve inputs that spectra of blocks do not take."""
    return length >= tuning.long_steps and lags >= tuning.long_lags and fits_long(length, dtype)


def has_kernels(length: int, dtype: torch.dtype, lags: int, tuning: Tuning = TUNING) -> bool:
    """Whether there are kernels for so many taps; if not, PyTorch's FFT takes them."""
    return lags <= tuning.max_lags(dtype) or takes_halves(length, dtype, tuning) or fits_long(length, dtype)


def long_plan(length: int) -> LongPlan:
    """The plan of a transform of whole sequences."""
    return LongPlan(cdiv(length, RADIX * LONG_COLUMNS))


@functools.lru_cache(maxsize=1024)
def toeplitz_plan(batch: int, length: int, lags: int, operands: Operands) -> ToeplitzPlan:
    """The plan with the fewest products.

    A tile with more sequences computes fewer products above the diagonal of its Toeplitz matrix, but may have rows
    without a sequence.
    """
    tile = TOEPLITZ_TILES[operands]
    chunks = cdiv(length, tile.chunk)
    rows = min(tile.rows, max(64, power_of_2(batch * chunks)))
    parts = tile.parts if rows == tile.rows else 1

    def shared_by(sequences: int) -> tuple[int, ToeplitzPlan]:
        """The number of products in units of K, and the plan, where a tile holds that many sequences."""
        width = rows // parts // sequences
        batch_groups, chunk_groups = cdiv(batch, sequences), cdiv(chunks, width * parts)
        # a part multiplies all of its chunks as long as its last one needs
        most = min(chunks * tile.chunk, lags + tile.chunk)
        ends = [min((i + 1) * width * tile.chunk, most) for i in range(chunk_groups * parts)]
        plan = ToeplitzPlan(operands, rows, parts, sequences, batch_groups, batch_groups * chunk_groups, tile)
        return batch_groups * sum(ends), plan

    sizes = [2**i for i in range((rows // parts).bit_length())]
    return min((shared_by(size) for size in sizes if size < 2 * batch), key=lambda pair: pair[0])[1]


def _spectra_plan(columns: int, length: int, lags: int) -> SpectraPlan:
    chunks, blocks = cdiv(length, RADIX * columns), cdiv(lags, RADIX * columns)
    return SpectraPlan(columns, chunks, blocks + (chunks > blocks))


@functools.lru_cache(maxsize=1024)
def conv_plan(length: int, lags: int) -> SpectraPlan:
    """The plan of a convolution: the smaller blocks where one of them holds the sequence."""
    columns = next((n for n in CONV_COLUMNS if length <= RADIX * n), max(CONV_COLUMNS))
    return _spectra_plan(columns, length, lags)


@functools.lru_cache(maxsize=1024)
def gradient_plan(length: int, lags: int) -> SpectraPlan:
    """The plan of the gradient of the taps: the one that transforms the fewest elements."""

    def cost(plan: SpectraPlan) -> int:
        return plan.columns * sum(plan.num_chunks - k for k in range(plan.num_k))

    return min((_spectra_plan(columns, length, lags) for columns in GRADIENT_OPTIONS), key=cost)


def conv_options(plan: SpectraPlan) -> dict[str, Any]:
    """The options of `_conv_spectra_kernel`. With more stages all that is loaded would be kept in shared memory."""
    registers = next(registers for chunks, registers in CONV_REGISTERS.items() if plan.num_chunks <= chunks)
    return CompileOptions(4, num_stages=1, max_registers=registers).keywords()
