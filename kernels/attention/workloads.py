"""The benchmark's description of causal softmax attention.

The shapes with H 16, K 64 are compared with the selective scan at D 1024 (Mamba, figure 8), those with K 128 with
linear attention. The one with B 128 is that of associative recall in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.attention import attention, attention_step
from subquad.kernels.attention.reference import attention_reference, attention_step_reference
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


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """A shape may have a `window`, and P queries at positions of their own."""
    inputs: Inputs = {name: normal(generator, dtype, *sizes(shape, "BTHK")) for name in "qkv"}
    if "window" in shape:
        inputs["window"] = int(shape["window"])
    if "P" in shape:
        batch, length, queries = sizes(shape, "BTP")
        inputs["q"] = inputs["q"][:, :queries].contiguous()
        at = torch.arange(1, queries + 1, device=generator.device) * length // queries - 1
        inputs["positions"] = at.expand(batch, -1).contiguous()
    return inputs


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Each of the T (T + 1) / 2 pairs that the mask leaves takes two products forward, five backward, and one
    exponential in each direction. A window leaves fewer; P queries see as many keys as those of all positions do in
    the mean."""
    batch, length, heads, dim = sizes(shape, "BTHK")
    size = batch * length * heads * dim * dtype.itemsize
    unseen = max(0, length - int(shape.get("window", length)))
    pairs = batch * heads * (length * (length + 1) - unseen * (unseen + 1)) // 2
    pairs = pairs * int(shape.get("P", length)) // length
    return Cost(
        num_bytes=traffic(3 * size, size, backward),
        num_flops=(7 if backward else 2) * 2 * dim * pairs,
        matrix=True,
        num_exponentials=(2 if backward else 1) * pairs,
    )


def load_sdpa(kernel: str) -> Callable[..., Tensor]:
    """PyTorch's FlashAttention or cuDNN's attention, and no other of its kernels, for q, k, v [B, H, T, K]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, kernel)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return fused


def heads_first(inputs: Inputs) -> Inputs:
    return {name: x.transpose(1, 2).contiguous() for name, x in inputs.items()}


def half_only(shape: Shape, dtype: torch.dtype) -> str | None:
    return None if dtype.itemsize == 2 else f"it runs in half precision only, not in {dtype}"


def single_only(shape: Shape, dtype: torch.dtype) -> str | None:
    if "window" in shape or "P" in shape:
        return "the Triton kernels have no window and no positions of queries"
    return None if dtype == torch.float32 else f"the Triton kernels take float32, not {dtype}"


def shape_of(inputs: Inputs) -> Shape:
    """A window that is a tensor has values that no shape tells, so its pairs are counted as if all were seen."""
    q, k, window = inputs["q"], inputs["k"], inputs["window"]
    shape = dict(named("BTHK", k))
    if isinstance(window, int):
        shape["window"] = window
    return shape if inputs["positions"] is None else {**shape, "P": q.shape[1]}


WORKLOAD = Workload(
    op="attention",
    reference=attention_reference,
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=at_most(B=2, T=130, H=2),
    implementations=(
        *ours(attention, supports=single_only),
        *(
            Implementation(
                f"sdpa-{name}",
                "torch",
                partial(load_sdpa, kernel),
                heads_first,
                time_second,
                half_only,
                packages=(package,),
            )
            for name, kernel, package in (
                ("flash", "FLASH_ATTENTION", "torch"),
                ("cudnn", "CUDNN_ATTENTION", "nvidia-cudnn-cu13"),
            )
        ),
    ),
    shapes={
        "quick": ({"B": 8, "T": 2048, "H": 16, "K": 128},),
        "paper": (
            *({"B": 1, "T": length, "H": 16, "K": 64} for length in (512, 2048, 8192, 32768)),
            {"B": 8, "T": 2048, "H": 16, "K": 128},
            {"B": 1, "T": 16384, "H": 16, "K": 128},
            {"B": 128, "T": 512, "H": 1, "K": 128},
        ),
    },
    dtypes=(torch.bfloat16, torch.float32),
    small=(
        {"B": 2, "T": 70, "H": 2, "K": 8},
        {"B": 1, "T": 33, "H": 1, "K": 24, "window": 9},
        {"B": 2, "T": 20, "H": 2, "K": 8, "P": 3},
    ),
    time={"q": 1, "k": 1, "v": 1},
)


def make_step_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """A cache of T positions, of which all but the last are filled, and angles of every position."""
    batch, length, heads, dim = sizes(shape, "BTHK")
    wide = torch.promote_types(dtype, torch.float32)
    time = torch.arange(length, device=generator.device, dtype=wide)[:, None]
    angles = time * 10000.0 ** -(torch.arange(0, dim, 2, device=generator.device, dtype=wide) / dim)
    now = {name: normal(generator, dtype, batch, heads, dim) for name in "qkv"}
    cache = {name: normal(generator, dtype, batch, length, heads, dim) for name in ("keys", "values")}
    return {**now, **cache, "cos": angles.cos(), "sin": angles.sin()}


def step_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The cache is read, one position of it is written."""
    batch, length, heads, dim = sizes(shape, "BTHK")
    position = batch * heads * dim
    num_bytes = (2 * position * length + 4 * position) * dtype.itemsize + length * dim * max(4, dtype.itemsize)
    return Cost(num_bytes=num_bytes, num_flops=4 * position * length, num_exponentials=batch * heads * length)


def in_a_cache(step: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A step at the last position of the cache, which it returns too; every call writes that position again."""

    def run(keys: Tensor, values: Tensor, **inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        count = torch.full(keys.shape[:1], keys.shape[1] - 1, dtype=torch.long, device=keys.device)
        return step(keys=keys, values=values, count=count, **inputs), keys, values

    return run


def step_reference(keys: Tensor, **inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return attention_step_reference(keys=keys, count=torch.full(keys.shape[:1], keys.shape[1] - 1), **inputs)


def step_shape_of(inputs: Inputs) -> Shape:
    """Returns the shape of the call, which is counted as if the cache were full."""
    return named("BTHK", inputs["keys"])


STEP = Workload(
    op="attention_step",
    reference=step_reference,
    make_inputs=make_step_inputs,
    cost=step_cost,
    shape_of=step_shape_of,
    short=at_most(B=2, T=144, H=2),
    implementations=ours(attention_step, in_a_cache),
    shapes={
        "quick": ({"B": 16, "T": 2048, "H": 16, "K": 128},),
        "paper": tuple({"B": batch, "T": 2048, "H": 16, "K": 128} for batch in (1, 16, 64, 128)),
    },
    keep=("cos", "sin"),
    backward=False,
    small=({"B": 2, "T": 20, "H": 2, "K": 8},),
    states=("keys", "values"),
    in_place=("keys", "values"),
)
