"""One resolved run of a grid without a sweep, for tests that carry it out."""

from __future__ import annotations

from typing import Any

from subquad.models import MODELS
from subquad.suite.options import parse
from subquad.suite.registry import Registry
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import expand
from subquad.suite.settings.resolver import Resolver
from subquad.suite.training.run import TrainingRun
from subquad.tasks import TASKS

Options = dict[str, Any]


def one_run(
    task: Options, model: Options, train: Options, seed: int = 0, tasks: Registry = TASKS, models: Registry = MODELS
) -> TrainingRun:
    baseline = {"task": task, "model": model, "train": train}
    config = parse(ExperimentConfig, {"title": "one run", "baseline": baseline, "seeds": (seed,)}, "one run")
    (run,) = expand("toy/test", config, Resolver(tasks, models))
    return run
