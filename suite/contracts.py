"""Interfaces between the folders: Task, Model, Mixer, Batch, and the optional abilities of each.

Letters: `B` batch, `T` time, `P` labelled positions of a sequence, `D` model width, `C` channels of a signal. An
interface that only some tasks or models have is a protocol of its own, which `isinstance` checks. This module imports
torch only for type checking, so the command line can list names without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

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


class Options(Protocol):
    """Interface that tasks and models inherit from `Config`: their options as values, and a version."""

    version: ClassVar[int]

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]: ...

    def model_dump_json(self) -> str: ...


@runtime_checkable
class Task(Options, Protocol):
    """A task is its own strict configuration (a `Config`), frozen and hashable by content.

    Its data come from its own random streams (`suite.rng.numpy_generator(seed, purpose)`), so they do not depend on
    the model. Splits are `train`, `valid` and `test`. `version` is raised whenever the bytes of a split or the meaning
    of a metric change.
    """

    @property
    def spec(self) -> TaskSpec: ...

    @property
    def fresh(self) -> bool:
        """Whether training data are drawn anew at every step (`block`) instead of from a finite split."""
        ...

    @property
    def stand_in(self) -> str:
        """Empty, or why these data stand in for the paper's, which is shown wherever a result is shown."""
        ...

    @property
    def split_policy(self) -> Literal["paper", "clean"]:
        """`paper`: select as the source does, even on test; `clean`: on a held-out validation split."""
        ...

    def fingerprint(self) -> str:
        """Identity of the external data, cheap enough for planning; `generated` where there are none."""
        ...

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        """The rows of a finite split, one segment (length and slice) after the other."""
        ...

    def block(self, seed: int, index: int, num_rows: int) -> Segment:
        """Rows `index * num_rows ...` of the endless training stream of a fresh task; depends on nothing else."""
        ...

    def score(self, logits: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Metrics of a batch as (sum, count) pairs; a metric of a split is the ratio of its summed pairs.

        logits [..., num_classes] and targets [...] with `IGNORE` where there is no label.
        """
        ...


@runtime_checkable
class EndlessEpochs(Protocol):
    """A fresh task whose stream is a finite set in ever new order."""

    @property
    def epoch_rows(self) -> int | None:
        """Number of rows of that set, which make up an epoch."""
        ...


@runtime_checkable
class Resizable(Protocol):
    """A task whose rows can have another length; where `length` is an option, stages of growing length can set it."""

    @property
    def length(self) -> int: ...


@runtime_checkable
class HasExponentials(Protocol):
    """A task with metrics that are no ratio of sums, such as the perplexity."""

    @property
    def exponentials(self) -> Mapping[str, str]:
        """Name of a metric to the one of `score` that it is the exponential of."""
        ...


@runtime_checkable
class ScoredByBatch(Protocol):
    """A task with metrics of a whole evaluation batch, which the parts of the batch do not add up to.

    Such a metric depends on `train.eval_batch_size`, and is left out where several processes share a batch.
    """

    @property
    def batch_metrics(self) -> tuple[str, ...]:
        """The names of these metrics."""
        ...

    def score_batch(self, logits: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Like `score`, for all rows of a batch; a metric of a split is the ratio of the sums over its batches."""
        ...


@runtime_checkable
class Generating(Protocol):
    """A task whose models also generate sequences after training, which `judge` scores."""

    @property
    def num_generated(self) -> int:
        """Number of sequences to generate after training; 0: none."""
        ...

    @property
    def temperature(self) -> float:
        """Divisor of the logits before a token is drawn."""
        ...

    @property
    def first_token(self) -> int:
        """Input token of the model from which it generates its first token."""
        ...

    def judge(self, clips: Tensor, device: torch.device) -> Iterable[tuple[str, str, float]]:
        """(split, metric, value) of generated tokens [R, T]."""
        ...


@runtime_checkable
class Textual(Protocol):
    """A task whose tokens stand for text."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. ValueError for text that has none."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; what is no text yet is left out at the end."""
        ...


@runtime_checkable
class Countable(Protocol):
    """A task that can say how many rows its splits have."""

    def counts(self) -> dict[str, int]: ...


@runtime_checkable
class Prepared(Countable, Protocol):
    """A task whose rows are kept as arrays in a cache."""

    @property
    def sources(self) -> Sequence[str]:
        """Names of the task's sources in the manifest of data; empty if the rows are generated."""
        ...

    def arrays(self, workers: int = 1, *, force: bool = False) -> Any:
        """The arrays from the cache, made first where they are missing, or in any case with `force`.

        workers: processes that make them.
        """
        ...

    def verify(self, workers: int = 1) -> None:
        """Makes the arrays again and raises ValueError where the cache holds others."""
        ...


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that the optimizer treats alike. None means the run's own value."""

    name: str
    parameters: list[Any]
    lr: float | None = None
    weight_decay: float | None = None


class Mixer(Protocol):
    """A causal sequence mixer: [B, T, D] to [B, T, D]. A torch module."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def init_state(self, batch_size: int, capacity: int) -> Any:
        """The state before the first step. capacity: number of positions that a state which keeps all has room for."""
        ...

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One step: x_t [B, D] and the state to y_t [B, D] and the next state."""
        ...

    def restart(self, state: Any) -> None:
        """Sets a state back to that before the first step, in place."""
        ...

    def state_size(self, length: int) -> int:
        """Elements that must be kept, for one sequence, to continue after `length` steps (complex counts as two)."""
        ...


@runtime_checkable
class Convolution(Protocol):
    """A part of a mixer that convolves every channel with a filter of its own, y = K * x + D x, whatever x is."""

    def kernel(self, length: int) -> Tensor:
        """K [D, length] at the lags 0, 1, ...: the response to an impulse, without the skip D at lag 0."""
        ...


@runtime_checkable
class StateSpace(Protocol):
    """A convolution whose filter is that of a linear state space model."""

    def eigenvalues(self) -> Tensor:
        """The eigenvalues of its state matrix, complex [N] or [D, N], in units of 1 / dt."""
        ...


@runtime_checkable
class HasStepSizes(Protocol):
    """A state space model with learned step sizes dt."""

    log_dt: Tensor
    """Logarithms of the step sizes, of any shape."""


class Stepwise(Protocol):
    """A module that can be evaluated one position after the other."""

    def init_state(self, batch_size: int, capacity: int | None = None) -> Any:
        """The state before the first position. ValueError for a model that reads the future.

        capacity: number of positions that a state which keeps all of them has room for; None: the task's max_length.
        """
        ...

    def restart(self, state: Any) -> None:
        """Sets a state back to that before the first position, in place."""
        ...

    def prefill(
        self, inputs: Tensor, lengths: Tensor | None = None, *, state: Any = None, capacity: int | None = None
    ) -> tuple[Tensor, Any]:
        """Logits [B, num_classes] of the last position of inputs [B, T] or [B, T, C], and the state behind it.

        lengths: [B], 1 to T: positions of each row that are no padding, which stands in front. None: all.
        state: one of `init_state` or after `restart`, changed in place; None: a new one of that capacity.
        """
        ...

    def step(self, inputs_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """inputs_t [B] or [B, C] to logits [B, num_classes] of this position, and the next state."""
        ...


@runtime_checkable
class Model(Stepwise, Protocol):
    """A task-ready network: encoder, mixer layers, readout. A torch module."""

    def __call__(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [B, P, num_classes] at `positions`, or [B, num_classes] for a sequence readout."""
        ...

    def state_size(self, length: int) -> int:
        """Elements that the mixers keep for one sequence after `length` steps."""
        ...

    def at_rate(self, rate: float) -> AbstractContextManager[bool]:
        """A context for inputs sampled at `rate` times the rate trained at; gives whether any step size follows."""
        ...

    def convolutions(self) -> Mapping[str, Convolution]:
        """The convolutions of all layers, by the name of their slice: `layer=0,filter=ssm`."""
        ...

    def param_groups(self, no_decay: tuple[str, ...] = ()) -> list[ParamGroup]:
        """Groups covering every trainable parameter once; `no_decay` names kinds: `bias`, `norm`, `embedding`."""
        ...

    # methods of every torch module that the harness calls

    def to(self, device: torch.device) -> Self: ...

    def train(self, mode: bool = True) -> Self: ...

    def eval(self) -> Self: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def buffers(self) -> Iterator[Tensor]: ...

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> Any: ...


@runtime_checkable
class HasReadout(Protocol):
    """A model with a readout apart from its layers, so that no tensor need hold the logits of all positions.

    `readout(hidden(inputs, positions))` is what the model gives. A model without these methods is trained on its
    logits.
    """

    def hidden(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the readout takes, [B, P, ...], or [...] with one or more rows a sequence for a sequence readout."""
        ...

    def readout(self, hidden: Tensor) -> Tensor:
        """Logits [B, P, num_classes] or [B, num_classes]. For a token readout, each row depends on its own states."""
        ...

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of `readout(hidden)`, a float32 scalar; targets are `IGNORE` where there is no label."""
        ...


class HasWidth(Protocol):
    """Options of a model of one width."""

    @property
    def d_model(self) -> int: ...


@runtime_checkable
class Layered(Protocol):
    """A model that shows its sequence mixers and its width, so that one layer can be timed alone."""

    @property
    def mixers(self) -> Sequence[Mixer]:
        """The sequence mixers in the order of their layers."""
        ...

    @property
    def config(self) -> HasWidth: ...


@runtime_checkable
class ModelConfig(Options, Protocol):
    """The strict configuration of a registered model. `version` is raised whenever its function changes."""

    def check(self, spec: TaskSpec) -> None:
        """Raises ValueError where this model cannot serve that task; called before any run starts."""
        ...

    def build(self, spec: TaskSpec) -> Model: ...
