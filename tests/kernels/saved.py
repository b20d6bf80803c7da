"""Records the tensors that autograd keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def kept_for_backward() -> Iterator[dict[int, int]]:
    """Fills a table with the elements of every tensor that is kept meanwhile, by its address."""
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        yield kept
