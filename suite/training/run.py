"""A run that trains a model on a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from subquad.suite.contracts import ModelConfig, Task
from subquad.suite.options import parse
from subquad.suite.runs import Run, RunEnded, with_plugins
from subquad.suite.store.weights import mark
from subquad.suite.training.config import Stage, TrainConfig

NO_DATA = "missing"
"""Fingerprint of data that are not there."""


@dataclass(frozen=True)
class TrainingRun(Run):
    """One resolved training run: everything that can move its numbers, and what was built from it."""

    experiment: str
    scale: str
    task_name: str
    model_name: str
    task: Task
    model: ModelConfig
    train: TrainConfig
    seed: int
    fingerprint: str
    """Identity of the task's data when the run was planned."""
    plugins: Mapping[str, str] = field(default_factory=dict)
    base: TrainingRun | None = None
    """The run that is trained first and whose weights this one starts with (`train.init_from`)."""
    start: Path | None = None
    """The file of weights that this run starts with, where it is not that of `base`."""
    processes: int = 1
    tokenizer: str = ""

    def __post_init__(self) -> None:
        if (self.processes > 1 or self.train.micro_batch_size) and getattr(self.model, "norm", "") == "batch":
            raise ValueError(
                "model.norm=batch: its statistics are over all rows of a batch, so the batch cannot be divided; leave "
                "out micro_batch_size and train in one process"
            )
        budget = self.train.budget
        if self.processes > 1 and budget is not None and budget.seconds is not None:
            raise ValueError("train.budget.seconds: it is the time of one device; train in one process, or give flops")
        if self.processes > 1 and self.train.compile:
            raise ValueError("train.compile is for one process; set it to false")
        for key, metric in self.train.metrics.items():
            if self.processes > 1 and metric in self.task.batch_metrics:
                raise ValueError(
                    f"train.{key}={metric}: it is measured on whole batches, which several processes share; name "
                    "another metric, or train in one process"
                )

    def in_processes(self, count: int) -> TrainingRun:
        if self.base is None:
            return replace(self, processes=count)
        base, given = self.base.in_processes(count), self.train.init_from
        assert isinstance(given, dict)
        train = self.train.model_copy(update={"init_from": {**given, "base": base.run_id}})
        return replace(self, processes=count, base=base, train=train)

    def start_beside(self, checkpoint: Path | None) -> Path | None:
        """The file of the weights that the run starts with; None: it starts at random. RunEnded where it is missing."""
        if self.train.init_from is None:
            return None
        start = self.start
        if self.base is not None and checkpoint is not None:
            # the runs of one experiment and scale share a folder
            start = checkpoint.with_name(f"{self.base.run_id}.weights")
        if start is None or not start.exists():
            raise RunEnded("failed", f"train.init_from: there are no weights in {start}")
        if self.start is not None and mark(start) != self.train.init_from:
            # the checkpoint of a run that goes on, for example
            raise RunEnded(
                "failed", f"train.init_from: {start.name} changed since the run was planned; repeat the command"
            )
        return start

    def with_seed(self, seed: int) -> TrainingRun:
        """The same run with another seed. The two share the sections of `resolved`, which are slow to make."""
        other = replace(self, seed=seed)
        other.__dict__["_sections"] = self._sections
        return other

    @cached_property
    def _sections(self) -> dict[str, dict[str, Any]]:
        return {
            "task": {"name": self.task_name, "version": self.task.version, **self.task.model_dump(mode="json")},
            "model": {"name": self.model_name, "version": self.model.version, **self.model.model_dump(mode="json")},
            "train": self.train.model_dump(mode="json"),
        }

    @property
    def resolved(self) -> dict[str, Any]:
        resolved: dict[str, Any] = {**self._sections, "seed": self.seed, "data": self.fingerprint}
        division = {"processes": self.processes, "micro_batch_size": self.train.micro_batch_size}
        if division != {"processes": 1, "micro_batch_size": None} and has_dropout(self.model):
            # every part of a batch draws its own, so the values depend on the parts by more than rounding
            resolved["division"] = division
        return with_plugins(resolved, self.plugins)

    @property
    def imports(self) -> frozenset[str]:
        return super().imports | (frozenset() if self.base is None else self.base.imports)

    @property
    def is_planned_only(self) -> bool:
        return self.fingerprint == NO_DATA or (self.base is not None and self.base.is_planned_only)

    @property
    def title(self) -> str:
        return f"{self.model_name} on {self.task_name}, seed {self.seed}"

    @property
    def columns(self) -> dict[str, Any]:
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


def earlier(tree: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """The sections of the run that `train.init_from` describes, given those of the run that starts with its weights."""
    sections = {section: dict(options) for section, options in tree.items()}
    changes = sections["train"].pop("init_from")
    for section in ("task", "model"):
        if changes.get(f"{section}.name", sections[section].get("name")) != sections[section].get("name"):
            sections[section] = {}
    for key, value in changes.items():
        section, dot, option = key.partition(".")
        if section not in sections or not dot or key == "train.init_from":
            raise ValueError(f"{where}: {key!r}: a dotted key of task, model or train, and not train.init_from")
        sections[section][option] = value
    return sections


def has_dropout(model: ModelConfig) -> bool:
    """Whether a model draws dropout in training: an option whose name ends so is not 0."""
    return any(key.endswith("dropout") and value for key, value in model.model_dump().items())


def stage_of(task: Task, train: TrainConfig, stage: Stage) -> tuple[Task, int]:
    """The task with rows of the stage's length, and the batch size. ValueError for what the task cannot do."""
    if "length" not in type(task).model_fields:
        raise ValueError("the rows of this task have no option `length`; leave the stages out")
    length: int = getattr(task, "length")  # noqa: B009 - an option that only some tasks have
    if stage.length >= length:
        raise ValueError(f"length {stage.length} is not below the task's {length}; the run proper follows by itself")
    shorter = parse(type(task), {**task.model_dump(), "length": stage.length}, f"length {stage.length}")
    # a task that cannot have this length says so when its spec is asked for
    _ = shorter.spec
    if stage.batch_size is not None:
        return shorter, stage.batch_size
    tokens = train.batch_size * length
    if tokens % stage.length:
        raise ValueError(
            f"a batch of {train.batch_size} x {length} tokens holds no whole number of rows of length "
            f"{stage.length}; give the stage a batch_size"
        )
    return shorter, tokens // stage.length
