"""Other projects' kernels of the delta rule, as the benchmark calls them, and as their sources of these versions say.

A peer is loaded where it is installed. One that a shape, a GPU or a version of its packages does not suit is a row that
says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.workload import Implementation, Inputs, Shape, first


def load_fla(*, on_flash_qla: bool) -> Callable[..., Any]:
    """flash-linear-attention's chunked operator for each decay (fla-core 0.6.0, fla/ops).

    Where FlashQLA is installed, it hands the gated delta rule to it (fla/ops/gated_delta_rule/backends/flash_qla.py),
    unless FLA_FLASH_QLA is 0, which it reads at every call.
    """
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    if on_flash_qla:
        load_flash_qla()

    def peer(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, scale: float) -> Any:
        os.environ["FLA_FLASH_QLA"] = str(int(on_flash_qla))
        if log_decay is None:
            return chunk_delta_rule(q=q, k=k, v=v, beta=beta, scale=scale)
        op = chunk_gated_delta_rule if log_decay.dim() == 3 else chunk_kda
        return op(q=q, k=k, v=v, g=log_decay, beta=beta, scale=scale)

    return peer


def load_flash_qla() -> Callable[..., Any]:
    """FlashQLA 0.1.3 (QwenLM/FlashQLA), for decays of heads.

    tilelang refuses its backward pass since 0.1.15, whose check takes an accumulator for uninitialised. The check is
    switched off for its kernels: the accuracy rule judges them as it judges all others.
    """
    import flash_qla

    for name, module in list(sys.modules.items()):
        for kernel in vars(module).values() if name.startswith("flash_qla.") else ():
            if isinstance(options := getattr(kernel, "pass_configs", None), dict):
                options["tl.disable_buffer_init_check"] = True

    def peer(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, scale: float) -> Any:
        return flash_qla.chunk_gated_delta_rule(q=q, k=k, v=v, g=log_decay, beta=beta, scale=scale)

    return peer


def float32_decays(inputs: Inputs) -> Inputs:
    """FlashQLA 0.1.3 has a backward pass for log-decays in float32 alone."""
    return {**inputs, "log_decay": inputs["log_decay"].float()}


def load_flash_kda() -> Callable[..., Any]:
    """FlashKDA (MoonshotAI/FlashKDA at 1ce47ea3bb), the forward pass for decays of channels."""
    import flash_kda

    def peer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Tensor:
        out = torch.empty_like(v)
        flash_kda.fwd(q, k, v, g, beta, out=out, **options)
        return out

    return peer


def before_gates(inputs: Inputs) -> Inputs:
    """The arguments of FlashKDA, which normalises q and k and computes both gates: beta = sigmoid(its beta) and
    log_decay = lower_bound sigmoid(exp(A_log) (g + dt_bias)). Those of ours are unit vectors and gates already."""
    q: Tensor = inputs["q"]
    lower_bound = -5.0
    return {
        **{name: inputs[name] for name in ("q", "k", "v", "scale")},
        "g": torch.logit(inputs["log_decay"].float() / lower_bound).to(q.dtype),
        "beta": torch.logit(inputs["beta"].float()).to(q.dtype),
        "A_log": q.new_zeros(q.shape[2], dtype=torch.float32),
        "dt_bias": q.new_zeros(*q.shape[2:], dtype=torch.float32),
        "lower_bound": lower_bound,
    }


def load_flashinfer() -> Callable[..., Any]:
    """FlashInfer's prefill of the gated delta rule (flashinfer-python 0.7.2.post1, flashinfer/gdn_prefill.py)."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    def peer(batch: int, **packed: Any) -> Tensor:
        o: Tensor = chunk_gated_delta_rule(**packed)
        return o.unflatten(0, (batch, -1))

    return peer


def packed(inputs: Inputs) -> Inputs:
    """All sequences one behind the other, [B T, H, K], with the position where each begins."""
    batch, length = inputs["q"].shape[:2]
    starts = torch.arange(0, (batch + 1) * length, length, device=inputs["q"].device)
    return {
        **{name: inputs[name].flatten(0, 1).contiguous() for name in ("q", "k", "v", "beta")},
        "g": inputs["log_decay"].flatten(0, 1).contiguous(),
        "cu_seqlens": starts,
        "scale": inputs["scale"],
        "batch": batch,
    }


def packed_factors(inputs: Inputs) -> Inputs:
    """The arguments of FlashInfer, whose decays are factors; both gates are float32."""
    native = packed(inputs)
    longest = {"max_seqlen": inputs["q"].shape[1]}
    return {**native, **longest, "g": native["g"].float().exp(), "beta": native["beta"].float()}


def load_cudnn() -> Callable[..., Any]:
    """cuDNN's gated delta rule and KDA (nvidia-cudnn-frontend 1.32.0, cudnn/linear_attention/ops).

    It looks for an engine that runs on the GPU at hand, and has no gated delta rule for Hopper without cuda-tile.
    """
    from cudnn.linear_attention import gated_delta_net, kimi_delta_attention

    def peer(batch: int, g: Tensor, **packed: Any) -> Tensor:
        op = gated_delta_net if g.dim() == 2 else kimi_delta_attention
        o: Tensor = op(g=g, **packed)[0]
        return o.unflatten(0, (batch, -1))

    return peer


def only(*decays: str) -> Callable[[Shape, torch.dtype], str | None]:
    """For a peer that takes some decays, keys and values of 128 channels, and bfloat16."""

    def supports(shape: Shape, dtype: torch.dtype) -> str | None:
        if shape["decay"] not in decays:
            return f"it has decays of kind {' and '.join(decays)} alone"
        if (shape["K"], shape["V"]) != (128, 128) or dtype != torch.bfloat16:
            return "it takes bfloat16 and 128 channels of keys and values alone"
        return None

    return supports


FLA = ("fla-core", "tilelang")
PEERS = (
    Implementation(
        "flash-linear-attention", "peer", partial(load_fla, on_flash_qla=False), from_native=first, packages=FLA
    ),
    Implementation(
        "flash-linear-attention + flash-qla",
        "peer",
        partial(load_fla, on_flash_qla=True),
        from_native=first,
        supports=only("head"),
        packages=(*FLA, "flash-qla"),
    ),
    Implementation(
        "flash-qla",
        "peer",
        load_flash_qla,
        float32_decays,
        first,
        supports=only("head"),
        packages=("flash-qla", *FLA[1:]),
    ),
    Implementation(
        "flash-kda",
        "peer",
        load_flash_kda,
        before_gates,
        supports=only("key"),
        packages=("flash-kda",),
        backward=False,
    ),
    Implementation(
        "flashinfer",
        "peer",
        load_flashinfer,
        packed_factors,
        supports=only("head"),
        packages=("flashinfer-python",),
        backward=False,
    ),
    Implementation(
        "cudnn",
        "peer",
        load_cudnn,
        packed,
        supports=only("head", "key"),
        packages=("nvidia-cudnn-frontend", "nvidia-cutlass-dsl"),
    ),
)
"""Peers of the operator `delta_rule`, each with the packages whose versions decide what runs."""
