"""Turns the sections of one point of a grid into a run whose settings are all checked and filled in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from subquad.suite.bench.config import BenchConfig, SpeedConfig, SpeedRun, TimingRun
from subquad.suite.contracts import MissingDataError, ModelConfig, Task, TaskSpec
from subquad.suite.metrics import check_direction
from subquad.suite.options import C, Config, located, parse
from subquad.suite.registry import Entry, Registry, nearest
from subquad.suite.runs import Run
from subquad.suite.store.documents import tokenizer_digest
from subquad.suite.store.weights import find_weights, mark, read_weights, tokenizer_of, without_version
from subquad.suite.training.config import TrainConfig
from subquad.suite.training.run import NO_DATA, TrainingRun, earlier, stage_of


def _plugins(**entries: Entry) -> dict[str, str]:
    return {kind: entry.plugin for kind, entry in entries.items() if entry.plugin}


def _check_tokens(run: TrainingRun, where: str, theirs: Task, data: str | None, tokenizer: str) -> None:
    """Raises ValueError where weights know the ids of a run's tokens as those of other texts.

    theirs, data, tokenizer: the task of the weights, the fingerprint of its data, the digest of its tokenizer file.
    """
    mine = run.task
    if NO_DATA in (run.fingerprint, data) or not (mine.has_text and theirs.has_text):
        return
    if mine.spec.vocab_size != theirs.spec.vocab_size:
        # the embedding has another shape and is not taken
        return
    here = {"options": "", "data": run.fingerprint, "tokenizer": run.tokenizer}[mine.tokens_from]
    there = {"options": "", "data": data, "tokenizer": tokenizer}[theirs.tokens_from]
    # an imported checkpoint keeps nothing about its tokenizer, and neither do older weights
    if (mine.tokens_from, here) == (theirs.tokens_from, there) or (mine.tokens_from == "tokenizer" and not there):
        return
    raise ValueError(
        f"{where}: these weights were trained on the tokens of another vocabulary of {mine.spec.vocab_size}, so their "
        "embedding means other texts; give the task their tokenizer, or another vocab_size for an embedding of its own"
    )


def _no_operators() -> Registry:
    return Registry("operator", {})


def metrics_of(task: Task, spec: TaskSpec) -> list[str]:
    """Names of the metrics that a task gives for every validation row."""
    import torch

    metrics = task.score(torch.zeros(1, spec.num_classes), torch.zeros(1, dtype=torch.long))
    return [*metrics, *task.batch_metrics]


@dataclass(frozen=True)
class Resolver:
    """Turns names into checked configurations, with the tables that it was given.

    operators: names of operators to their workloads.
    data: folder handed to every task that has an option `data`, instead of what the grid says.
    """

    tasks: Registry
    models: Registry
    operators: Registry = field(default_factory=_no_operators)
    data: str | None = None
    without_data: bool = False
    """Plan runs whose data are not there, instead of raising an error; see `Run.is_planned_only`."""
    roots: Sequence[Path] = ()
    """Folders of results that have the weights of runs."""
    _facts: dict[tuple[type[Task], str], tuple[TaskSpec | None, str, str]] = field(default_factory=dict)
    _parsed: dict[tuple[type[Config], str], Config] = field(default_factory=dict)

    def resolve(self, experiment: str, scale: str, tree: Mapping[str, Any], seed: int, where: str) -> Run:
        """One run from its sections. Every fault is a ValueError that begins with `where`."""
        if "bench" in tree:
            return self._timing(experiment, scale, tree, where)
        if "speed" in tree:
            return self._speed(experiment, scale, tree, where)
        return self._training(experiment, scale, tree, seed, where)

    def _timing(self, experiment: str, scale: str, tree: Mapping[str, Any], where: str) -> TimingRun:
        bench = parse(BenchConfig, tree["bench"], f"{where}: bench")
        located(f"{where}: bench.op", lambda: self.operators.load(bench.op))
        entry = self.operators.entries[bench.op]
        run = TimingRun(experiment, scale, bench, entry, plugins=_plugins(operator=entry))
        located(f"{where}: bench", lambda: run.cases)
        return run

    def _speed(self, experiment: str, scale: str, tree: Mapping[str, Any], where: str) -> SpeedRun:
        speed = parse(SpeedConfig, tree["speed"], f"{where}: speed")
        name, model = self._model(tree, where)

        def check() -> None:
            for length in speed.lengths:
                model.check(speed.spec(length))

        located(f"{where}: model {name}", check, type(model).__name__)
        plugins = _plugins(model=self.models.entries[name])
        return SpeedRun(experiment, scale, name, model, speed, plugins=plugins)

    def _training(self, experiment: str, scale: str, tree: Mapping[str, Any], seed: int, where: str) -> TrainingRun:
        task_name, task = self._task(tree, where)
        model_name, model = self._model(tree, where)
        train = self._parse(TrainConfig, tree["train"], f"{where}: train")
        spec, fingerprint, tokenizer = self._facts_of(task, where)
        if spec is not None:
            located(f"{where}: model {model_name}", partial(model.check, spec), type(model).__name__)
            for key, metric in train.metrics.items():
                measured = metrics_of(task, spec)
                if metric not in measured:
                    raise ValueError(
                        f"{where}: train.{key}: {task_name} has no validation metric {metric!r}"
                        f"{nearest(metric, measured)}; there are: {', '.join(measured)}"
                    )
                located(f"{where}: train.{key}", partial(check_direction, metric))
        in_epochs = train.epochs is not None or any(stage.epochs is not None for stage in train.length_warmup)
        if task.fresh and in_epochs and train.epoch_steps is None and task.epoch_rows is None:
            raise ValueError(f"{where}: train.epochs: {task_name} draws fresh data; give steps or epoch_steps")
        if not task.fresh and train.epoch_steps is not None:
            raise ValueError(f"{where}: train.epoch_steps: only for tasks with fresh data; {task_name} has none")
        stages = train.length_warmup
        located(f"{where}: train.length_warmup", lambda: [stage_of(task, train, stage) for stage in stages])
        plugins = _plugins(task=self.tasks.entries[task_name], model=self.models.entries[model_name])
        fields = (experiment, scale, task_name, model_name, task, model, train, seed, fingerprint, plugins)
        return self._started(located(where, lambda: TrainingRun(*fields, tokenizer=tokenizer)), tree, where)

    def _started(self, run: TrainingRun, tree: Mapping[str, Any], where: str) -> TrainingRun:
        """The run with the weights that it starts with, which are part of its identity."""
        where = f"{where}: train.init_from"
        given = run.train.init_from
        if isinstance(given, str):
            start = located(where, lambda: find_weights(given, self.roots))
            settings, _ = read_weights(start)
            theirs = None
            # a task that is not known here, such as that of a plugin, has no text that could be compared
            with contextlib.suppress(ValueError):
                theirs = self._task({"task": without_version(settings["task"])}, where)[1]
            if theirs is not None:
                _check_tokens(run, where, theirs, settings.get("data"), tokenizer_of(start))
            return replace(run, train=run.train.model_copy(update={"init_from": mark(start)}), start=start)
        if given is not None:
            base = self._training(run.experiment, run.scale, earlier(tree, where), run.seed, where)
            _check_tokens(run, where, base.task, base.fingerprint, base.tokenizer)
            known = {**given, "base": base.run_id}
            return replace(run, train=run.train.model_copy(update={"init_from": known}), base=base)
        return run

    def trained(self, tree: Mapping[str, Any], where: str) -> tuple[Task, ModelConfig]:
        """The task and the model of a run from their sections. Every fault is a ValueError that begins with `where`."""
        return self._task(tree, where)[1], self._model(tree, where)[1]

    def _task(self, tree: Mapping[str, Any], where: str) -> tuple[str, Task]:
        given = {} if self.data is None else {"data": self.data}
        return self._part("task", self.tasks, tree, where, given)

    def _model(self, tree: Mapping[str, Any], where: str) -> tuple[str, ModelConfig]:
        return self._part("model", self.models, tree, where, {})

    def _part(
        self,
        kind: Literal["task", "model"],
        registry: Registry,
        tree: Mapping[str, Any],
        where: str,
        given: Mapping[str, Any],
    ) -> tuple[str, Any]:
        """Name and checked configuration of one section. given: options to set wherever they exist."""
        values = {key: value for key, value in tree[kind].items() if key != "name"}
        name = tree[kind].get("name")
        if name is None:
            raise ValueError(f"{where}: {kind}.name: missing; there are: {', '.join(registry)}")
        cls = located(f"{where}: {kind}.name", lambda: registry.load(name))
        values |= {key: value for key, value in given.items() if key in cls.model_fields}
        part = self._parse(cls, values, f"{where}: {kind} {name}")
        base = Task if kind == "task" else ModelConfig
        if not isinstance(part, base):
            raise ValueError(f"{where}: {kind} {name}: its class must derive from suite.contracts.{base.__name__}")
        if kind == "model" and (file := next((key for key, value in part if isinstance(value, Path)), None)):
            raise ValueError(
                f"{where}: model {name}: {file} is a path, and no id of a run has the content of that file; give its "
                "values as options, or weights by train.init_from"
            )
        if getattr(cls, "version", None) is None:
            raise ValueError(
                f"{where}: {kind} {name}: it has no version; write `version: ClassVar[int] = 1` into its class"
            )
        return name, part

    def _parse(self, cls: type[C], values: Mapping[str, Any], where: str) -> C:
        """`parse`, once for equal values, because a grid repeats few sections many times."""
        key = cls, repr(values)
        if key not in self._parsed:
            self._parsed[key] = parse(cls, values, where)
        return cast(C, self._parsed[key])

    def _facts_of(self, task: Task, where: str) -> tuple[TaskSpec | None, str, str]:
        """Spec, data fingerprint, and digest of the tokenizer file of a task; "" without such a file.

        Without data the fingerprint is NO_DATA, and the spec may be None.
        """

        def facts() -> tuple[TaskSpec | None, str, str]:
            try:
                file = getattr(task, "tokenizer", None) if task.tokens_from == "tokenizer" else None
                return task.spec, task.fingerprint(), "" if file is None else tokenizer_digest(file)
            except MissingDataError:
                if not self.without_data:
                    raise
            with contextlib.suppress(MissingDataError):
                return task.spec, NO_DATA, ""
            return None, NO_DATA, ""

        if self.data is not None and str(getattr(task, "data", None)) == self.data:
            where = f"--data {self.data}"
        # a grid repeats few tasks many times, and a fingerprint may read every file of a folder
        key = type(task), task.model_dump_json()
        if key not in self._facts:
            self._facts[key] = located(where, facts)
        return self._facts[key]
