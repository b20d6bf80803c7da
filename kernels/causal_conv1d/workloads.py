"""The benchmark's description of the short causal convolution, the worked example for every other operator.

In a shape with memory=channel-first, x has T contiguous; in the others it has D contiguous. With memory=time-last, the
result is wanted with T contiguous nevertheless, which PyTorch's functions do not offer. With K, the channels are q, k
and v of the delta rule, and the heads of q and k have K channels and length one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_heads
from subquad.kernels.causal_conv1d.reference import causal_conv1d_heads_reference, causal_conv1d_reference
from subquad.kernels.workload import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    Workload,
    at_most,
    initial_state,
    named,
    normal,
    ours,
    sizes,
    time_second,
    traffic,
    with_final_state,
)


def convolution(**inputs: Any) -> Any:
    """The convolution, or that of heads where the inputs say how many there are."""
    return (causal_conv1d_heads if "heads" in inputs else causal_conv1d)(**inputs)


def reference(*, time_last: bool = False, **inputs: Any) -> Any:
    if "heads" in inputs:
        return causal_conv1d_heads_reference(**inputs)
    return with_final_state(causal_conv1d_reference)(**inputs)


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    batch, length, width, taps = sizes(shape, "BTDW")
    first = shape.get("memory") == "channel-first"
    x = normal(generator, dtype, *((batch, width, length) if first else (batch, length, width)))
    if "K" in shape:
        (size,) = sizes(shape, "K")
        number = max(1, width // (4 * size))
        heads = (number, size), (number, size), (number, width // number - 2 * size)
        weight = normal(generator, dtype, width, taps) * taps**-0.5
        return {"x": x, "weight": weight, "heads": heads, "num_unit": 2, "activation": "silu"}
    return {
        "x": x.transpose(1, 2) if first else x,
        "weight": normal(generator, dtype, width, taps) * taps**-0.5,
        "bias": None if shape.get("bias") == "none" else normal(generator, dtype, width),
        "activation": None if shape.get("activation") == "none" else "silu",
        **initial_state(shape, dtype, generator, batch, width, taps - 1),
        **({"time_last": True} if shape.get("memory") == "time-last" else {}),
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Forward reads x and writes y; the backward pass reads x and dy and writes dx."""
    batch, length, width, taps = sizes(shape, "BTDW")
    size, passes = batch * length * width, 2 if backward else 1
    return Cost(
        num_bytes=traffic(size, size, backward) * dtype.itemsize,
        num_flops=(3 if backward else 1) * 2 * taps * size,
        num_exponentials=passes * size,
    )


def load_torch_conv1d() -> Callable[..., Tensor]:
    """PyTorch's own depthwise convolution, for x [B, D, T]."""

    def conv1d(x: Tensor, weight: Tensor, bias: Tensor, activation: str, time_last: bool = False) -> Tensor:
        y = F.conv1d(x, weight, bias, padding=weight.shape[-1] - 1, groups=weight.shape[0])[..., : x.shape[-1]]
        return F.silu(y)

    return conv1d


def load_causal_conv1d_cuda() -> Callable[..., Tensor]:
    from causal_conv1d import causal_conv1d_fn

    def peer(x: Tensor, weight: Tensor, bias: Tensor, activation: str, time_last: bool = False) -> Tensor:
        return causal_conv1d_fn(x, weight, bias, activation=activation)

    return peer


def time_last(inputs: Inputs) -> Inputs:
    """x as the peer's [B, D, T], without a copy: it has a kernel for either layout."""
    return {**inputs, "x": inputs["x"].transpose(1, 2)}


def channel_first(inputs: Inputs) -> Inputs:
    return {**inputs, "x": inputs["x"].transpose(1, 2).contiguous(), "weight": inputs["weight"].unsqueeze(1)}


PAPER: tuple[Shape, ...] = (
    {"B": 8, "T": 2048, "D": 2048, "W": 4},
    {"B": 64, "T": 4096, "D": 128, "W": 4},
    {"B": 1, "T": 131072, "D": 1024, "W": 4},
)


def shape_of(inputs: Inputs) -> Shape:
    """Returns the shape of a call with a sequence [B, T, D] or with one position [B, D]."""
    x, taps = inputs["x"], inputs["weight"].shape[1]
    return named("BTD" if x.dim() == 3 else "BD", x, **({} if x.dim() == 3 else {"T": 1}), W=taps)


def short(shape: Shape) -> Shape:
    """Multiples of 16 as in the long shapes, so that the same kernel is judged, but not of its tiles."""
    return at_most(B=2, T=144, D=4 * int(shape.get("K", 20)))(shape)


def no_heads(shape: Shape, dtype: torch.dtype) -> str | None:
    return "has no heads of length one" if "K" in shape else None


WORKLOAD = Workload(
    op="causal_conv1d",
    reference=reference,
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=short,
    implementations=(
        *ours(convolution),
        Implementation("conv1d", "torch", load_torch_conv1d, channel_first, time_second, supports=no_heads),
        Implementation(
            "causal-conv1d",
            "peer",
            load_causal_conv1d_cuda,
            time_last,
            time_second,
            supports=no_heads,
            packages=("causal-conv1d",),
        ),
    ),
    shapes={
        "quick": (PAPER[0], {**PAPER[0], "memory": "channel-first"}),
        "paper": (
            *PAPER,
            *({**shape, "memory": "channel-first"} for shape in PAPER),
            {**PAPER[0], "memory": "time-last"},
            {"B": 8, "T": 2048, "D": 4096, "W": 4, "K": 128},
        ),
    },
    dtypes=(torch.bfloat16,),
    keep=("initial_state",),
    small=(
        {"B": 2, "T": 37, "D": 5, "W": 4, "state": "given"},
        {"B": 2, "T": 35, "D": 6, "W": 3, "activation": "none", "memory": "channel-first"},
        {"B": 1, "T": 33, "D": 4, "W": 2, "memory": "time-last", "bias": "none"},
        {"B": 2, "T": 37, "D": 44, "W": 4, "K": 5},
        {"B": 1, "T": 144, "D": 64, "W": 3, "K": 16},
    ),
    time={"x": 1},
    states=("initial_state",),
)
