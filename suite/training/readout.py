"""Logits and loss of a model on a batch, without a tensor for the logits of all positions where that would be large."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from subquad.suite.model import Model

MAX_LOGITS = 1 << 28
"""Number of logits up to which a batch is scored as a whole; in float32 these are one GiB."""


def mean_loss(model: Model, inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
    """Mean cross entropy of a batch over its labels, float32; int64 targets and positions as in `Batch`."""
    return model.loss(model.hidden(inputs, positions), targets)


def logits_by_rows(
    model: Model,
    inputs: Tensor,
    targets: Tensor,
    positions: Tensor | None,
    num_classes: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    *,
    max_logits: int = MAX_LOGITS,
) -> Iterator[tuple[Tensor, Tensor]]:
    """float32 logits and their targets, all rows of a batch at once or, where they are many, a few rows at a time.

    autocast: gives the context in which the model is called; it does not hold while the caller uses the logits.
    """
    rows = max(1, max_logits // (targets[:1].numel() * num_classes))
    # a sequence readout gives few logits, and may take more than one row of hidden states for a label
    if targets.ndim == 1 or rows >= len(targets):
        with autocast():
            logits = model(inputs, positions).float()
        yield logits, targets
        return
    with autocast():
        hidden = model.hidden(inputs, positions)
    for states, labels in zip(hidden.split(rows), targets.split(rows), strict=True):
        with autocast():
            logits = model.readout(states).float()
        yield logits, labels
