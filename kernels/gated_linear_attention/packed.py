"""Sequences packed one after the other along time, as `cu_seqlens` says: 0 and where each of them ends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor


def sequence_ends(op: str, cu_seqlens: Tensor | None, batch: int, length: int) -> list[int] | None:
    """cu_seqlens as numbers (a GPU is waited for); ValueError where they do not fit [1, T, ...]."""
    if cu_seqlens is None:
        return None
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"{op}: cu_seqlens must be [sequences + 1] integers, got {tuple(cu_seqlens.shape)}.")
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens needs all sequences packed along time, B=1, got B={batch}.")
    ends = [int(end) for end in cu_seqlens.tolist()]
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != length or any(a >= b for a, b in pairwise(ends)):
        raise ValueError(f"{op}: cu_seqlens must rise from 0 to T={length} without empty sequences, got {ends}.")
    return ends


def one_by_one(run: Callable[[slice, slice], tuple[Tensor, ...]], ends: list[int]) -> tuple[Tensor, ...]:
    """run(of time, of states) for each sequence: outputs joined along time, final states along the batch."""
    results = [run(slice(*pair), slice(i, i + 1)) for i, pair in enumerate(pairwise(ends))]
    o, *states = zip(*results, strict=True)
    return torch.cat(o, dim=1), *(torch.cat(state) for state in states)
