"""Gated linear attention in plain PyTorch: a tree of matrix products, O(log T) launches, O(T) work.

Split a block of 2h positions in halves. What the first half wrote reaches a query i of the second half through the
decay up to the middle and the decay after it,

    prod_{l in (j, i]} a_l = exp(suffix_j) exp(prefix_i),   suffix_j = sum_{l in (j, mid]} log a_l,
                                                            prefix_i = sum_{l in (mid, i]} log a_l,

so that the interaction is one matrix product of (q exp(prefix)) with (k exp(suffix)). Within a chunk of 64 positions
this is done at h = 1, 2, 4, ..., 32; the diagonal has no decay. Beyond it, chunks are summarised by states [K, V],
which a second tree of depth log2(T / 64) turns into the state that enters every chunk.

Only sums of log-decays are ever exponentiated, never a difference of two: with decays <= 1 no exponent is positive,
and as nothing cancels, near terms keep full precision next to decays that underflow. The README derives the cost.
A decay of a head needs no tree within the chunk: its [64, 64] matrix of decays between pairs is formed at once.

Where groups of heads share queries and keys, the scores of a group are formed once, and products with states and values
take all heads of a group as columns of one matrix. Only decays of key channels need queries and keys of every head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, not_saved

CHUNK = 64


def chunk_length(length: int) -> int:
    """The length of a chunk: `CHUNK`, or for a shorter sequence the smallest power of two that covers it."""
    return min(CHUNK, 1 << (length - 1).bit_length())


def to_chunks(x: Tensor, size: int) -> Tensor:
    """x [B, T, H, X] as [B, H, chunks, size, X], with zeros after the end."""
    missing = -x.shape[1] % size
    if missing:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    return x.transpose(1, 2).contiguous().unflatten(2, (-1, size))


def from_chunks(x: Tensor, length: int) -> Tensor:
    """The inverse of `to_chunks` for a sequence of this length."""
    return x.flatten(2, 3)[:, :, :length].transpose(1, 2)


def to_groups(x: Tensor, groups: int) -> Tensor:
    """x [B, H, n, X, V] with the heads of a group side by side: [B, G, n, X, H / G V] for G groups."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).movedim(2, -2).flatten(-2)


def to_heads(x: Tensor, heads: int) -> Tensor:
    """The inverse of `to_groups`."""
    return x if x.shape[1] == heads else x.unflatten(-1, (heads // x.shape[1], -1)).movedim(-2, 2).flatten(1, 2)


def of_heads(x: Tensor, heads: int) -> Tensor:
    """x [B, G, ...] repeated for every head of a group: [B, H, ...]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """First and second halves of the blocks of 2 half positions: views [..., C / 2 half, half, X] of [..., C, X]."""
    first, second = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return first, second


def _quadrant(matrix: Tensor, half: int) -> Tensor:
    """The part of [..., C, C] with rows in second and columns in first halves: a view [..., C / 2 half, half, half]."""
    blocks = (-1, 2, half)
    diagonal = matrix.unflatten(-1, blocks).unflatten(-4, blocks).diagonal(dim1=-6, dim2=-3)
    return diagonal[..., 1, :, 0, :, :].movedim(-1, -3)


def _levels(log_decay: Tensor) -> list[Tensor]:
    """For h = 1, 2, ..., C / 2 a tensor like log_decay [..., C, X]: exp(suffix) in first halves, exp(prefix) in second.

    prefix_2h = (prefix_h, prefix_h + total_h of the first half), and suffix_2h likewise from the end: only sums.
    """
    prefix, suffix = log_decay.clone(), torch.zeros_like(log_decay)
    levels, half = [], 1
    while half < log_decay.shape[-2]:
        (prefix_1, prefix_2), (suffix_1, _) = _halves(prefix, half), _halves(suffix, half)
        levels.append(torch.stack([suffix_1, prefix_2], dim=-3).exp_().view_as(log_decay))
        suffix_1 += prefix_2[..., -1:, :]
        prefix_2 += prefix_1[..., -1:, :]
        half *= 2
    return levels


def _levels_backward(grads: list[Tensor]) -> Tensor:
    """The gradient of log_decay from those of the exponents of `_levels`, in the same layout.

    It runs from the largest halves down: what reaches prefix_2h of a second half also reaches the total of the first
    half, which is its last prefix, and so on.
    """
    prefix, suffix = torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    half = prefix.shape[-2]
    for grad in reversed(grads):
        half //= 2
        (prefix_1, prefix_2), (suffix_1, _) = _halves(prefix, half), _halves(suffix, half)
        prefix_1[..., -1, :] += prefix_2.sum(-2)
        prefix_2[..., -1, :] += suffix_1.sum(-2)
        grad_1, grad_2 = _halves(grad, half)
        suffix_1 += grad_1
        prefix_2 += grad_2
    return prefix


class _KeyScores(OnceDifferentiable):
    """[..., C, C]: A_ij = sum_x q_ix k_jx prod_{l in (j, i]} a_lx for j <= i, else 0, from [..., C, K] each.

    levels are those of log_decay, computed without a gradient; backward returns all of it for log_decay.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, log_decay: Tensor, levels: list[Tensor]) -> Tensor:
        ctx.save_for_backward(q, k)
        not_saved(ctx, log_decay)
        ctx.levels = levels
        scores = torch.diag_embed((q * k).sum(-1))
        for level, factor in enumerate(levels):
            half = 1 << level
            k_1, q_2 = (
                a * b
                for a, b in (
                    (_halves(k, half)[0], _halves(factor, half)[0]),
                    (_halves(q, half)[1], _halves(factor, half)[1]),
                )
            )
            _quadrant(scores, half).copy_(q_2 @ k_1.mT)
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (grad,) = grads
        q, k = ctx.saved_tensors
        diagonal = grad.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        grad_q, grad_k = diagonal * k, diagonal * q
        exponents = []
        with torch.autocast(q.device.type, enabled=False):
            for level, factor in enumerate(ctx.levels):
                half = 1 << level
                factor_1, factor_2 = _halves(factor, half)
                k_1, q_2 = _halves(k, half)[0] * factor_1, _halves(q, half)[1] * factor_2
                block = _quadrant(grad, half)
                grad_q2, grad_k1 = block @ k_1, block.mT @ q_2
                exponents.append(torch.stack([grad_k1 * k_1, grad_q2 * q_2], dim=-3).view_as(q))
                _halves(grad_q, half)[1].addcmul_(grad_q2, factor_2)
                _halves(grad_k, half)[0].addcmul_(grad_k1, factor_1)
        return grad_q, grad_k, _levels_backward(exponents) if exponents else torch.zeros_like(q), None


class _ValueReads(OnceDifferentiable):
    """[..., C, V]: o_ix = sum_{j <= i} A_ij prod_{l in (j, i]} a_lx v_jx, from A [..., C, C] and [..., C, V].

    levels are those of log_decay, computed without a gradient; backward returns all of it for log_decay.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor, log_decay: Tensor, levels: list[Tensor]) -> Tensor:
        ctx.save_for_backward(scores, v)
        not_saved(ctx, log_decay)
        ctx.levels = levels
        o = scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * v
        for level, factor in enumerate(levels):
            half = 1 << level
            factor_1, factor_2 = _halves(factor, half)
            _halves(o, half)[1].addcmul_(_quadrant(scores, half) @ (_halves(v, half)[0] * factor_1), factor_2)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (grad,) = grads
        scores, v = ctx.saved_tensors
        grad_scores = torch.diag_embed((grad * v).sum(-1))
        grad_v = scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * grad
        exponents = []
        with torch.autocast(v.device.type, enabled=False):
            for level, factor in enumerate(ctx.levels):
                half = 1 << level
                factor_1, factor_2 = _halves(factor, half)
                block = _quadrant(scores, half).contiguous()
                v_1, grad_2 = _halves(v, half)[0] * factor_1, _halves(grad, half)[1] * factor_2
                grad_v1 = block.mT @ grad_2
                _quadrant(grad_scores, half).copy_(grad_2 @ v_1.mT)
                exponents.append(torch.stack([grad_v1 * v_1, grad_2 * (block @ v_1)], dim=-3).view_as(v))
                _halves(grad_v, half)[0].addcmul_(grad_v1, factor_1)
        return grad_scores, grad_v, _levels_backward(exponents) if exponents else torch.zeros_like(v), None


@dataclass(frozen=True)
class Decay:
    """Decays within chunks, [B or 1, H, chunks, C, X]; X is 1 for a decay of a head."""

    log: Tensor
    prefix: Tensor
    """Decay from the start of the chunk up to and including the position, in [0, 1]."""
    suffix: Tensor
    """Decay from after the position to the end of the chunk, in [0, 1]."""
    log_total: Tensor
    """Log-decay of the whole chunk, [B or 1, H, chunks, X]."""
    levels: list[Tensor]
    """The factors of the tree, see `_levels`; empty where X is 1."""


def make_decay(log_decay: Tensor) -> Decay:
    """From log_decay [B or 1, H, chunks, C, X], summed from both ends so that nothing cancels."""
    prefix = log_decay.cumsum(-2)
    suffix = F.pad(log_decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
    levels = _levels(log_decay.detach()) if log_decay.shape[-1] > 1 else []
    return Decay(log_decay, prefix.exp(), suffix.exp(), prefix[..., -1, :], levels)


def _decay_matrix(log_decay: Tensor) -> Tensor:
    """Decays of a head between key j (column) and query i, [..., C, C] from [..., C, 1]; 0 for j > i."""
    index = torch.arange(log_decay.shape[-2], device=log_decay.device)
    segments = torch.where(index[:, None] > index, log_decay, 0.0).cumsum(-2)
    return torch.where(index[:, None] >= index, segments.exp(), 0.0)


def decayed_scores(q: Tensor, k: Tensor, decay: Decay | None) -> Tensor:
    """q_i^T exp(G_i - G_j) k_j for keys j <= i of a chunk, else 0: [B, H, n, C, C] for q, k [B, H, n, C, K].

    G_i is the sum of the log-decays up to position i, of key channels or of the head. Where q and k have fewer heads
    than the decays of heads, so have scores without decays.
    """
    if decay is None:
        return (q @ k.mT).tril()
    if decay.log.shape[-1] == 1:
        pairs, decays = q @ k.mT, _decay_matrix(decay.log)
        if pairs.shape[1] == decays.shape[1]:
            return pairs * decays
        return (pairs.unsqueeze(2) * decays.unflatten(1, (pairs.shape[1], -1))).flatten(1, 2)
    # the compiler refuses one tensor as two inputs of a function
    return _KeyScores.apply(q, k.view_as(k) if k is q else k, decay.log, decay.levels)


def within_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Decay | None, on_key: bool) -> Tensor:
    """Outputs of each position from its own chunk, [B, H, n, C, V], for q, k [B, H, n, C, K] and v [B, H, n, C, V].

    on_key: whether the decays are those of key channels.
    """
    if on_key or decay is None or decay.log.shape[-1] == 1:
        scores = decayed_scores(q, k, decay)
        return to_heads(scores @ to_groups(v, scores.shape[1]), v.shape[1])
    return _ValueReads.apply(of_heads(q @ k.mT, v.shape[1]), v, decay.log, decay.levels)


def entering_states(log_total: Tensor | None, states: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """The state before every chunk, and after the last.

        E_{i+1} = exp(log_total_i) E_i + states_i,  E_0 = initial

    log_total [B, H, n, K, 1] (or [..., 1, V], or None for no decay), states [B, H, n, K, V], initial [B, H, K, V].
    It is a tree: pairs of chunks are merged, the recurrence is solved for the pairs, and the states between the two
    chunks of each pair are computed from that.
    """
    num_chunks = states.shape[2]
    if log_total is None:
        sums = torch.cat([initial.unsqueeze(2), states], dim=2).cumsum(2)
        return sums[:, :, :-1], sums[:, :, -1]
    if num_chunks == 1:
        return initial.unsqueeze(2), log_total[:, :, 0].exp() * initial + states[:, :, 0]
    if num_chunks % 2:
        entering, last = entering_states(log_total[:, :, :-1], states[:, :, :-1], initial)
        entering = torch.cat([entering, last.unsqueeze(2)], dim=2)
        return entering, log_total[:, :, -1].exp() * last + states[:, :, -1]
    total_1, total_2 = log_total[:, :, 0::2], log_total[:, :, 1::2]
    states_1, states_2 = states[:, :, 0::2], states[:, :, 1::2]
    entering_1, last = entering_states(total_1 + total_2, total_2.exp() * states_1 + states_2, initial)
    entering_2 = total_1.exp() * entering_1 + states_1
    return torch.stack([entering_1, entering_2], dim=3).flatten(2, 3), last


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Decay | None, on_key: bool, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """o and the final state for q, k [B, G, n, C, K], v [B, H, n, C, V] and the initial state [B, H, K, V].

    G differs from H only where no decay is that of a key channel.
    """
    o = within_chunks(q, k, v, decay, on_key)
    groups, heads = q.shape[1], v.shape[1]
    if decay is None:
        entering, last = entering_states(None, to_heads(k.mT @ to_groups(v, groups), heads), initial)
        return o + to_heads(q @ to_groups(entering, groups), heads), last
    if on_key and groups == heads:
        entering, last = entering_states(decay.log_total.unsqueeze(-1), (k * decay.suffix).mT @ v, initial)
        return o + (q * decay.prefix) @ entering, last
    # a decay of a head may scale values and outputs as well
    states = to_heads(k.mT @ to_groups(v * decay.suffix, groups), heads)
    entering, last = entering_states(decay.log_total.unsqueeze(-2), states, initial)
    return o + decay.prefix * to_heads(q @ to_groups(entering, groups), heads), last


def gated_linear_attention_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    decay_on: str = "key",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Arguments and results as in the public operator; computes in float32 (float64 for float64 inputs)."""
    (batch, length, heads, _), key_dim = v.shape, q.shape[-1]
    scale = key_dim**-0.5 if scale is None else scale
    work = torch.promote_types(q.dtype, torch.float32)
    size = chunk_length(length)
    with torch.autocast(q.device.type, enabled=False):
        c_q, c_k, c_v = (to_chunks(x, size) for x in (scale * q.to(work), k.to(work), v.to(work)))
        decay = None
        if log_decay is not None:
            log_decay = log_decay.to(work)
            if log_decay.dim() == 1:
                log_decay = log_decay.expand(1, length, heads)
            decay = make_decay(to_chunks(log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1), size))
            if decay_on == "key" and log_decay.dim() == 4:
                c_q, c_k = of_heads(c_q, heads), of_heads(c_k, heads)
        empty = c_q.new_zeros(batch, heads, key_dim, v.shape[-1])
        initial = empty if initial_state is None else initial_state.to(work)
        o, last = attend_chunks(c_q, c_k, c_v, decay, decay_on == "key", initial)
        o = from_chunks(o, length).to(v.dtype)
    return (o, last) if return_final_state else o
