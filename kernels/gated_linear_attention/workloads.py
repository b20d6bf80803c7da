"""Benchmark workloads of gated linear attention, and of one step of it for decoding.

`decay` names the log-decay of a shape, and with it the model that the shape belongs to:

    none       no decay: linear attention
    head       fixed for each head, log(1 - 2^(-5-h)): RetNet
    head-step  for each head and position: simple GLA, Mamba-2
    key        for each key channel, logsigmoid(x) / 16: GLA
    forget     for each key channel, logsigmoid(x), and k = 1 - decay: HGRN2
    value      for each value channel, logsigmoid(x) / 8: the first pass of gated slot attention

Where a shape has G, its H heads of values share G heads of queries and keys.

The fixed decays are not among the input tensors, so no implementation is asked for their gradient. The other decays
have the dtype of q, in which the peers were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_step
from subquad.kernels.gated_linear_attention.reference import gated_linear_attention_reference, step
from subquad.kernels.workload import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    Workload,
    at_most,
    first,
    initial_state,
    named,
    normal,
    ours,
    sizes,
    time_second,
    traffic,
)

CHUNK = 64
FIXED = "1 - 2^(-5-h)"
DAMPING = {"head-step": 16, "key": 16, "forget": 1, "value": 8}
"""Divisors of logsigmoid(x) that give the log-decay, as in the layers."""


@lru_cache
def fixed_log_decay(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """RetNet's log-decays [H] (models/retnet.py), made once, as in a layer."""
    return (1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))).log().to(device, dtype)


def on_inputs(op: Callable[..., Any]) -> Callable[..., Any]:
    """The operator as a function of the inputs of `make_inputs`, with FIXED replaced by its log-decays."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | str | None,
        decay_on: str,
        state: Tensor | None = None,
        **of_states: Any,
    ) -> Any:
        if isinstance(log_decay, str):
            log_decay = fixed_log_decay(v.shape[-2], torch.promote_types(q.dtype, torch.float32), q.device)
        return op(q, k, v, log_decay, *([] if state is None else [state]), decay_on=decay_on, **of_states)

    return run


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    batch, length, heads, key_dim, value_dim = sizes(shape, "BTHKV")
    decay = str(shape["decay"])
    groups = int(shape.get("G", heads))
    q, k = (normal(generator, dtype, batch, length, groups, key_dim) for _ in "qk")
    log_decay: Tensor | str | None = FIXED if decay == "head" else None
    if decay in DAMPING:
        channels = {"head-step": (), "value": (value_dim,)}.get(decay, (key_dim,))
        logits = normal(generator, dtype, batch, length, heads, *channels)
        log_decay = F.logsigmoid(logits).div_(DAMPING[decay])
        if decay == "forget":
            k = torch.sigmoid(logits.neg_())
    else:
        # keys that never decay must be small, so that sums stay of order one
        k *= length**-0.5
    v = normal(generator, dtype, batch, length, heads, value_dim)
    inputs = {"q": q, "k": k, "v": v, "log_decay": log_decay, "decay_on": "value" if decay == "value" else "key"}
    return inputs | initial_state(shape, dtype, generator, batch, heads, key_dim, value_dim)


def products(key_dim: int, value_dim: int, backward: bool) -> int:
    """Multiply-adds of matrix products for one position of one head, in chunks of C = 64 that are computed in full.

    Forward: scores C K, their product with v C V, the state written and read 2 K V. Backward: C (3 K + 2 V) for the
    scores again, dA, dq, dk and dv, and 5 K V for the state again, its gradient, and what dq, dk and dv read of both.
    """
    total = CHUNK * (key_dim + value_dim) + 2 * key_dim * value_dim
    return total + CHUNK * (3 * key_dim + 2 * value_dim) + 5 * key_dim * value_dim if backward else total


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """The cost of `products`. Smaller chunks would need fewer products and more states."""
    batch, length, heads, key_dim, value_dim = sizes(shape, "BTHKV")
    channels = {"none": 0, "head": 0, "head-step": 1, "value": value_dim}.get(str(shape["decay"]), key_dim)
    positions = batch * length * heads
    keys = batch * length * int(shape.get("G", heads)) * key_dim
    inputs = (2 * keys + positions * (value_dim + channels)) * dtype.itemsize
    return Cost(
        num_bytes=traffic(inputs, positions * value_dim * dtype.itemsize, backward),
        num_flops=2 * positions * products(key_dim, value_dim, backward),
        matrix=True,
    )


def short(shape: Shape) -> Shape:
    """K and V stay as they are, so the batch is reduced to one sequence where the state is large."""
    large = int(shape["K"]) * int(shape["V"]) > 2**14
    small = {"B": 1 if large else min(2, int(shape["B"])), "T": min(130, int(shape["T"])), "H": 2}
    return {**shape, **small, **({"G": 1} if "G" in shape else {})}


def load_fla() -> Callable[..., Any]:
    """flash-linear-attention's chunked operator for each decay. Its RetNet forms the fixed decays itself."""
    from fla.ops.gla import chunk_gla
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.retention import chunk_retention
    from fla.ops.simple_gla import chunk_simple_gla

    def peer(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | str | None, decay_on: str) -> Any:
        if log_decay is None:
            return chunk_linear_attn(q, k, v, normalize=False)
        if isinstance(log_decay, str):
            return chunk_retention(q, k, v)
        return (chunk_simple_gla if log_decay.dim() == 3 else chunk_gla)(q, k, v, log_decay)

    return peer


def load_ssd() -> Callable[..., Any]:
    """Mamba-2's scan (mamba_ssm 2.3.2.post1, mamba_ssm/ops/triton/ssd_combined.py), S_t = exp(dt A) S + dt B^T x."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return partial(mamba_chunk_scan_combined, chunk_size=256)


def as_ssd(inputs: Inputs) -> Inputs:
    """With A = -1 the step is dt = -log_decay, and x = v / dt.

    The gradient of log_decay is then the small difference of two sums over x and its gradient, both of which are
    rounded to the dtype of v. So its floor is eight times as high: without error the peer would be at 0.04 of 0.05.
    """
    q, v = inputs["q"], inputs["v"]
    dt = -inputs["log_decay"].float()
    return {
        "x": (v.float() / dt.unsqueeze(-1)).to(v.dtype),
        "dt": dt,
        "A": -torch.ones(v.shape[2], dtype=torch.float32, device=v.device),
        "B": inputs["k"],
        "C": q * q.shape[-1] ** -0.5,
    }


def load_tfla() -> Callable[..., Any]:
    """mLSTM with sigmoid gates, without its normaliser (mlstm_kernels 2.0.6,
    mlstm_kernels/torch/chunkwise/triton_xl_chunk_siging): S_t = sigmoid(f) S + sigmoid(i) k^T v, o_t = q S_t / sqrt(K).
    """
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging import mlstm_siging_chunkwise__xl_chunk

    def peer(length: int, **native: Any) -> Tensor:
        o: Tensor = mlstm_siging_chunkwise__xl_chunk(
            **native, normalize=False, chunk_size=128, autocast_kernel_dtype=native["q"].dtype
        )
        return o[:, :, :length]

    return peer


def as_mlstm(inputs: Inputs) -> Inputs:
    """[B, H, T, K] and the gates before their sigmoids, filled up to whole chunks. The input gate is open."""
    length, log_decay = inputs["q"].shape[1], inputs["log_decay"].float()
    forget = -torch.log(torch.expm1(-log_decay))
    native = {**{name: inputs[name] for name in "qkv"}, "f": forget, "i": torch.full_like(forget, 30.0)}
    filled = {name: x.transpose(1, 2) for name, x in native.items()}
    missing = -length % 128
    for name, x in filled.items():
        filled[name] = F.pad(x, (0, 0) * (x.dim() - 3) + (0, missing)).contiguous()
    return {**filled, "length": length}


NO_GROUPS = "its heads cannot share queries and keys"


def per_head_and_step(shape: Shape, dtype: torch.dtype) -> str | None:
    return None if shape["decay"] == "head-step" else "it has one decay for each head and position alone"


def of_tfla(shape: Shape, dtype: torch.dtype) -> str | None:
    return NO_GROUPS if "G" in shape else per_head_and_step(shape, dtype)


def of_fla(shape: Shape, dtype: torch.dtype) -> str | None:
    if "G" in shape:
        return NO_GROUPS
    return "it has no operator with decays of values" if shape["decay"] == "value" else None


def both_lengths(heads: int, key_dim: int, value_dim: int, decay: str) -> tuple[Shape, ...]:
    """The sizes of one model, for a batch of sequences and for one long sequence."""
    model: Shape = {"H": heads, "K": key_dim, "V": value_dim, "decay": decay}
    return {"B": 8, "T": 2048, **model}, {"B": 1, "T": 16384, **model}


def shape_of(inputs: Inputs) -> Shape:
    """The kind of the decay costs bytes and no products."""
    return named("BTHV", inputs["v"], K=inputs["q"].shape[-1], decay="none")


FLA = ("fla-core", "tilelang")

WORKLOAD = Workload(
    op="gated_linear_attention",
    reference=on_inputs(gated_linear_attention_reference),
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    short=short,
    implementations=(
        *ours(gated_linear_attention, on_inputs),
        Implementation("flash-linear-attention", "peer", load_fla, from_native=first, supports=of_fla, packages=FLA),
        Implementation(
            "mamba-ssm",
            "peer",
            load_ssd,
            as_ssd,
            supports=per_head_and_step,
            packages=("mamba-ssm",),
            floors={"log_decay": 8},
        ),
        Implementation("mlstm-kernels", "peer", load_tfla, as_mlstm, time_second, of_tfla, packages=("mlstm-kernels",)),
    ),
    shapes={
        "quick": (
            {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128, "decay": "none"},
            {"B": 8, "T": 2048, "H": 4, "K": 256, "V": 512, "decay": "key"},
        ),
        "paper": (
            *both_lengths(16, 128, 128, "none"),
            # Based: 153 features of 16 channels, and the normaliser as a value more
            *both_lengths(16, 153, 65, "none"),
            *both_lengths(16, 128, 128, "head-step"),
            *both_lengths(8, 256, 512, "head"),
            *both_lengths(16, 128, 128, "forget"),
            *both_lengths(4, 256, 512, "key"),
            *both_lengths(4, 512, 64, "value"),
            {"B": 64, "T": 512, "H": 2, "K": 32, "V": 64, "decay": "key"},
            # Mamba-2 130M: all heads share B and C
            {"B": 8, "T": 2048, "H": 24, "G": 1, "K": 128, "V": 64, "decay": "head-step"},
        ),
    },
    keep=("initial_state",),
    small=(
        {"B": 1, "T": 70, "H": 2, "K": 8, "V": 12, "decay": "key", "state": "given"},
        {"B": 1, "T": 20, "H": 2, "K": 5, "V": 9, "decay": "value", "state": "given"},
        {"B": 2, "T": 20, "H": 1, "K": 8, "V": 4, "decay": "head-step", "state": "given"},
        {"B": 1, "T": 20, "H": 2, "K": 8, "V": 4, "decay": "head", "state": "given"},
        {"B": 1, "T": 20, "H": 2, "K": 8, "V": 4, "decay": "none"},
        # an odd number of chunks
        {"B": 1, "T": 130, "H": 1, "K": 4, "V": 4, "decay": "key", "state": "given"},
        {"B": 1, "T": 70, "H": 6, "G": 2, "K": 8, "V": 12, "decay": "head-step", "state": "given"},
        {"B": 1, "T": 20, "H": 3, "G": 1, "K": 8, "V": 4, "decay": "none", "state": "given"},
        {"B": 1, "T": 20, "H": 4, "G": 2, "K": 5, "V": 9, "decay": "key", "state": "given"},
        {"B": 1, "T": 20, "H": 2, "G": 1, "K": 5, "V": 9, "decay": "value", "state": "given"},
    ),
    time={"q": 1, "k": 1, "v": 1, "log_decay": 1},
    states=("initial_state",),
)


def step_reference(q: Tensor, k: Tensor, v: Tensor, log_decay: Any, state: Tensor, *, decay_on: str) -> Any:
    return step(q, k, v, log_decay, state, decay_on=decay_on, scale=q.shape[-1] ** -0.5)


def make_step_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """One position, and a state in float32."""
    inputs = make_inputs({**shape, "T": 1}, dtype, generator)
    now = {name: x.squeeze(1) for name, x in inputs.items() if isinstance(x, Tensor)}
    return {
        **inputs,
        **now,
        "state": normal(generator, torch.promote_types(dtype, torch.float32), *sizes(shape, "BHKV")),
    }


def step_cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """One position; the state is read, decayed, added to, multiplied with q, and written."""
    once = cost({**shape, "T": 1}, dtype, False)
    batch, heads, key_dim, value_dim = sizes(shape, "BHKV")
    elements = batch * heads * key_dim * value_dim
    return Cost(num_bytes=once.num_bytes + 2 * elements * max(4, dtype.itemsize), num_flops=5 * elements)


def step_shape_of(inputs: Inputs) -> Shape:
    return named("BHKV", inputs["state"], decay="none")


STEP = Workload(
    op="gated_linear_attention_step",
    reference=on_inputs(step_reference),
    make_inputs=make_step_inputs,
    cost=step_cost,
    shape_of=step_shape_of,
    short=at_most(B=2, H=2),
    implementations=ours(gated_linear_attention_step, on_inputs),
    shapes={
        "quick": ({"B": 64, "H": 4, "K": 256, "V": 512, "decay": "key"},),
        "paper": tuple(
            {"B": batch, "H": heads, "K": key_dim, "V": value_dim, "decay": decay}
            for batch in (1, 64)
            for heads, key_dim, value_dim, decay in (
                (16, 128, 128, "none"),
                (8, 256, 512, "head"),
                (16, 128, 128, "forget"),
                (4, 256, 512, "key"),
                (4, 512, 64, "value"),
            )
        ),
    },
    keep=("state",),
    states=("state",),
    backward=False,
    small=(
        *({"B": 2, "H": 2, "K": 5, "V": 12, "decay": decay} for decay in ("key", "value", "head", "none")),
        {"B": 1, "H": 1, "K": 130, "V": 300, "decay": "head-step"},
        {"B": 2, "H": 6, "G": 2, "K": 5, "V": 12, "decay": "head-step"},
    ),
)
