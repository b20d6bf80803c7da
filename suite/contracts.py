"""Interfaces between the folders: batches, and the base classes of tasks and of the configurations of models.

Letters: `B` batch, `T` time, `P` labelled positions of a sequence, `D` model width, `C` channels of a signal. What only
some tasks can do has a default here, so whoever uses a task asks no task what it is. The base class of models, which
needs torch, is in `suite/model.py`; this module imports no torch, so the command line can list names without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from subquad.suite.identity import NOT_IN_IDS, path_digest
from subquad.suite.options import Config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Operators = Mapping[str, Mapping[str, object]]
"""Name of an operator to its `version` and `backend`."""
Recorder = Callable[[], AbstractContextManager[Operators]]
"""Opens a context whose value fills with the operators that are called in it. It is pickled for worker processes."""


@contextmanager
def no_operators() -> Iterator[Operators]:
    """A `Recorder` that records no operators."""
    yield {}


IGNORE = -100
"""Target value of a position without a label, which enters neither the loss nor a metric."""


class MissingDataError(ValueError):
    """The data of a task are not there. A grid can be planned without them, but its runs have no identity yet."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of one length and their labels.

    inputs:    [B, T] integer tokens, or [B, T, C] float signal.
    targets:   [B, P] integer classes, `IGNORE` where there is no label; [B] for one label a sequence.
    positions: [B, P] integer time indices of the labels. For one label a sequence, which is read out by pooling: None,
               or [B, towers], the last index of each sequence, behind which there is padding.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Segment(Batch):
    """The rows of a split that share a length and a slice name, e.g. `length=512,num_kv_pairs=64`.

    Tensors lie in host memory in their smallest natural dtype (uint8, int16 or int32 tokens, float32 signals).
    """

    slice: str = ""
    rate: float = 1.0
    """Sampling rate of these rows over that of the training rows: 0.5 where every second sample was taken."""

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class TaskSpec:
    """Properties of a task that a model needs in order to be built for it."""

    input: Literal["tokens", "signal"]
    """`tokens`: inputs are [B, T] integers below `vocab_size`; `signal`: [B, T, channels] floats."""
    num_classes: int
    readout: Literal["token", "sequence", "last"]
    """`token`: logits at `positions`; `sequence`: one prediction a sequence; `last`: logits at `positions`, all of them
    from the hidden state of the last position."""
    max_length: int
    """The longest T of any split, which learned positions and explicit long filters must cover."""
    vocab_size: int = 0
    channels: int = 0
    towers: int = 1
    """Sequences a row: [B, towers * T] inputs are read one by one with the same weights and compared in the readout."""

    def misfit(self, rows: Batch) -> str:
        """Says which tokens, labels or positions would be looked up beyond a model's tables, or belong to no row or in
        no order; empty if none.

        A GPU reads beyond a table without an error, or ends the process. Labels whose positions do not rise are
        compared with the predictions of other positions.
        """
        if reason := self._apart(rows):
            return reason
        limits = [("target", rows.targets, self.num_classes, f"num_classes is {self.num_classes}")]
        if self.input == "tokens":
            limits.append(("input token", rows.inputs, self.vocab_size, f"vocab_size is {self.vocab_size}"))
        if rows.positions is not None:
            length = rows.inputs.shape[1]
            limits.append(("position", rows.positions, length, f"sequences have {length} positions"))
        for name, values, end, limit in limits:
            if values.is_floating_point():
                return f"{name}s must be integers, got {values.dtype}"
            numbers = values.numpy()
            low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
            if low < 0 and name == "target":
                low = int(numbers.min(where=numbers != IGNORE, initial=0))
            if low < 0:
                return f"{name} {low} is below 0" + f" and not {IGNORE}, no label" * (name == "target")
            if high >= end:
                return f"{name} {high} is too large: {limit}"
        return ""

    def _apart(self, rows: Batch) -> str:
        """Says which labels and positions do not belong to each other; empty if all do."""
        count, length = rows.inputs.shape[:2]
        for name, values in (("targets", rows.targets), ("positions", rows.positions)):
            if values is not None and len(values) != count:
                return f"{count} rows have {len(values)} rows of {name}"
        if self.readout == "sequence":
            return ""
        if rows.positions is None:
            fits = rows.targets.shape[1:] == (length,)
            return "" if fits else f"without positions, all {length} tokens of a row need a label"
        if rows.positions.shape != rows.targets.shape:
            return "targets and positions have different shapes"
        rises = bool((rows.positions[:, 1:] > rows.positions[:, :-1]).all())
        return "" if rises else "positions of a row do not rise"


@dataclass(frozen=True)
class Generation:
    """The sequences that a model of a task generates after training."""

    num_rows: int
    temperature: float
    """Divisor of the logits before a token is drawn."""
    first_token: int
    """Input token of the model from which it generates its first token."""


class Task(Config):
    """Base class of tasks. A task is its own strict configuration, frozen and hashable by content.

    Its data come from its own random streams (`suite.rng.numpy_generator(seed, purpose)`), so they do not depend on
    the model. Splits are `train`, `valid` and `test`. `version` is raised whenever the bytes of a split or the meaning
    of a metric change. A task defines `name`, `version`, `spec` and `segments`; all else has a default.
    """

    name: ClassVar[str]
    """The name in the table of contents, with which the names of the task's random streams begin."""
    version: ClassVar[int]
    exponentials: ClassVar[Mapping[str, str]] = {}
    """Metrics that are no ratio of sums, such as the perplexity: each is the exponential of one that `score` gives."""
    batch_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics of `score_batch`. They depend on `train.eval_batch_size`, and are left out where several
    processes share a batch."""

    split_policy: Literal["paper", "clean"] = "clean"
    """`paper`: validate as the source does, even on the test rows. `clean`: validate on rows set apart for it."""

    @property
    def spec(self) -> TaskSpec:
        raise NotImplementedError

    @property
    def fresh(self) -> bool:
        """Whether training data are drawn anew at every step (`block`) instead of from a finite split."""
        return False

    @property
    def epoch_rows(self) -> int | None:
        """Number of rows of the finite set that a fresh task gives in ever new order; None where there is none."""
        return None

    @property
    def stand_in(self) -> str:
        """Empty, or why these data stand in for the paper's, which is shown wherever a result is shown."""
        return ""

    def fingerprint(self) -> str:
        """Identity of the external data, cheap enough for planning; `generated` where there are none.

        By default a digest of the files and folders that options name: `data`, `tokenizer`, and those of type `Path`.
        A task that reads others, or too many to be read for every plan, overrides this.
        """
        named = {key: value for key, value in self if isinstance(value, Path) or (key in NOT_IN_IDS and value)}
        found = [f"{key} {path_digest(Path(str(named[key])))}" for key in sorted(named)]
        return hashlib.sha256("\n".join(found).encode()).hexdigest() if found else "generated"

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        """The rows of a finite split, one segment (length and slice) after the other."""
        raise NotImplementedError

    def block(self, seed: int, index: int, num_rows: int) -> Segment:
        """Rows `index * num_rows ...` of the endless training stream of a fresh task; depends on nothing else."""
        raise ValueError(f"{self.name}: the training split is finite and has no blocks; use segments('train', seed).")

    def score(self, logits: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Metrics of a batch as (sum, count) pairs; a metric of a split is the ratio of its summed pairs.

        logits [..., num_classes], targets [...] with `IGNORE` where there is no label. By default accuracy and
        cross-entropy (nats) over the labelled positions. No value is read back from the device.
        """
        import torch
        import torch.nn.functional as F

        logits = logits.reshape(-1, logits.shape[-1]).float()
        targets = targets.reshape(-1).long()
        count = (targets != IGNORE).sum()
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
        # positions without a label are never counted, because no class has the number IGNORE; NaN is no answer
        correct = ((logits.argmax(-1) == targets) & ~losses.isnan()).sum()
        return {"accuracy": (correct, count), "loss": (losses.sum(dtype=torch.float64), count)}

    def score_batch(self, logits: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Like `score`, metrics of all rows of a batch, which its parts do not add up to; see `batch_metrics`."""
        return {}

    def generation(self) -> Generation | None:
        """The sequences that a model generates after training, which `judge` scores; None: none."""
        return None

    def judge(self, clips: Tensor, device: torch.device) -> Iterable[tuple[str, str, float]]:
        """(split, metric, value) of generated tokens [R, T]."""
        raise NotImplementedError

    @property
    def has_text(self) -> bool:
        """Whether tokens stand for text: whether the task defines `encode` and `decode`."""
        return type(self).encode is not Task.encode

    @property
    def tokens_from(self) -> Literal["options", "data", "tokenizer"]:
        """Names what decides which token stands for which text: the options, the data, or the file `tokenizer`."""
        return "options"

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. ValueError for text that has none."""
        raise ValueError(f"{self.name}: its tokens stand for no text")

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; what is no text yet is left out at the end."""
        raise ValueError(f"{self.name}: its tokens stand for no text")


class PreparedTask(Task):
    """Base class of tasks whose rows are kept as arrays in a cache."""

    @property
    def sources(self) -> Sequence[str]:
        """Names of the task's sources in the manifest of data; empty if the rows are generated."""
        raise NotImplementedError

    def arrays(self, workers: int = 1, *, force: bool = False) -> Any:
        """The arrays from the cache, made first where they are missing, or in any case with `force`.

        workers: processes that make them.
        """
        raise NotImplementedError

    def verify(self, workers: int = 1) -> None:
        """Makes the arrays again and raises ValueError where the cache holds others."""
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        """Number of rows of every split."""
        raise NotImplementedError


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that the optimizer treats alike. None means the run's own value."""

    name: str
    parameters: list[Any]
    lr: float | None = None
    weight_decay: float | None = None


class ModelConfig(Config):
    """Base class of the strict configurations of models. `version` is raised whenever a model's function changes."""

    version: ClassVar[int]

    def check(self, spec: TaskSpec) -> None:
        """Raises ValueError where this model cannot serve that task; called before any run starts."""

    def build(self, spec: TaskSpec) -> Any:
        """The network for one task, a `suite.model.Model`, initialised from torch's global generator."""
        raise NotImplementedError

    def build_peer(self, library: str, spec: TaskSpec) -> Any:
        """Another library's network of this kind and size, a `suite.model.Model` with its `version`, to be timed.

        LookupError where the library has none, ImportError where it is not installed.
        """
        raise LookupError(f"{library} has no model of this kind")
