"""Sequences packed one after the other along time, as `cu_seqlens` says: 0 and where each of them ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.checks import check_integers


def sequence_ends(op: str, cu_seqlens: Tensor | None, batch: int, length: int) -> list[int] | None:
    """cu_seqlens as a list, which waits for the GPU; ValueError where it does not fit inputs [batch, length, ...]."""
    if cu_seqlens is None:
        return None
    check_integers(op, "cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1:
        raise ValueError(f"{op}: cu_seqlens must be [sequences + 1], got {list(cu_seqlens.shape)}.")
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens needs all sequences packed along time, B=1, got B={batch}.")
    ends = [int(end) for end in cu_seqlens.tolist()]
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != length or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"{op}: cu_seqlens must rise from 0 to T={length} and never fall, got {ends}.")
    return ends


def filled(ends: list[int] | None, *initial: Tensor | None) -> tuple[Any, ...]:
    """The ends of the sequences that are not empty, and their initial states."""
    if ends is None or len(set(ends)) == len(ends):
        return ends, *initial
    return sorted(set(ends)), *(None if state is None else state[_indices(ends)] for state in initial)


def _indices(ends: list[int]) -> list[int]:
    """The indices of the sequences that are not empty."""
    return [index for index, (start, end) in enumerate(pairwise(ends)) if start < end]


def states_of_all(final: Any, initial: Tensor | None, ends: list[int] | None) -> Any:
    """The final states of all N sequences [N, ...] from those of the sequences that are not empty.

    The final state of an empty sequence is its initial state, or zero where no initial states [N, ...] are given.
    """
    if ends is None or len(set(ends)) == len(ends):
        return final
    before = final.new_zeros((len(ends) - 1, *final.shape[1:])) if initial is None else initial.to(final.dtype)
    return before.index_copy(0, torch.tensor(_indices(ends), device=final.device), final)


def one_by_one(
    op: Callable[..., Any],
    inputs: Mapping[str, Tensor | None],
    initial: Mapping[str, Tensor | None],
    ends: list[int] | None,
) -> Any:
    """op(**inputs, **initial) of each sequence: its outputs joined along time, its final states along the batch.

    inputs: [1, T, ...], or [H] for what is the same at all positions.   initial: states [N, ...].
    """
    if ends is None:
        return op(**inputs, **initial)
    results = []
    for i, (start, end) in enumerate(pairwise(ends)):
        own = {name: x if x is None or x.dim() == 1 else x[:, start:end] for name, x in inputs.items()}
        results.append(op(**own, **{name: x if x is None else x[i : i + 1] for name, x in initial.items()}))
    o, *states = zip(*results, strict=True)
    return torch.cat(o, dim=1), *(torch.cat(state) for state in states)
