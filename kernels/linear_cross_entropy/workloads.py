"""The benchmark's description of the readout with its cross entropy. T is the number of tokens, of all sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.linear_cross_entropy import linear_cross_entropy
from subquad.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from subquad.kernels.workload import Cost, Implementation, Inputs, Shape, Workload, at_most, normal, ours, sizes


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    length, width = sizes(shape, "TD")
    classes = int(shape["classes"])
    device = generator.device
    targets = torch.randint(classes, (length,), generator=generator, device=device)
    # one token in eight has no label
    unlabelled = torch.rand(length, generator=generator, device=device) < 0.125
    return {
        "x": normal(generator, dtype, length, width),
        "weight": normal(generator, dtype, classes, width) * width**-0.5,
        "targets": targets.masked_fill_(unlabelled, -100),
        **({"bias": normal(generator, dtype, classes)} if shape.get("bias") == "given" else {}),
    }


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """x, weight and targets are read once, and with a backward pass the gradients are written once; no logits."""
    length, width = sizes(shape, "TD")
    classes = int(shape["classes"])
    tensors = (length + classes) * width * dtype.itemsize
    return Cost(
        num_bytes=(2 if backward else 1) * tensors + 8 * length,
        num_flops=(3 if backward else 1) * 2 * length * width * classes,
        matrix=True,
        num_exponentials=(2 if backward else 1) * length * classes,
    )


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def load_liger() -> Callable[..., Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def peer(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets)[0]
        return loss

    return peer


def load_quack() -> Callable[..., Tensor]:
    """quack's readout by chunks of tokens (quack-kernels 0.6.5, quack/linear_cross_entropy.py)."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def peer(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = chunked_linear_cross_entropy(x, weight, targets)
        return loss

    return peer


PAPER: tuple[Shape, ...] = (
    {"T": 16384, "D": 768, "classes": 50277},
    {"T": 16384, "D": 2048, "classes": 32000},
    {"T": 8192, "D": 128, "classes": 8192},
)


def shape_of(inputs: Inputs) -> Shape:
    x, weight = inputs["x"], inputs["weight"]
    return {"T": x.numel() // x.shape[-1], "D": x.shape[-1], "classes": len(weight)}


WORKLOAD = Workload(
    op="linear_cross_entropy",
    reference=linear_cross_entropy_reference,
    make_inputs=make_inputs,
    cost=cost,
    shape_of=shape_of,
    # the number of classes chooses the kernel, so it stays
    short=at_most(T=72, D=64),
    implementations=(
        *ours(linear_cross_entropy),
        Implementation("cross_entropy", "torch", lambda: plain),
        Implementation("liger", "peer", load_liger, cold_start=True, packages=("liger-kernel",)),
        Implementation("quack", "peer", load_quack, cold_start=True, packages=("quack-kernels", "nvidia-cutlass-dsl")),
    ),
    shapes={"quick": (PAPER[0], PAPER[2]), "paper": PAPER},
    dtypes=(torch.bfloat16,),
    small=(
        {"T": 40, "D": 16, "classes": 70},
        {"T": 9, "D": 8, "classes": 5, "bias": "given"},
        {"T": 9, "D": 8, "classes": 300, "bias": "given"},
    ),
)
