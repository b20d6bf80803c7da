"""Causal attention in float32 as an autograd function, and the tiles of its kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.attention.triton.backward import _keys_kernel, _queries_kernel
from subquad.kernels.attention.triton.forward import _forward_kernel
from subquad.kernels.attention.triton.split import Parts, split
from subquad.kernels.autograd import OnceDifferentiable, needs_gradient
from subquad.kernels.device import interpreted, is_hopper, speaks_ptx
from subquad.kernels.launch import cdiv, launch


class Tile(NamedTuple):
    """Tile of a program, with at most as many positions as share a scale, and its compile options."""

    block_m: int
    """Queries."""
    block_n: int
    """Keys."""
    num_warps: int
    num_stages: int


class Tuning(NamedTuple):
    """Tiles of the three kernels."""

    tile: int
    """Positions that share a scale."""
    forward: Tile
    keys: Tile
    queries: Tile


def default_tuning() -> Tuning:
    """The tiles measured on Hopper; on other GPUs, tiles that fit into their shared memory."""
    if is_hopper():
        return Tuning(64, Tile(64, 32, 4, 2), Tile(32, 64, 4, 1), Tile(64, 64, 4, 2))
    if speaks_ptx() or interpreted():
        return Tuning(64, Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1))
    return Tuning(32, *[Tile(32, 32, 4, 1)] * 3)


class Call(NamedTuple):
    """The options of one call; its tensors are passed beside them."""

    scale: float
    dropout: float
    tuning: Tuning


class Saved(NamedTuple):
    """The tensors that the forward pass keeps for the backward pass."""

    q: Parts
    k: Parts
    v: Parts
    lse: Tensor
    positions: Tensor | None
    seed: Tensor | None


def _scalars(saved: Saved, heads: int, num_queries: int, num_keys: int, call: Call) -> dict[str, Any]:
    return {
        "scale": call.scale,
        "threshold": min(round(call.dropout * 2**32), 2**32 - 1),
        "keep": 1.0 / (1.0 - call.dropout),
        "P": num_queries,
        "T": num_keys,
        "H": heads,
        "q_tiles": saved.q.scales.shape[1],
        "k_tiles": saved.k.scales.shape[1],
    }


def _constants(size: int, saved: Saved, tile: Tile, tuning: Tuning) -> dict[str, Any]:
    return {
        "K": size,
        "BLOCK_K": saved.q.halves.shape[-1],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "TILE": tuning.tile,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, seed: Tensor | None, call: Call
) -> tuple[Tensor, Saved]:
    """o [B, P, H, K] and what the backward pass needs."""
    batch, num_queries, heads, size = q.shape
    tuning = call.tuning
    parts = split(q, tuning.tile)[0], split(k, tuning.tile)[0], split(v, tuning.tile)[0]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_rows = parts[0].scales.shape[1] * tuning.tile
    lse = torch.empty(batch * heads, num_rows, dtype=torch.float32, device=q.device)
    saved = Saved(*parts, lse, positions, seed)
    launch(
        _forward_kernel, cdiv(num_queries, tuning.forward.block_m) * batch * heads, q=saved.q.halves, k=saved.k.halves,
        v=saved.v.halves, q_scales=saved.q.scales, k_scales=saved.k.scales, v_scales=saved.v.scales,
        positions=positions, seed=seed, o=o, lse=lse, **_scalars(saved, heads, num_queries, k.shape[1], call),
        **_constants(size, saved, tuning.forward, tuning),
    )  # fmt: skip
    return o, saved


def backward(do: Tensor, o: Tensor, saved: Saved, num_keys: int, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """dq [B, P, H, K], dk and dv [B, T, H, K]."""
    batch, num_queries, heads, size = o.shape
    tuning = call.tuning
    parts, delta = split(do, tuning.tile, o)
    # in one tensor, because queries, keys and values often come from one product
    if num_keys == num_queries:
        dq, dk, dv = torch.empty(batch, num_keys, 3, heads, size, dtype=o.dtype, device=o.device).unbind(2)
    else:
        dq = torch.empty_like(o)
        dk, dv = torch.empty(batch, num_keys, 2, heads, size, dtype=o.dtype, device=o.device).unbind(2)
    shared = {
        "q": saved.q.halves,
        "k": saved.k.halves,
        "v": saved.v.halves,
        "do": parts.halves,
        "q_scales": saved.q.scales,
        "k_scales": saved.k.scales,
        "v_scales": saved.v.scales,
        "do_scales": parts.scales,
        "positions": saved.positions,
        "seed": saved.seed,
        "lse": saved.lse,
        "delta": delta,
    }
    scalars = _scalars(saved, heads, num_queries, num_keys, call)
    strides = {"stride_b": dk.stride(0), "stride_t": dk.stride(1), "stride_h": dk.stride(2)}
    launch(
        _keys_kernel, cdiv(num_keys, tuning.keys.block_n) * batch * heads, **shared, dk=dk, dv=dv, **scalars, **strides,
        **_constants(size, saved, tuning.keys, tuning),
    )  # fmt: skip
    strides = {"stride_b": dq.stride(0), "stride_t": dq.stride(1), "stride_h": dq.stride(2)}
    launch(
        _queries_kernel, cdiv(num_queries, tuning.queries.block_m) * batch * heads, **shared, dq=dq, **scalars,
        **strides, **_constants(size, saved, tuning.queries, tuning),
    )  # fmt: skip
    return dq, dk, dv


class Attention(OnceDifferentiable):
    """(q, k, v, positions, seed, call) to o."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, seed: Tensor | None, call: Call
    ) -> Tensor:
        o, saved = forward(q, k, v, positions, seed, call)
        ctx.save_for_backward(o, *saved.q, *saved.k, *saved.v, saved.lse, positions, seed)
        ctx.call, ctx.num_keys = call, k.shape[1]
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        o, q1, q2, k1, k2, v1, v2, *rest = ctx.saved_tensors
        saved = Saved(Parts(q1, q2), Parts(k1, k2), Parts(v1, v2), *rest)
        return *backward(do, o, saved, ctx.num_keys, ctx.call), None, None, None


def attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    positions: Tensor | None = None,
    dropout: float = 0.0,
    tuning: Tuning | None = None,
) -> Tensor:
    """`attention` for arguments that were checked, in float32."""
    # on the device, so that every replay of a recorded graph drops other weights
    seed = torch.randint(2**62, (1,), device=q.device) if dropout > 0 else None
    positions = None if positions is None else positions.contiguous()
    call = Call(scale, dropout, tuning or default_tuning())
    if needs_gradient(q, k, v):
        return Attention.apply(q, k, v, positions, seed, call)
    return forward(q, k, v, positions, seed, call)[0]
