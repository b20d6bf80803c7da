"""Parts that tasks share: their base classes, metrics of labelled positions, and fast exact sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from subquad.suite.contracts import IGNORE, Segment, Task, TaskSpec

Array = NDArray[Any]

SPLITS = ("train", "valid", "test")


def token_spec(num_tokens: int, max_length: int, readout: Literal["token", "last"] = "token") -> TaskSpec:
    """The properties of a task whose labels are tokens, as its inputs are."""
    return TaskSpec("tokens", num_tokens, readout, max_length, vocab_size=num_tokens)


class TaskBase(Task):
    """Base class of the tasks of this repository: `suite.contracts.Task` with the names of its splits checked."""

    def check_split(self, split: str) -> None:
        """Raises ValueError for a split that does not exist."""
        if split not in SPLITS:
            raise ValueError(f"{self.name}: split={split!r}; there are: {', '.join(SPLITS)}.")

    def drawn_split(self, split: str) -> str:
        """The split whose rows are drawn for `split`: under the policy `paper`, validation uses the test rows."""
        self.check_split(split)
        if split == "train" and self.fresh:
            raise ValueError(f"{self.name}: training data are drawn anew at every step; use block(seed, index, rows).")
        return "test" if split == "valid" and self.split_policy == "paper" else split


class ScoredByClass(TaskBase):
    """A task that also has `macro_accuracy`, as the tasks of MAD do."""

    batch_metrics: ClassVar[tuple[str, ...]] = ("macro_accuracy",)

    def score_batch(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"macro_accuracy": macro_accuracy(logits, targets)}


def predicted_classes(logits: torch.Tensor) -> torch.Tensor:
    """The class of the largest of the logits [..., C]; -1, which no label is, where one of them is NaN."""
    return logits.argmax(-1).where(~logits.amax(-1).isnan(), -1)


def macro_accuracy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the accuracies of the classes, as (sum, count) over the rows of a batch.

        1/|S| sum_{c in S} n_c^right / n_c,   S: the classes with a label or a prediction in the batch

    A class that is predicted but has no label counts as zero. The value of a split is the mean over its batches, so it
    depends on `train.eval_batch_size`: where there are many classes, a wrong prediction often adds such a class.
    logits [B, ..., C], targets [B, ...] with `IGNORE` where there is no label.

    Source: `MulticlassAccuracy` of torchmetrics with its default average, logged batch by batch, as in MAD (Poli et al.
    2024; athms/mad-lab, mad/metrics.py and train.py at 6e7e4c903b7d4d1a31d12186b709f36fa3184041, and
    mad/model/pl_model_wrapper.py at 1f77b94127309e9f3e0280fe73d6079ba3eaf3eb).
    """
    num_classes, num_rows = logits.shape[-1], len(targets)
    predicted, targets = predicted_classes(logits.reshape(-1, num_classes)), targets.reshape(-1).long()
    labelled = targets != IGNORE
    targets = targets.where(labelled, 0)

    def per_class(classes: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(num_classes, dtype=torch.int64, device=logits.device)
        return zeros.scatter_add_(0, classes, counted.long())

    right = per_class(targets, labelled & (predicted == targets))
    labels = per_class(targets, labelled)
    predictions = per_class(predicted.clamp(min=0), labelled & (predicted >= 0))
    num_present = ((labels > 0) | (predictions > 0)).sum()
    value = (right / labels.clamp(min=1).double()).sum() / num_present.clamp(min=1)
    # a batch without a label says nothing
    weight = num_rows * (num_present > 0)
    return value * weight, weight


CHUNK_ROWS = 256
"""Number of rows, such as those of an endless stream, that are drawn from one generator.

Making a generator costs little beside so many rows, and little is wasted where a block begins or ends inside a chunk.
"""


class FreshTask(TaskBase):
    """A task whose training data are an endless stream of rows, drawn in chunks of `CHUNK_ROWS`.

    Row i does not depend on the size of the block that it is read in. Blocks of a multiple of `CHUNK_ROWS` rows draw no
    row twice.
    """

    @property
    def fresh(self) -> bool:
        return True

    def chunk(self, seed: int, index: int) -> Segment:
        """Rows `index * CHUNK_ROWS` to `(index + 1) * CHUNK_ROWS - 1` of the stream."""
        raise NotImplementedError

    def block(self, seed: int, index: int, num_rows: int) -> Segment:
        if not self.fresh:
            # an option of the derived task makes its training rows finite
            return super().block(seed, index, num_rows)
        if index < 0 or num_rows < 1:
            raise ValueError(f"{self.name}: block needs index >= 0 and num_rows >= 1, got {index} and {num_rows}.")
        start = index * num_rows
        first, last = start // CHUNK_ROWS, (start + num_rows - 1) // CHUNK_ROWS
        chunks = [self.chunk(seed, i) for i in range(first, last + 1)]
        offset = start - first * CHUNK_ROWS

        def rows(parts: list[torch.Tensor]) -> torch.Tensor:
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            return whole[offset : offset + num_rows]

        return Segment(
            inputs=rows([chunk.inputs for chunk in chunks]),
            targets=rows([chunk.targets for chunk in chunks]),
            positions=rows([chunk.positions for chunk in chunks if chunk.positions is not None]),
            slice=chunks[0].slice,
        )


def token_dtype(num_values: int) -> type[np.signedinteger]:
    """The smallest of int16 and int32 that can hold 0 .. num_values - 1."""
    return np.int16 if num_values <= 2**15 else np.int32


def token_segment(inputs: Array, targets: Array, positions: Array, num_tokens: int, slice: str) -> Segment:
    """A segment of arrays inputs [R, T], targets [R, P] and positions [R, P], in their smallest dtypes."""
    dtype = token_dtype(num_tokens)
    return Segment(
        inputs=torch.from_numpy(np.ascontiguousarray(inputs, dtype=dtype)),
        targets=torch.from_numpy(np.ascontiguousarray(targets, dtype=dtype)),
        positions=torch.from_numpy(np.ascontiguousarray(positions, dtype=token_dtype(inputs.shape[1]))),
        slice=slice,
    )


def language_segment(rows: Array, *, all_tokens: bool, num_tokens: int, slice: str) -> Segment:
    """A segment of rows [R, T + 1] whose last token is the answer: inputs [R, T] and labels of next tokens.

    all_tokens: label every next token, P = T. Otherwise label the answer alone, P = 1.
    """
    num_rows, length = rows.shape[0], rows.shape[1] - 1
    first = 0 if all_tokens else length - 1
    positions = np.tile(np.arange(first, length), (num_rows, 1))
    return token_segment(rows[:, :-1], rows[:, first + 1 :], positions, num_tokens, slice)


def distinct(rng: np.random.Generator, num_rows: int, count: int, num_values: int) -> Array:
    """[num_rows, count] integers below `num_values`; every row is uniform over ordered selections without repetition.

    The entries are drawn with repetition, and an entry that repeats an earlier one of its row is drawn again. This
    treats all values alike, so all ordered selections are equally likely, and the cost does not depend on `num_values`.
    Where more than half of all values are selected, that would take many rounds, and the order of random numbers is
    used.
    """
    if 2 * count > num_values:
        return rng.random((num_rows, num_values)).argsort(axis=1)[:, :count].astype(np.int32)
    drawn = rng.integers(0, num_values, (num_rows, count), dtype=np.uint16 if num_values <= 2**16 else np.int32)
    rows = np.arange(num_rows)
    while rows.size:
        part = drawn[rows]
        # a stable sort puts equal entries side by side, the earliest first
        order = part.argsort(axis=1, kind="stable")
        ranked = np.take_along_axis(part, order, axis=1)
        repeats = np.zeros(part.shape, dtype=bool)
        np.put_along_axis(repeats, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], axis=1)
        part[repeats] = rng.integers(0, num_values, np.count_nonzero(repeats), dtype=part.dtype)
        drawn[rows] = part
        rows = rows[repeats.any(axis=1)]
    return drawn.astype(np.int32)


def weighted_distinct(rng: np.random.Generator, num_rows: int, count: int, weights: Array) -> Array:
    """Indices [num_rows, count] drawn one by one without replacement, with probability proportional to `weights`.

    Index i arrives after an exponential time of rate weights[i]. The first `count` arrivals, in their order, have
    exactly the distribution of such draws (Efraimidis and Spirakis 2006; the Gumbel top-k trick).
    """
    arrival = -np.log1p(-rng.random((num_rows, len(weights)))) / weights
    first = arrival.argpartition(count - 1, axis=1)[:, :count]
    order = np.take_along_axis(arrival, first, axis=1).argsort(axis=1)
    return np.take_along_axis(first, order, axis=1)


def unique_rows(draw: Callable[[int], Array], num_rows: int, name: str) -> Array:
    """The first `num_rows` different rows of a stream; every call of `draw(n)` gives its next n rows."""
    rows = draw(num_rows)
    # if this many rounds do not give enough different rows, there are not enough
    for _ in range(32):
        _, first = np.unique(rows, axis=0, return_index=True)
        if len(first) >= num_rows:
            break
        rows = np.concatenate([rows[np.sort(first)], draw(num_rows)])
    rows = rows[np.sort(first)]
    if len(rows) >= num_rows:
        return rows[:num_rows]
    raise ValueError(
        f"{name}: found only {len(rows)} different sequences of {num_rows}; "
        f"lower num_train or num_test, or raise length or vocab_size."
    )
