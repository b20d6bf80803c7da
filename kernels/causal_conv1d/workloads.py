"""What the benchmark runs of the short causal convolution (the worked example for every other operator)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.causal_conv1d import causal_conv1d
from kernels.causal_conv1d.reference import causal_conv1d_reference
from kernels.workload import Cost, Implementation, Inputs, Shape, Workload, normal


def reference(**inputs: Any) -> Tensor:
    return causal_conv1d_reference(**inputs)[0]


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    batch, length, width, taps = (int(shape[letter]) for letter in "BTDW")
    return {
        "x": normal(generator, dtype, batch, length, width),
        "weight": normal(generator, dtype, width, taps) * taps**-0.5,
        "bias": normal(generator, dtype, width),
        "activation": "silu",
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Forward reads x and writes y; the backward pass reads x and dy and writes dx."""
    size = int(shape["B"]) * int(shape["T"]) * int(shape["D"])
    passes, flops = (5, 3) if backward else (2, 1)
    return Cost(num_bytes=passes * size * dtype.itemsize, num_flops=flops * 2 * int(shape["W"]) * size)


def short(shape: Shape) -> Shape:
    return {**shape, "B": min(2, int(shape["B"])), "T": min(130, int(shape["T"])), "D": min(72, int(shape["D"]))}


def load_torch_conv1d() -> Callable[..., Tensor]:
    """torch's own depthwise convolution, on channel-first memory [B, D, T]."""

    def conv1d(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        y = F.conv1d(x, weight, bias, padding=weight.shape[-1] - 1, groups=weight.shape[0])[..., : x.shape[-1]]
        return F.silu(y)

    return conv1d


def load_causal_conv1d_cuda() -> Callable[..., Tensor]:
    from causal_conv1d import causal_conv1d_fn

    def peer(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        return causal_conv1d_fn(x, weight, bias, activation=activation)

    return peer


def channel_first(inputs: Inputs) -> Inputs:
    return {**inputs, "x": inputs["x"].transpose(1, 2).contiguous()}


def channel_first_filter(inputs: Inputs) -> Inputs:
    return {**channel_first(inputs), "weight": inputs["weight"].unsqueeze(1)}


def time_second(y: Any) -> Any:
    return y.transpose(1, 2)


WORKLOAD = Workload(
    op="causal_conv1d",
    reference=reference,
    make_inputs=make_inputs,
    cost=cost,
    short=short,
    implementations=(
        Implementation("torch", "ours", lambda: partial(causal_conv1d, backend="torch")),
        Implementation("conv1d", "torch", load_torch_conv1d, channel_first_filter, time_second),
        Implementation("causal-conv1d", "peer", load_causal_conv1d_cuda, channel_first, time_second),
    ),
    shapes={
        "quick": ({"B": 8, "T": 2048, "D": 2048, "W": 4},),
        "paper": (
            {"B": 8, "T": 2048, "D": 2048, "W": 4},
            {"B": 64, "T": 4096, "D": 128, "W": 4},
            {"B": 1, "T": 131072, "D": 1024, "W": 4},
        ),
    },
    dtypes=(torch.bfloat16,),
)
