"""From `grid.yaml` to resolved runs: strict parsing, expansion, identity.

A grid is a baseline plus the axes that change. An axis is a list of values of one dotted key, or a list of mappings
that change several keys together:

    sweep:
      train.lr: [1.0e-3, 1.0e-4]                       # one key
      model:                                           # several keys at a time; the axis name is only a name
        - {model.name: attention, model.position: learned}
        - {model.name: h3}

Order of precedence: baseline, sweep, scale, `--set`. Every run is resolved and checked before the first one starts.

A grid trains (sections task, model, train) or times operators (the one section bench):

    baseline:
      bench: {dtype: bfloat16, lengths: [512, 1024]}
    sweep:
      series:
        - {bench.op: attention, bench.implementation: torch, bench.shape: {B: 1, H: 16, K: 64}}

or times models on random inputs (sections model and speed):

    baseline:
      model: {name: gsa, d_model: 2048}
      speed: {measure: train, lengths: [2048], tokens: 16384}
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from suite.bench.cases import Case, series
from suite.contracts import Config, TaskSpec
from suite.registry import Registry, nearest
from suite.strict import check_finite

SECTIONS = ("task", "model", "train")
"""Of a grid that trains."""
BENCH = ("bench",)
"""Of a grid that times operators."""
SPEED = ("model", "speed")
"""Of a grid that times models."""


class EarlyStop(Config):
    """Stop when validation `metric` reaches `threshold`, or has not improved for `patience` evaluations."""

    metric: str = "accuracy"
    threshold: float | None = None
    patience: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_a_rule(self) -> EarlyStop:
        if self.threshold is None and self.patience is None:
            raise ValueError("early_stop needs threshold or patience (or both)")
        return self


class Stage(Config):
    """A part of the run on shorter rows, before the run proper. Exactly one of `steps` and `epochs` is given."""

    length: int = Field(ge=1)
    """The task's option `length` meanwhile."""
    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    """Every row of this length once; of a task without a number of rows, `epoch_steps` at every length."""
    batch_size: int | None = Field(default=None, ge=1)
    """None: as many tokens a batch as at the full length."""

    @model_validator(mode="after")
    def _one_budget(self) -> Stage:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give exactly one of steps and epochs, got steps={self.steps}, epochs={self.epochs}")
        return self


class KernelProbe(Config):
    """What is recorded of the filters that a model's layers convolve with, before the first step and after the last.

    Nothing of it changes the training. What is meant by each row stands in `suite/learned_kernels.py`.
    """

    lags: int = Field(default=1024, ge=1)
    """Lags of a recorded kernel, from 0 on."""
    points: int = Field(default=128, ge=1)
    """Recorded values of a kernel, each the largest of lags / points neighbours."""
    channels: int = Field(default=32, ge=1)
    """Recorded kernels of a filter, evenly spaced over its channels; whatever is a share is one of all channels."""
    near: int = Field(default=128, ge=1)
    """Lags below this count as near. DSS, sections 4.1 and 4.2, cuts kernels there."""

    @model_validator(mode="after")
    def _equal_spans(self) -> KernelProbe:
        if self.lags % self.points:
            raise ValueError(f"points={self.points} does not divide lags={self.lags}; change one of them")
        return self


class TrainConfig(Config):
    """How AdamW optimises a run. Exactly one of `steps` and `epochs` sets the budget."""

    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    epoch_steps: int | None = Field(default=None, ge=1)
    """Steps an epoch, for tasks with fresh data that do not say how many rows are one (a finite split sets its own)."""
    length_warmup: tuple[Stage, ...] = ()
    """Stages of growing length before `steps` or `epochs`, which are those at the full length. Schedule and warm-up of
    the rate span all of them. Source: HyenaDNA (Nguyen et al. 2023), section 3.3; Mamba, appendix E.3.3."""
    batch_size: int = Field(default=32, ge=1)
    eval_batch_size: int | None = Field(default=None, ge=1)
    """None: `batch_size`."""
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    no_decay: tuple[Literal["bias", "norm", "embedding"], ...] = ()
    """Kinds of parameters without weight decay. State-space parameters never have any."""
    schedule: Literal["constant", "cosine", "linear", "plateau"] = "constant"
    """After the warm-up: stay, cosine or line to `min_lr`, or times `plateau_factor` when validation stalls."""
    schedule_unit: Literal["step", "epoch"] = "step"
    """`epoch`: the rate changes only between epochs, as where a scheduler is stepped once an epoch."""
    warmup_steps: int = Field(default=0, ge=0)
    warmup_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Of all steps; used where warmup_steps is 0."""
    warmup_from: float = Field(default=0.0, ge=0)
    """The rate at step 0 of the warm-up, a linear ramp to `lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    plateau_factor: float = Field(default=0.2, gt=0, lt=1)
    plateau_patience: int = Field(default=20, ge=1)
    plateau_metric: str = "accuracy"
    clip: float | None = Field(default=None, gt=0)
    """Largest norm of the whole gradient."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """bf16: autocast with fp32 parameters; tf32: fp32 with TF32 matrix products."""
    deterministic: bool = False
    compile: bool = False
    """Fuse the forward and backward pass with torch.compile: tens of seconds once, fewer and longer kernels after."""
    shuffle: bool = True
    """False: rows in their stored order, segment by segment, the same every epoch."""
    eval_every: int | None = Field(default=None, ge=1)
    """In epochs or steps, whichever sets the budget. None: ten times in a run."""
    early_stop: EarlyStop | None = None
    keep: Literal["last", "best"] = "last"
    """Which weights the test split sees: those of the last step, or of the best validation `keep_metric`."""
    keep_metric: str = "accuracy"
    record_kernels: KernelProbe | None = None
    """Record the filters that the layers have learnt."""

    @model_validator(mode="after")
    def _one_budget(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give exactly one of steps and epochs, got steps={self.steps}, epochs={self.epochs}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}; lower it")
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("give warmup_steps or warmup_fraction, not both")
        lengths = [stage.length for stage in self.length_warmup]
        if lengths != sorted(set(lengths)):
            raise ValueError(f"length_warmup: the lengths must grow, got {', '.join(map(str, lengths))}")
        if lengths and self.schedule_unit == "epoch":
            raise ValueError("length_warmup: its epochs differ in length; take schedule_unit: step")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_off(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # runs without these keep the id they had before there were any
        values: dict[str, Any] = handler(self)
        return {k: v for k, v in values.items() if v or k not in ("length_warmup", "record_kernels")}


class BenchConfig(Config):
    """One implementation of an operator, timed over a sweep of lengths. What `shape` may hold is the operator's."""

    op: str
    implementation: str
    shape: dict[str, int | str]
    """Sizes by their letter and named variants, without T: `{B: 1, D: 1024, N: 16, form: core}`."""
    lengths: tuple[int, ...] = Field(min_length=1)
    """T, one timing each."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    backward: bool = False
    """Forward and backward together, as a training step pays for them."""


class SpeedConfig(Config):
    """What is timed of a model over a sweep of lengths, on random inputs: nothing is learned, only sizes matter."""

    measure: Literal["layer", "train", "decode"]
    """`layer`: forward and backward of the first sequence mixer; `train`: a training step of the whole model; `decode`:
    one more token behind a prefix of each length."""
    lengths: tuple[int, ...] = Field(min_length=1)
    batch_size: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    """Of a batch, over all its sequences, in place of batch_size."""
    precision: Literal["fp32", "tf32", "bf16"] = "bf16"
    """bf16: autocast with fp32 parameters; where tokens are decoded, bf16 weights of linear maps and embeddings."""
    attention: Literal["fused", "unfused"] = "fused"
    """`unfused`: torch's attention forms the matrix of all pairs, as a transformer did before FlashAttention."""
    input: Literal["tokens", "signal"] = "tokens"
    vocab_size: int = Field(default=256, ge=1)
    channels: int = Field(default=1, ge=1)
    """Of a signal."""
    readout: Literal["token", "sequence"] = "token"
    num_classes: int | None = Field(default=None, ge=1)
    """None: vocab_size."""

    @model_validator(mode="after")
    def _sizes(self) -> SpeedConfig:
        if (self.batch_size is None) == (self.tokens is None):
            raise ValueError(f"give one of batch_size and tokens, got {self.batch_size} and {self.tokens}")
        if min(self.lengths) < 1 or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"lengths are 1 or more and different, got {', '.join(map(str, self.lengths))}")
        for length in self.lengths:
            if self.tokens is not None and self.tokens % length:
                raise ValueError(f"tokens={self.tokens} is no multiple of the length {length}; change one of them")
        if self.measure == "decode" and (self.input, self.readout) != ("tokens", "token"):
            raise ValueError(f"measure=decode needs tokens in and out, got {self.input} and readout={self.readout}")
        return self

    def batch(self, length: int) -> int:
        """Sequences of one length in a batch."""
        return self.batch_size if self.tokens is None else self.tokens // length  # type: ignore[return-value]

    def spec(self, length: int) -> TaskSpec:
        """What a model is built for."""
        return TaskSpec(
            self.input,
            num_classes=self.num_classes or self.vocab_size,
            readout=self.readout,
            # the token behind the prefix is one more
            max_length=length + (self.measure == "decode"),
            vocab_size=self.vocab_size if self.input == "tokens" else 0,
            channels=self.channels if self.input == "signal" else 0,
        )


class Select(Config):
    """Which of several runs a table shows, e.g. the best learning rate by validation accuracy."""

    best_of: tuple[str, ...]
    by: str = "accuracy"
    split: Literal["train", "valid", "test"] = "valid"


class TableSpec(Config):
    """How stored rows become the paper's table. A selector maps dotted keys of a run to the value they must have."""

    rows: dict[str, dict[str, Any]]
    """Row label, as in expected.csv, to a selector."""
    columns: dict[str, dict[str, Any]]
    """Column label to a selector; `slice`, `metric` and `split` may stand in it too."""
    metric: str = "accuracy"
    split: str = "test"
    percent: bool = True
    """Show fractions as percentages, as the papers do."""
    decimals: int | None = Field(default=None, ge=0)
    """None: as many as the paper prints, at least one."""
    tolerance: float = Field(default=1.0, ge=0)
    """A cell agrees with the paper if it differs by no more than this, in the shown unit."""


class FigureSpec(Config):
    """The figure the paper shows, drawn from the same rows as the table."""

    kind: Literal["lines", "bars", "kernels"]
    """`kernels`: what `train.record_kernels` recorded, a panel for every row of the table; it takes no other option."""
    x: str = ""
    """A dotted key (`model.d_model`), or `slice.length` for a part of the slice name, or `step`, or `column`."""
    x_label: str = ""
    x_log2: bool = False
    y: str = "accuracy"
    y_label: str = ""
    y_log10: bool = False
    split: str = "test"
    percent: bool = True
    panels: str | None = None
    """A dotted key: one panel for each of its values."""

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> FigureSpec:
        if (self.kind == "kernels") == bool(self.x):
            raise ValueError(f"x: a figure of kind {self.kind} {'has none' if self.x else 'needs one'}, got {self.x!r}")
        return self


class Source(Config):
    """Where the numbers were published."""

    paper: str
    table: str | int | None = None
    figure: str | int | None = None
    section: str | None = None


class ExperimentConfig(Config):
    """One `grid.yaml`."""

    title: str
    source: Source | None = None
    baseline: dict[str, dict[str, Any]]
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    select: Select | None = None
    scales: dict[str, dict[str, Any]] = Field(default={"paper": {}})
    """Name to overrides; `seeds` and `sweep` may stand there too. The first is the default, only `paper` unreduced."""
    table: TableSpec | None = None
    figure: FigureSpec | None = None

    @property
    def sections(self) -> tuple[str, ...]:
        """What its dotted keys start with."""
        if "speed" in self.baseline:
            return SPEED
        return BENCH if "bench" in self.baseline else SECTIONS

    @property
    def timed(self) -> bool:
        """Whether it times operators or models instead of training."""
        return self.sections != SECTIONS


def epoch_rows(task: Any) -> int | None:
    """Rows an epoch of a task with fresh data, or None where it has no such number."""
    rows: int | None = getattr(task, "epoch_rows", None)
    return rows


def stage_of(task: Any, train: TrainConfig, stage: Stage) -> tuple[Any, int]:
    """The task with rows of the stage's length, and the batch size. ValueError for what the task cannot do."""
    if "length" not in type(task).model_fields:
        raise ValueError("the rows of this task have no option `length`; leave the stages out")
    if stage.length >= task.length:
        raise ValueError(
            f"length {stage.length} is not below the task's {task.length}; the run proper follows by itself"
        )
    shorter = parse(type(task), {**task.model_dump(), "length": stage.length}, f"length {stage.length}")
    _ = shorter.spec
    if stage.batch_size is not None:
        return shorter, stage.batch_size
    tokens = train.batch_size * task.length
    if tokens % stage.length:
        raise ValueError(
            f"a batch of {train.batch_size} x {task.length} tokens holds no whole number of rows of length "
            f"{stage.length}; give the stage a batch_size"
        )
    return shorter, tokens // stage.length


@dataclass(frozen=True)
class Run:
    """One resolved run: everything that can move its numbers, and what was built from it."""

    experiment: str
    scale: str
    task_name: str
    model_name: str
    task: Any
    model: Any
    train: TrainConfig
    seed: int
    fingerprint: str

    @property
    def resolved(self) -> dict[str, Any]:
        """Defaults filled in, versions and data fingerprint included: what the run_id is the hash of."""
        return {
            "task": {"name": self.task_name, "version": self.task.version, **self.task.model_dump(mode="json")},
            "model": {"name": self.model_name, "version": self.model.version, **self.model.model_dump(mode="json")},
            "train": self.train.model_dump(mode="json"),
            "seed": self.seed,
            "data": self.fingerprint,
        }

    @property
    def run_id(self) -> str:
        return identity(self.resolved)

    @property
    def title(self) -> str:
        return f"{self.model_name} on {self.task_name}, seed {self.seed}"

    @property
    def columns(self) -> dict[str, Any]:
        """What its rows say of it, besides how and where it ran."""
        return {
            "task": self.task_name,
            "task_version": self.task.version,
            "model": self.model_name,
            "model_version": self.model.version,
            "stand_in": self.task.stand_in,
            "split_policy": self.task.split_policy,
            "precision": self.train.precision,
            "deterministic": self.train.deterministic,
        }


@dataclass(frozen=True)
class TimingRun:
    """One resolved series of timings: an operator in one implementation over its lengths, with its workload."""

    experiment: str
    scale: str
    bench: BenchConfig
    workload: Any
    seed: int = 0
    """Its inputs are the same in every run."""

    @property
    def resolved(self) -> dict[str, Any]:
        """As that of `Run`, with the version of the workload."""
        return {"bench": {"version": self.workload.version, **self.bench.model_dump(mode="json")}}

    @property
    def run_id(self) -> str:
        return identity(self.resolved)

    @property
    def cases(self) -> list[Case]:
        """One for each length. ValueError for what the operator does not have."""
        bench = self.bench
        return series(self.workload, bench.implementation, bench.shape, bench.lengths, bench.dtype, bench.backward)

    @property
    def title(self) -> str:
        direction = "forward+backward" if self.bench.backward else "forward"
        return f"{self.bench.op} {self.bench.implementation}, {direction}"

    @property
    def columns(self) -> dict[str, Any]:
        """As those of `Run`: the operator for the task and the implementation for the model, as in `bench`."""
        return {
            "task": self.bench.op,
            "task_version": self.workload.version,
            "model": self.bench.implementation,
            "stand_in": "",
            "split_policy": "",
            "precision": self.bench.dtype,
        }


@dataclass(frozen=True)
class SpeedRun:
    """One resolved series of timings of a model over its lengths."""

    experiment: str
    scale: str
    model_name: str
    model: Any
    speed: SpeedConfig
    seed: int = 0
    """Its inputs are random and their values of no account."""
    version: ClassVar[int] = 1
    """Raised whenever something else is timed under the same options."""

    @property
    def resolved(self) -> dict[str, Any]:
        """As that of `Run`."""
        return {
            "model": {"name": self.model_name, "version": self.model.version, **self.model.model_dump(mode="json")},
            "speed": {"version": self.version, **self.speed.model_dump(mode="json")},
        }

    @property
    def run_id(self) -> str:
        return identity(self.resolved)

    @property
    def title(self) -> str:
        return f"{self.model_name}, {self.speed.measure}"

    @property
    def columns(self) -> dict[str, Any]:
        """As those of `Run`, what is measured for the task."""
        return {
            "task": self.speed.measure,
            "task_version": self.version,
            "model": self.model_name,
            "model_version": self.model.version,
            "stand_in": "",
            "split_policy": "",
            "precision": self.speed.precision,
        }


AnyRun = Run | TimingRun | SpeedRun


def identity(resolved: Mapping[str, Any]) -> str:
    """The first 16 hex digits of the SHA-256 of the canonical JSON, machine paths left out."""
    if "task" in resolved:
        task = {key: value for key, value in resolved["task"].items() if key != "data"}
        resolved = {**resolved, "task": task}
    text = json.dumps(resolved, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _problem(error: ValidationError, cls: type[Config]) -> str:
    """The first problem pydantic found, in one line, in the user's words."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = cls.model_fields
        return f"{key}: unknown key{nearest(str(first['loc'][-1]), names)}; there are: {', '.join(names)}"
    if first["type"] == "missing":
        return f"{key}: missing"
    if first["type"] == "finite_number":
        return f"{key}: expected a finite number, got {first['input']}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message}, got {first['input']!r}"


def parse(cls: type[Config], values: Mapping[str, Any], where: str) -> Any:
    """`cls(**values)`, with a one-line ValueError that says where the fault stands."""
    try:
        return cls(**values)
    except ValidationError as error:
        raise ValueError(f"{where}: {_problem(error, cls)}") from None
    except TypeError as error:
        raise ValueError(f"{where}: keys must be words: {error}") from None


class _Loader(yaml.SafeLoader):
    """The safe loader, with numbers as in YAML 1.2: `1e3` is one, where YAML 1.1 reads a word."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_yaml(text: str) -> Any:
    """The value behind a YAML text. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def load_experiment(path: Path) -> ExperimentConfig:
    """Reads and checks one grid.yaml."""
    try:
        values = read_yaml(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping with title, baseline, ...; got {type(values).__name__}")
    return parse(ExperimentConfig, values, str(path))


def check_sections(config: ExperimentConfig, where: str) -> None:
    """Raises ValueError for a section of the baseline that is none, or one of another kind of grid."""
    for section in config.baseline:
        if section in config.sections:
            continue
        if section in (*SECTIONS, *BENCH, *SPEED):
            kind = "speed times models" if config.sections == SPEED else "bench times operators"
            raise ValueError(f"{where}: baseline.{section}: a grid with {kind} and trains nothing")
        raise ValueError(
            f"{where}: baseline.{section}: unknown section{nearest(section, (*SECTIONS, *BENCH, *SPEED))}; "
            f"there are: {', '.join(SECTIONS)}; or {' and '.join(SPEED)}; or {BENCH[0]} alone"
        )


def assignment(text: str, flag: str) -> tuple[str, Any]:
    """`train.lr=1e-3` as a dotted key and a YAML value."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{flag} {text!r}: expected section.key=value, e.g. train.lr=1e-3")
    try:
        parsed = read_yaml(value)
    except yaml.YAMLError:
        raise ValueError(f"{flag} {text!r}: the value is not valid YAML") from None
    check_finite(parsed, f"{flag} {text!r}: ")
    return key.strip(), parsed


def _assign(tree: dict[str, dict[str, Any]], key: str, value: Any, where: str) -> None:
    section, dot, name = key.partition(".")
    if section not in tree or not dot:
        raise ValueError(f"{where}: {key!r}: a dotted key starts with {', '.join(tree)}{nearest(section, tree)}")
    tree[section][name] = value


def _axis(name: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    return [value if isinstance(value, Mapping) else {name: value} for value in values]  # type: ignore[misc]


def lookup(resolved: Mapping[str, Any], key: str) -> Any:
    """The value behind a dotted key (`train.lr`, `task.train.0.length`), or None where there is none."""
    value: Any = resolved
    for part in key.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, (list, tuple)) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def same(wanted: Any, found: Any) -> bool:
    """Whether a value from a grid or a filter means the value of a resolved run, which has defaults filled in.

    A mapping means every mapping that has its keys and values; `true` is not 1; a list and a tuple are alike.
    """
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(same(value, found.get(key)) for key, value in wanted.items())
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(found, (list, tuple))
            and len(wanted) == len(found)
            and all(same(a, b) for a, b in zip(wanted, found, strict=True))
        )
    return isinstance(wanted, bool) == isinstance(found, bool) and bool(wanted == found)


@dataclass(frozen=True)
class Resolver:
    """Turns names into checked configurations, with the tables it was given.

    data: folder handed to every task that reads one (that has an option `data`), over what the grid says.
    """

    tasks: Registry
    models: Registry
    operators: Registry = field(default_factory=lambda: Registry("operator", {}))
    """Names of operators to their workloads."""
    data: str | None = None
    _specs: dict[str, Any] = field(default_factory=dict)

    def resolve(self, experiment: str, scale: str, tree: Mapping[str, Any], seed: int, where: str) -> AnyRun:
        """One run from its sections; every fault is a ValueError that starts with `where`."""
        if "bench" in tree:
            bench = parse(BenchConfig, tree["bench"], f"{where}: bench")
            workload = _at(f"{where}: bench.op", lambda: self.operators.load(bench.op))
            timing = TimingRun(experiment, scale, bench, workload)
            _at(f"{where}: bench", lambda: timing.cases)
            return timing
        if "speed" in tree:
            speed = parse(SpeedConfig, tree["speed"], f"{where}: speed")
            name, model = self._part("model", tree, where)
            for length in speed.lengths:
                _at(where, lambda: model.check(speed.spec(length)))  # noqa: B023 - called at once
            return SpeedRun(experiment, scale, name, model, speed)
        _, task = self._part("task", tree, where)
        _, model = self._part("model", tree, where)
        train = parse(TrainConfig, tree["train"], f"{where}: train")
        spec, fingerprint = self._facts(task, where)
        _at(where, lambda: model.check(spec))
        epochs = train.epochs is not None or any(stage.epochs is not None for stage in train.length_warmup)
        if task.fresh and epochs and train.epoch_steps is None and epoch_rows(task) is None:
            raise ValueError(
                f"{where}: train.epochs: {tree['task']['name']} draws fresh data; give steps or epoch_steps"
            )
        if not task.fresh and train.epoch_steps is not None:
            raise ValueError(
                f"{where}: train.epoch_steps: only for tasks with fresh data; {tree['task']['name']} has none"
            )
        _at(f"{where}: train.length_warmup", lambda: [stage_of(task, train, stage) for stage in train.length_warmup])
        return Run(
            experiment, scale, tree["task"]["name"], tree["model"]["name"], task, model, train, seed, fingerprint
        )

    def _part(self, kind: Literal["task", "model"], tree: Mapping[str, Any], where: str) -> tuple[str, Any]:
        """Name and checked configuration of the task or the model."""
        registry = self.tasks if kind == "task" else self.models
        values = {key: value for key, value in tree[kind].items() if key != "name"}
        name = tree[kind].get("name")
        if name is None:
            raise ValueError(f"{where}: {kind}.name: missing; there are: {', '.join(registry)}")
        cls = _at(f"{where}: {kind}.name", lambda: registry.load(name))
        if kind == "task" and self.data is not None and "data" in cls.model_fields:
            values["data"] = self.data
        return name, parse(cls, values, f"{where}: {kind} {name}")

    def _facts(self, task: Any, where: str) -> tuple[Any, str]:
        # a grid repeats few tasks many times, and a fingerprint may read every file of a folder
        key = task.model_dump_json() + type(task).__qualname__
        if key not in self._specs:
            self._specs[key] = _at(where, lambda: (task.spec, task.fingerprint()))
        return self._specs[key]


def _at(where: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def expand(
    name: str,
    config: ExperimentConfig,
    resolver: Resolver,
    *,
    scale: str | None = None,
    only: Sequence[str] = (),
    overrides: Sequence[str] = (),
    num_seeds: int | None = None,
    where: str = "grid.yaml",
) -> list[AnyRun]:
    """All runs of an experiment at one scale, resolved and checked, in grid order.

    only: `key=value` filters on the resolved run; several of one key are alternatives.
    overrides: `key=value` settings that win over the grid.
    num_seeds: 0, 1, ..., num_seeds - 1 instead of the grid's own seeds.
    """
    scale = scale or next(iter(config.scales))
    if scale not in config.scales:
        raise ValueError(
            f"{where}: unknown scale {scale!r}{nearest(scale, config.scales)}; there are: {', '.join(config.scales)}"
        )
    scaled = dict(config.scales[scale])
    narrowed = scaled.pop("sweep", {})
    seeds = tuple(scaled.pop("seeds", config.seeds))
    if num_seeds is not None:
        seeds = tuple(range(num_seeds))
    for axis in narrowed:
        if axis not in config.sweep:
            raise ValueError(f"{where}: scales.{scale}.sweep: unknown axis {axis!r}{nearest(axis, config.sweep)}")
    sweep = {**config.sweep, **narrowed}
    check_sections(config, where)
    if config.timed and seeds != (0,):
        raise ValueError(f"{where}: seeds: timings have none, their inputs are always the same; leave out --seeds")
    settings = [assignment(text, "--set") for text in overrides]
    filters: dict[str, list[Any]] = {}
    for text in only:
        key, value = assignment(text, "--only")
        filters.setdefault(key, []).append(value)

    runs = []
    seen: dict[str, list[Any]] = {key: [] for key in filters}
    for point in itertools.product(*(_axis(axis, values) for axis, values in sweep.items())):
        tree: dict[str, dict[str, Any]] = {s: dict(config.baseline.get(s, {})) for s in config.sections}
        for change in point:
            for key, value in change.items():
                _assign(tree, key, value, f"{where}: sweep")
        for key, value in scaled.items():
            _assign(tree, key, value, f"{where}: scales.{scale}")
        for key, value in settings:
            _assign(tree, key, value, "--set")
        # what is left out by name is not resolved: its data need not be here
        named = {key: lookup(tree, key) for key in ("task.name", "model.name") if key in filters}
        if any(found is not None and found not in filters[key] for key, found in named.items()):
            for key, found in named.items():
                seen[key].append(found)
            continue
        for seed in seeds:
            run = resolver.resolve(name, scale, tree, seed, where)
            values = {key: lookup(run.resolved, key) for key in filters}
            for key, value in values.items():
                seen[key].append(value)
            if all(any(same(value, values[key]) for value in wanted) for key, wanted in filters.items()):
                runs.append(run)
    for key, wanted in filters.items():
        for value in wanted:
            if not any(same(value, found) for found in seen[key]):
                there_are = sorted(set(map(str, seen[key])))
                raise ValueError(
                    f"--only {key}={value}: no run has it{nearest(str(value), there_are)}; "
                    f"there are: {', '.join(there_are)}"
                )
    if not runs:
        raise ValueError(f"--only {' '.join(only)}: no run satisfies all of them")
    return list({run.run_id: run for run in runs}.values())


def find_experiments(folder: Path) -> dict[str, Path]:
    """Experiment name (its folder below `reports/`) to its grid.yaml."""
    return {str(path.parent.relative_to(folder)): path for path in sorted(folder.rglob("grid.yaml"))}


def iter_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from iter_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
