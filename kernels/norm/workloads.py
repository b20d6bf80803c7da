"""The benchmark's description of the norm: with its residual add, as it stands before every branch of a network; of the
kind l2, as it stands before the delta rule, without residual and weight; and with H heads, as it stands behind the
state of mLSTM, with weights of heads [H, D] and a sigmoid gate, which is a part of a projection, without residual. With
skip=given a value with a factor for each head is added before the gate, which is the identity, and with bias=biased the
heads have biases, both as in RWKV-7. With O a linear map of so many outputs stands behind.

x has the dtype of the benchmark; residual, weight and bias are float32, as under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.norm import norm
from subquad.kernels.norm.reference import norm_reference
from subquad.kernels.workload import Cost, Implementation, Inputs, Shape, Workload, normal, ours, sizes, traffic


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, width = sizes(shape, "RD")
    wide = torch.promote_types(dtype, torch.float32)
    if shape["kind"] == "l2":
        return {"x": normal(generator, dtype, rows, width), "weight": None, "kind": "l2"}
    if "H" in shape:
        heads = int(shape["H"])
        size = (rows // heads, heads, width)
        projection = normal(generator, dtype, size[0], 2 * heads * width)
        skip: Inputs = {}
        if "skip" in shape:
            skip = {"skip": normal(generator, dtype, *size), "skip_scale": normal(generator, wide, *size[:2])}
        behind: Inputs = {}
        if "O" in shape:
            outputs, inner = int(shape["O"]), heads * width
            behind = {"linear": normal(generator, dtype, outputs, inner) * inner**-0.5}
        return {
            "x": normal(generator, dtype, *size),
            "weight": normal(generator, wide, heads, width),
            "bias": normal(generator, wide, heads, width) if "bias" in shape else None,
            "kind": shape["kind"],
            "gate": projection[:, heads * width :].unflatten(-1, size[1:]),
            "gate_activation": "identity" if skip else "sigmoid",
            **skip,
            **behind,
        }
    return {
        "x": normal(generator, dtype, rows, width),
        "residual": normal(generator, wide, rows, width),
        "weight": normal(generator, wide, width),
        "bias": normal(generator, wide, width) if shape["kind"] == "layer" else None,
        "kind": shape["kind"],
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Forward reads x and the residual and writes y and the sum; the backward pass reads what it needs of these."""
    rows, width = sizes(shape, "RD")
    wide, size = torch.promote_types(dtype, torch.float32).itemsize, rows * width
    if shape["kind"] == "l2":
        return Cost(traffic(size * dtype.itemsize, size * dtype.itemsize, backward), (15 if backward else 4) * size)
    if "H" in shape:
        half = 2 * size * dtype.itemsize + int(shape["H"]) * width * wide * (2 if "bias" in shape else 1)
        if "skip" in shape:
            half += size * dtype.itemsize + rows * wide
        return Cost(traffic(half, size * dtype.itemsize, backward), (24 if backward else 12) * size)
    parameters = width * wide * (2 if shape["kind"] == "layer" else 1)
    half = size * (dtype.itemsize + wide)
    # the gradients of x and the residual are that of the sum, which stands in memory instead of both
    return Cost(traffic(half + parameters, half, backward), (24 if backward else 8) * size)


def short(shape: Shape) -> Shape:
    rows = min(70, int(shape["R"]))
    return {**shape, "R": rows - rows % int(shape.get("H", 1)), "D": min(96, int(shape["D"]))}


def load_liger() -> Callable[..., Any]:
    """liger-kernel's norms. They have one dtype for branch, residual and result, so casts keep the residual exact."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    def peer(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float = 1e-5
    ) -> tuple[Tensor, Tensor]:
        if kind == "rms":
            y, total = LigerFusedAddRMSNormFunction.apply(x.float(), residual, weight, eps, 0.0, "gemma", False)
            return y.to(x.dtype), total
        total = residual + x
        return LigerLayerNormFunction.apply(total, weight, bias, eps).to(x.dtype), total

    return peer


def load_quack() -> Callable[..., Any]:
    """quack's RMS norm (quack-kernels 0.6.5, quack/rmsnorm.py), whose sum has the dtype of the residual."""
    from quack.rmsnorm import rmsnorm

    def peer(x: Tensor, residual: Tensor, weight: Tensor, bias: None, kind: str, eps: float = 1e-5) -> Any:
        return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)

    return peer


def rms_only(shape: Shape, dtype: torch.dtype) -> str | None:
    return None if shape["kind"] == "rms" else "a layer norm with a gradient and a norm of kind l2 are not in it"


def load_fla() -> Callable[..., Any]:
    from fla.modules.norm.l2norm import l2norm

    return lambda x, weight, kind, eps=1e-5: l2norm(x, eps=eps)


def l2_only(shape: Shape, dtype: torch.dtype) -> str | None:
    return None if shape["kind"] == "l2" else "has the kind l2 alone"


def norms_of_rows(shape: Shape, dtype: torch.dtype) -> str | None:
    if shape["kind"] == "l2":
        return "has no kind l2"
    return "has no weights of heads" if "H" in shape else None


PAPER: tuple[Shape, ...] = (
    {"R": 16384, "D": 768, "kind": "rms"},
    {"R": 16384, "D": 2048, "kind": "rms"},
    {"R": 65536, "D": 64, "kind": "layer"},
    {"R": 65536, "D": 128, "kind": "layer"},
    # queries and keys of 16 heads in B8 T2048
    {"R": 524288, "D": 128, "kind": "l2"},
    # outputs of the 4 heads of mLSTM in 512 strings of 39 tokens, and of the 12 heads of RWKV at B8 T2048
    {"R": 79872, "D": 32, "H": 4, "kind": "layer"},
    {"R": 196608, "D": 64, "H": 12, "kind": "layer"},
    # RWKV-7 of width 1024 norms its 16 heads and adds their own values, at B8 T2048
    {"R": 262144, "D": 64, "H": 16, "kind": "layer", "skip": "given", "bias": "biased"},
)

WORKLOAD = Workload(
    op="norm",
    reference=norm_reference,
    make_inputs=make_inputs,
    cost=cost,
    short=short,
    implementations=(
        *ours(norm),
        Implementation(
            "liger", "peer", load_liger, supports=norms_of_rows, cold_start=True, packages=("liger-kernel",)
        ),
        Implementation(
            "quack",
            "peer",
            load_quack,
            supports=rms_only,
            cold_start=True,
            packages=("quack-kernels", "nvidia-cutlass-dsl"),
        ),
        Implementation(
            "flash-linear-attention", "peer", load_fla, supports=l2_only, cold_start=True, packages=("fla-core",)
        ),
    ),
    shapes={"quick": (PAPER[0], PAPER[3]), "paper": PAPER},
    dtypes=(torch.bfloat16, torch.float32),
    keep=("residual", "weight", "bias", "skip_scale"),
    small=(
        *({"R": 21, "D": 12, "kind": kind} for kind in ("rms", "layer", "l2")),
        {"R": 20, "D": 12, "H": 4, "kind": "layer"},
        {"R": 21, "D": 12, "H": 3, "kind": "layer", "skip": "given"},
        {"R": 21, "D": 12, "H": 3, "kind": "rms", "O": 10},
        {"R": 20, "D": 12, "H": 4, "kind": "layer", "skip": "given", "O": 10},
    ),
)
