"""Counts the tokens, operations and seconds that the training steps of a run have taken so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from subquad.suite.contracts import Batch, Segment
from subquad.suite.operations import OperationCounter, OperationsUnknown
from subquad.suite.training.measure import Stopwatch


def shaped(segment: Segment, num_rows: int) -> Batch:
    """A batch of so many rows of a segment, without values."""

    def like(x: torch.Tensor) -> torch.Tensor:
        return torch.empty((num_rows, *x.shape[1:]), dtype=x.dtype, device="meta")

    positions = None if segment.positions is None else like(segment.positions)
    return Batch(like(segment.inputs), like(segment.targets), positions)


class Spending:
    """Adds up what the steps of a run take.

    flops: None once the operations of a step could not be counted, for the reason `unknown`.
    """

    def __init__(self, counter: OperationCounter, watch: Stopwatch) -> None:
        self.counter, self.watch = counter, watch
        self.tokens = 0
        self.flops: int | None = 0
        self.flops_before = 0
        """Operations without those of the last step."""
        self.unknown = ""
        self.elsewhere = ""
        """Names where a part of the seconds was spent, if they are not of one device."""
        self._of_step: dict[tuple[Any, ...], int] = {}

    def flops_of(self, segment: Segment, num_rows: int) -> int | None:
        """Operations of a step on so many rows of a segment, forward and backward pass."""
        key = num_rows, segment.inputs.shape[1:], segment.targets.shape[1:]
        if key not in self._of_step:
            if self.unknown:
                return None
            # it takes some tenths of a second, which belong to the run as little as a compilation does
            with self.watch.pause():
                try:
                    self._of_step[key] = self.counter.training_step(shaped(segment, num_rows))
                except OperationsUnknown as reason:
                    self.unknown = str(reason)
                    return None
        return self._of_step[key]

    def add(self, segment: Segment, num_rows: int) -> None:
        """Counts a step on so many rows of a segment."""
        flops = self.flops_of(segment, num_rows)
        self.flops_before = self.flops or 0
        self.flops = None if self.flops is None or flops is None else self.flops + flops
        self.tokens += num_rows * segment.inputs.shape[1]

    def rows(self, step: int) -> Iterator[dict[str, Any]]:
        """The rows of all steps up to this one."""
        known = {"value": self.flops} if self.flops is not None else self._not_known()
        yield {"metric": "train_flops", "unit": "flop", "step": step, **known}
        yield {"metric": "train_tokens", "unit": "tokens", "value": self.tokens, "step": step}
        seconds: dict[str, Any] = {"value": self.watch.total}
        if self.elsewhere:
            seconds = {"value": None, "status": "n/a", "error": self.elsewhere}
        yield {"metric": "train_seconds", "unit": "s", "step": step, **seconds}

    def _not_known(self) -> dict[str, Any]:
        return {"value": None, "status": "n/a", "error": self.unknown or "not counted before the run was continued"}

    def state(self) -> list[float | int | str | None]:
        """For a checkpoint; `take` continues from it."""
        return [self.tokens, self.flops, self.watch.total, self.elsewhere]

    def take(self, state: list[Any]) -> None:
        # older checkpoints do not have the last one
        self.tokens, self.flops, self.watch.total, *elsewhere = state
        self.elsewhere = elsewhere[0] if elsewhere else ""


def inference_rows(counter: OperationCounter, batch: Batch, length: int) -> Iterator[dict[str, Any]]:
    """Operations a token: of a forward pass of a batch, and of a decoded token behind `length` positions."""
    tokens = batch.inputs.shape[0] * batch.inputs.shape[1]
    for row, count in (
        ({"metric": "inference_flops"}, lambda: counter.forward(batch.inputs, batch.positions) / tokens),
        (
            {"metric": "decode_flops", "slice": f"length={length}"},
            lambda: counter.decoded_token(batch.inputs[:, 0], length),
        ),
    ):
        try:
            known: dict[str, Any] = {"value": count()}
        except OperationsUnknown as reason:
            known = {"value": None, "status": "n/a", "error": str(reason)}
        yield {"unit": "flop", **row, **known}
