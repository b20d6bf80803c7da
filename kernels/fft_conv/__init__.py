"""Long causal convolution with an optional skip and optional gates.

v_t    = gate_in_t * u_t
y_t[d] = gate_out_t[d] * (sum_{l=0}^{min(t, L-1)} filter[d, l] v_{t-l}[d] + D[d] v_t[d])

Source: H3 (Fu et al. 2023), section 4.1 and algorithm 2 (FlashConv's fused gates); Hyena (Poli et al. 2023), section 3.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from subquad.kernels.backend import NO_ELEMENT, on_device_of, use_triton
from subquad.kernels.checks import check_integers, check_shapes
from subquad.kernels.fft_conv.chunked import fft_conv_chunked
from subquad.kernels.operations import counted
from subquad.kernels.positions import take_positions

__all__ = ["fft_conv", "fft_conv_at", "reads_few"]

MIN_LAGS, MAX_LAGS, MIN_ROWS = 512, 16384, 8192
"""The kernels are faster for bfloat16 u with MIN_LAGS to MAX_LAGS taps, where B T is at least MIN_ROWS."""
MAX_STEPS = 2**18
"""Maximum number of steps for filters of more than MAX_LAGS taps."""
FEW_LAGS, MIN_ELEMENTS = 64, 2**21
"""They are also faster for up to FEW_LAGS taps (H3's shift model) without gates, and for fewer than MIN_LAGS steps with
gates (Hyena in the tasks of MAD), if u has MIN_ELEMENTS elements."""
MAX_FLOAT32_STEPS, MIN_FLOAT32_ELEMENTS, MIN_FLOAT32_BATCH = 512, 2**19, 16
"""For float32 u they are faster with up to MAX_FLOAT32_STEPS steps, MIN_FLOAT32_ELEMENTS elements and MIN_FLOAT32_BATCH
sequences at least. With fewer sequences the sums for the gradient of the taps take many times the memory of u. At 1024
steps the transforms of `triton/half_size.py` take two thirds of the time with backward, and a fifth more forward."""

FEW_POSITIONS = 32
"""Maximum number of positions that `fft_conv_at` sums directly, and minimum number of steps for each of them."""


@counted("fft_conv")
def fft_conv(
    u: Tensor,
    filter: Tensor,
    *,
    D: Tensor | None = None,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """The convolution of this module. u, gates [B, T, D]; filter [D, L] with any L; D [D]; returns y [B, T, D].

    y has the dtype of u. PyTorch's transforms are at least float32, also for half-precision u and under autocast.

    backend: the Triton path multiplies with Toeplitz matrices or, with many taps, transforms blocks by products with
        small matrices, which are in half precision for bfloat16 u (README), and with the accuracy of float32 for
        float32 u; its y has time contiguous in memory. It leaves filters that are too long for it to PyTorch's
        transforms. `auto` takes it on a GPU where it is faster.

    Raises ValueError for shapes or options that do not fit.
    """
    _check("fft_conv", u, filter, D=D, gate_in=gate_in, gate_out=gate_out)
    tensors = (u, filter, D, gate_in, gate_out)
    is_faster = _kernels_are_faster(u, filter, gate_in is not None or gate_out is not None)
    obstacle = None if u.numel() else NO_ELEMENT
    if use_triton("fft_conv", backend, *tensors, obstacle=obstacle, is_faster=is_faster):
        from subquad.kernels.fft_conv.triton import fft_conv_triton

        # autocast does not know meta tensors, for which launchers compute shapes
        with on_device_of(u), torch.autocast("cuda" if u.is_cuda else "cpu", enabled=False):
            return fft_conv_triton(u, filter, D=D, gate_in=gate_in, gate_out=gate_out)
    with torch.autocast(u.device.type, enabled=False):
        return fft_conv_chunked(u, filter, D=D, gate_in=gate_in, gate_out=gate_out, backend=backend)


@counted("fft_conv_at")
def fft_conv_at(
    u: Tensor,
    filter: Tensor,
    positions: Tensor,
    *,
    D: Tensor | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """The convolution of this module at some positions: y [B, P, D] in the dtype of u.

    u [B, T, D]; filter [D, L] with any L; D [D]; positions [B, P], integers from 0 to T - 1, of which no row has one
    twice.

    backend: the Triton path adds up the inputs before each position, in float32, without a transform. `auto` takes it
        on a GPU where `reads_few` holds; elsewhere y is taken from `fft_conv`.

    Raises ValueError for shapes or options that do not fit.
    """
    _check("fft_conv_at", u, filter, D=D)
    check_integers("fft_conv_at", "positions", positions)
    if positions.ndim != 2 or len(positions) != len(u):
        raise ValueError(f"fft_conv_at: positions must be [{len(u)}, P] to go with u, got {list(positions.shape)}.")
    obstacle = None if u.numel() and positions.numel() else NO_ELEMENT
    few = reads_few(u, positions)
    if use_triton("fft_conv_at", backend, u, filter, D, beside=(positions,), obstacle=obstacle, is_faster=few):
        from subquad.kernels.fft_conv.triton.at_positions import fft_conv_at_triton

        with on_device_of(u):
            return fft_conv_at_triton(u, filter, positions, D)
    return take_positions(fft_conv(u, filter, D=D, backend=backend), positions.long())


def reads_few(u: Tensor, positions: Tensor) -> bool:
    """Whether `fft_conv_at` is expected to be faster on a GPU at these positions than a transform (`LOG.md`)."""
    steps, count = u.shape[1], positions.shape[1]
    return (
        u.dtype == torch.float32 and steps > MAX_FLOAT32_STEPS and count <= min(FEW_POSITIONS, steps // FEW_POSITIONS)
    )


def _kernels_are_faster(u: Tensor, filter: Tensor, with_gates: bool) -> bool:
    """Whether the kernels were measured to be faster than PyTorch's transforms (`LOG.md`)."""
    batch, steps, _ = u.shape
    lags = min(steps, filter.shape[1])
    if u.dtype == torch.float32:
        enough = u.numel() >= MIN_FLOAT32_ELEMENTS and batch >= MIN_FLOAT32_BATCH
        return enough and steps <= MAX_FLOAT32_STEPS
    if u.dtype != torch.bfloat16:
        return False
    with_few_taps = steps < MIN_LAGS if with_gates else lags <= FEW_LAGS
    if with_few_taps:
        return u.numel() >= MIN_ELEMENTS
    return lags >= MIN_LAGS and (lags <= MAX_LAGS or steps <= MAX_STEPS) and batch * steps >= MIN_ROWS


def _check(
    op: str,
    u: Tensor,
    filter: Tensor,
    *,
    D: Tensor | None,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
) -> None:
    if u.ndim != 3 or u.shape[1] == 0:
        raise ValueError(f"{op}: u must be [B, T, D] with T >= 1, got {list(u.shape)}.")
    if filter.ndim != 2 or filter.shape[0] != u.shape[2] or filter.shape[1] == 0:
        raise ValueError(f"{op}: filter must be [D, L] with D={u.shape[2]} and L >= 1, got {list(filter.shape)}.")
    shape = tuple(u.shape)
    wanted = {"D": (D, shape[2:]), "gate_in": (gate_in, shape), "gate_out": (gate_out, shape)}
    check_shapes(op, wanted, to_go_with="u")
