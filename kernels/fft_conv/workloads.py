"""The benchmark's description of the long convolution: filters as long as the input, in float32.

The shapes with B 8 and D 1024 are the sweep of H3's figure 2, the others are sizes of the long range arena. `gates` is
`plain` or `gated`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from subquad.kernels.fft_conv import fft_conv, fft_conv_at
from subquad.kernels.fft_conv.reference import fft_conv_at_reference, fft_conv_reference
from subquad.kernels.workload import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    Workload,
    at_most,
    named,
    normal,
    ours,
    sizes,
    time_second,
    traffic,
)

MIN_FFT, MAX_FFT, MANY_FFT = 256, 2**22, 2**15
"""Sizes of FlashFFTConv's transforms, and the largest size for which it takes any D."""


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Filters that decay over T as Hyena's do (by 100 after 0.3 to 1.5 T), with a sum of squares near one."""
    batch, length, width = sizes(shape, "BTD")
    wide = torch.promote_types(dtype, torch.float32)
    u = normal(generator, dtype, batch, length, width)
    rate = math.log(100) / torch.linspace(0.3, 1.5, width, dtype=wide, device=generator.device) / length
    time = torch.arange(length, dtype=wide, device=generator.device)
    filters = normal(generator, wide, width, length).mul_(torch.exp(-rate[:, None] * time))
    inputs = {"u": u, "filter": filters.mul_((2 * rate[:, None]).sqrt())}
    if shape["gates"] == "gated":
        inputs |= {name: normal(generator, dtype, batch, length, width) for name in ("gate_in", "gate_out")}
    if shape.get("skip") == "given":
        inputs["D"] = normal(generator, wide, width)
    return inputs


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Real transforms of size n = 2 T, 2.5 n log2 n operations each, and 3 n for a product of spectra.

    Forward: those of input, output and filter. Backward, spectra kept: of dy, du and the filter's gradient.
    """
    batch, length, width = sizes(shape, "BTD")
    gates = 2 if shape["gates"] == "gated" else 0
    sequence = batch * length * width * dtype.itemsize
    inputs = (1 + gates) * sequence + width * length * max(4, dtype.itemsize)
    size = 2 * length
    transforms, spectra = width * (2 * batch + 1), width * batch
    flops = (2 if backward else 1) * transforms * 2.5 * size * math.log2(size)
    flops += (3 if backward else 1) * spectra * 3 * size
    return Cost(num_bytes=traffic(inputs, sequence, backward), num_flops=int(flops))


def torch_fft_conv(
    u: Tensor, filter: Tensor, *, gate_in: Tensor | None = None, gate_out: Tensor | None = None
) -> Tensor:
    """Channel first: u, gates [B, D, T], filter [D, T], y [B, D, T] in the dtype of u. Transforms in float32."""
    length = u.shape[-1]
    v = u.to(filter.dtype) if gate_in is None else gate_in.to(filter.dtype) * u
    spectrum = torch.fft.rfft(v, n=2 * length) * torch.fft.rfft(filter, n=2 * length)
    y = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
    return (y if gate_out is None else gate_out * y).to(u.dtype)


def has_products(shape: Shape, dtype: torch.dtype) -> str | None:
    """The reason why the Triton path would convert its inputs to float32, or None."""
    from subquad.kernels.fft_conv.triton.plan import has_kernels

    steps = int(shape["T"])
    if dtype == torch.float32 or has_kernels(steps, dtype, steps):
        return None
    return f"the Triton path has no kernels for filters of {steps} taps in {dtype}"


def time_contiguous(inputs: Inputs) -> Inputs:
    """u and gates [B, T, D] with time contiguous, the layout that our kernels and every peer work in."""
    return {name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 3 else x for name, x in inputs.items()}


def load_flashfftconv() -> Callable[..., Tensor]:
    from flashfftconv import FlashFFTConv

    @lru_cache
    def module(size: int, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
        return FlashFFTConv(size, dtype=dtype).to(device)

    def peer(u: Tensor, filter: Tensor, gate_in: Tensor | None = None, gate_out: Tensor | None = None) -> Tensor:
        convolve = module(2 * u.shape[-1], u.dtype, u.device)
        return convolve(u, filter) if gate_in is None else convolve(u, filter, gate_in, gate_out)

    return peer


def has_kernel(shape: Shape, dtype: torch.dtype) -> str | None:
    width, size = int(shape["D"]), 2 * int(shape["T"])
    if dtype.itemsize != 2:
        return f"FlashFFTConv runs in half precision only, not in {dtype}"
    if size & (size - 1) or not MIN_FFT <= size <= MAX_FFT:
        return f"FlashFFTConv has transforms of powers of two in {MIN_FFT}..{MAX_FFT}, not of 2 T = {size}"
    return "FlashFFTConv needs D a multiple of 16 at this T" if size > MANY_FFT and width % 16 else None


def channel_first(inputs: Inputs) -> Inputs:
    return {name: x if name == "filter" else x.transpose(1, 2).contiguous() for name, x in inputs.items()}


def shape_of(inputs: Inputs) -> Shape:
    return named("BTD", inputs["u"], gates="plain" if inputs["gate_in"] is None else "gated")


WORKLOAD = Workload(
    op="fft_conv",
    reference=fft_conv_reference,
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    # 512 steps take the same kernels as most longer sequences, and D 16 suits every kernel
    short=at_most(B=2, T=512, D=16),
    implementations=(
        *ours(fft_conv, to_native=time_contiguous, supports=has_products),
        Implementation("fft", "torch", lambda: torch_fft_conv, channel_first, time_second),
        Implementation(
            "flashfftconv",
            "peer",
            load_flashfftconv,
            channel_first,
            time_second,
            has_kernel,
            packages=("flashfftconv",),
        ),
    ),
    shapes={
        "quick": (
            {"B": 8, "T": 1024, "D": 1024, "gates": "plain"},
            {"B": 8, "T": 8192, "D": 1024, "gates": "plain"},
        ),
        "paper": (
            *({"B": 8, "T": 2**power, "D": 1024, "gates": "plain"} for power in range(8, 16)),
            {"B": 8, "T": 8192, "D": 1024, "gates": "gated"},
            {"B": 1, "T": 131072, "D": 1024, "gates": "plain"},
            # associative recall, in float32
            {"B": 128, "T": 512, "D": 128, "gates": "plain"},
            {"B": 50, "T": 1024, "D": 256, "gates": "plain"},
            {"B": 50, "T": 4096, "D": 256, "gates": "plain"},
            {"B": 16, "T": 16384, "D": 256, "gates": "plain"},
            # Hyena in the tasks of MAD, which have short sequences
            *({"B": 128, "T": steps, "D": 512, "gates": "gated"} for steps in (32, 128, 256)),
        ),
    },
    keep=("filter", "D"),
    dtypes=(torch.bfloat16, torch.float32),
    small=(
        {"B": 1, "T": 32, "D": 3, "gates": "gated"},
        {"B": 2, "T": 70, "D": 2, "gates": "plain"},
        {"B": 2, "T": 65, "D": 3, "gates": "gated", "skip": "given"},
        {"B": 3, "T": 150, "D": 2, "gates": "plain", "skip": "given"},
    ),
    time={"u": 1, "gate_in": 1, "gate_out": 1},
)


def make_inputs_at(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """The inputs of `make_inputs` and `P` positions: with `places: last` the last ones of every sequence."""
    (batch, length, count), device = sizes(shape, "BTP"), generator.device
    inputs = make_inputs({**shape, "gates": "plain"}, dtype, generator)
    if shape["places"] == "last":
        places = torch.arange(length - count, length, device=device).expand(batch, count)
    else:
        places = torch.rand(batch, length, generator=generator, device=device).argsort(1)[:, :count].sort(1)[0]
    return {**inputs, "positions": places}


def cost_at(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """u and the filter are read once; a multiply-add for each input before each position, taken as T of them."""
    batch, length, width, count = sizes(shape, "BTDP")
    inputs = (batch * length + length) * width * dtype.itemsize
    outputs = batch * count * width * dtype.itemsize
    flops = 2 * batch * length * width * count
    return Cost(num_bytes=traffic(inputs, outputs, backward), num_flops=(3 if backward else 1) * flops)


AT = Workload(
    op="fft_conv_at",
    reference=fft_conv_at_reference,
    make_inputs=make_inputs_at,
    cost=cost_at,
    shape_of=lambda inputs: named("BTD", inputs["u"], P=inputs["positions"].shape[1]),
    short=at_most(B=2, T=512, D=16),
    implementations=ours(fft_conv_at),
    shapes={
        "quick": ({"B": 64, "T": 4112, "D": 64, "P": 16, "places": "last"},),
        "paper": tuple({"B": 64, "T": 4112, "D": width, "P": 16, "places": "last"} for width in (64, 128)),
    },
    dtypes=(torch.float32,),
    keep=("filter", "D"),
    small=(
        {"B": 2, "T": 70, "D": 3, "P": 5, "places": "last"},
        # a program adds the gradients of the taps from two sequences
        {"B": 5, "T": 300, "D": 2, "P": 7, "places": "any", "skip": "given"},
        {"B": 1, "T": 65, "D": 70, "P": 65, "places": "last", "skip": "given"},
    ),
)
