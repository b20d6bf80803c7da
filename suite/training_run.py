"""A run that trains a model on a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.contracts import Config, EndlessEpochs, ModelConfig, Resizable, Task
from suite.parsing import parse
from suite.runs import Report, Run, Stop, Worker, never, with_plugins
from suite.train_config import Stage, TrainConfig

if TYPE_CHECKING:
    import torch


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

    @property
    def resolved(self) -> dict[str, Any]:
        resolved = {
            "task": {"name": self.task_name, "version": self.task.version, **self.task.model_dump(mode="json")},
            "model": {"name": self.model_name, "version": self.model.version, **self.model.model_dump(mode="json")},
            "train": self.train.model_dump(mode="json"),
            "seed": self.seed,
            "data": self.fingerprint,
        }
        return with_plugins(resolved, self.plugins)

    @property
    def is_planned_only(self) -> bool:
        return self.fingerprint == NO_DATA

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

    def worker(
        self, device: torch.device, *, checkpoint: Path | None = None, report: Report | None = None, stop: Stop = never
    ) -> Worker:
        from suite.trainer import Trainer

        return Trainer(self, device, checkpoint=checkpoint, report=report, stop=stop)


def epoch_rows(task: Task) -> int | None:
    """Rows an epoch of a task with fresh data, or None where it has no such number."""
    return task.epoch_rows if isinstance(task, EndlessEpochs) else None


def stage_of(task: Task, train: TrainConfig, stage: Stage) -> tuple[Task, int]:
    """The task with rows of the stage's length, and the batch size. ValueError for what the task cannot do."""
    assert isinstance(task, Config)
    if not (isinstance(task, Resizable) and "length" in type(task).model_fields):
        raise ValueError("the rows of this task have no option `length`; leave the stages out")
    if stage.length >= task.length:
        raise ValueError(
            f"length {stage.length} is not below the task's {task.length}; the run proper follows by itself"
        )
    shorter = parse(type(task), {**task.model_dump(), "length": stage.length}, f"length {stage.length}")
    # a task that cannot have this length says so when its spec is asked for
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
