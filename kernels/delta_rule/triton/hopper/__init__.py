"""The delta rule on Hopper in Gluon, for bfloat16 and a decay of a head (README.md, "On Hopper").

forward.py  `_hopper_forward_kernel`: chunk factors and the walk in one kernel, for many heads
walk.py     `_hopper_walk_kernel`: the walk alone, with factors from memory
back.py     `_hopper_back_kernel`: the walk back
grads.py    `_hopper_grads_kernel`: gradients of queries, keys, betas and log-decays
tiles.py    layouts and device functions that they share
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from subquad.kernels.delta_rule.triton.plan import ChunkFactors, Plan
from subquad.kernels.device import is_hopper, num_processors
from subquad.kernels.gated_linear_attention.triton.plan import HEAD, decay_kind
from subquad.kernels.launch import INT32_END, cdiv

TESTED_GLUON = ("3.6", "3.9")
"""Versions of Triton, major and minor, whose Gluon compiles these kernels. Gluon is experimental: names and meanings
change from version to version. With any other, the kernels in Triton are used."""
HAS_GLUON = ".".join(triton.__version__.split(".")[:2]) in TESTED_GLUON

if HAS_GLUON:
    from subquad.kernels.delta_rule.triton.hopper.back import hopper_back
    from subquad.kernels.delta_rule.triton.hopper.forward import CHUNK, hopper_forward
    from subquad.kernels.delta_rule.triton.hopper.grads import hopper_grads
    from subquad.kernels.delta_rule.triton.hopper.walk import VALUES, hopper_walk

__all__ = [
    "has_many",
    "hopper_back",
    "hopper_forward",
    "hopper_grads",
    "hopper_walk",
    "is_copied",
    "takes",
    "takes_walk",
]

DIM = 128
"""Channels of keys, and of values where one kernel is the whole forward pass."""
PAIR = 64
"""Positions of a chunk of the gradients, which is a pair of chunks of the walks."""
STEP = 128
"""Positions whose factors `hopper_forward` computes side by side."""
LEAST = 0.7
"""Least share of the multiprocessors that all rounds of programs together keep busy. A program has a multiprocessor of
its own and takes as long with few heads, where those of `hopper_walk` and `hopper_back` have segments of time."""


def takes(plan: Plan, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None) -> bool:
    """Whether the kernels for Hopper take these inputs in both directions."""
    if not _fits(plan, q, k, v) or g is None or decay_kind(g) != HEAD:
        return False
    _, length, _, value_dim = v.shape
    return value_dim == DIM and length % PAIR == 0 and all(STEP * x.stride(1) < INT32_END for x in (beta, g))


def has_many(v: Tensor) -> bool:
    """Whether `hopper_forward`, of whose programs each has a head, is worth while: v [B, T, H, V] of a call that
    `takes` takes, and that neither begins with a state nor returns one."""
    batch, length, heads, _ = v.shape
    programs, processors = batch * heads, num_processors(v.device)
    return length % STEP == 0 and programs >= LEAST * processors * cdiv(programs, processors)


def takes_walk(plan: Plan, q: Tensor, k: Tensor, v: Tensor, factors: ChunkFactors) -> bool:
    """Whether `hopper_walk` takes these inputs of a walk that keeps nothing for a backward pass."""
    if not _fits(plan, q, k, v) or factors.k_out is not None or plan.chunk != CHUNK:
        return False
    return v.shape[1] % CHUNK == 0 and v.shape[3] % VALUES == 0


def _fits(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not HAS_GLUON or not is_hopper() or plan.table is not None or plan.work != torch.bfloat16:
        return False
    inputs = q, k, v
    if k.shape[-1] != DIM or not v.numel() or any(STEP * x.stride(1) >= INT32_END for x in inputs):
        return False
    return all(map(is_copied, inputs))


def is_copied(x: Tensor) -> bool:
    """Whether rows of x [B, T, H, X] can be copied 16 bytes at a time: Triton must see that 16 divides all strides
    and the address."""
    # a fake tensor has no address, and nothing is launched for it
    aligned = isinstance(x, FakeTensor) or x.data_ptr() % 16 == 0
    return aligned and x.stride(-1) == 1 and all(stride % 16 == 0 for stride in x.stride()[:-1])
