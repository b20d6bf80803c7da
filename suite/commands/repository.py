"""The `Repository` that the composition root gives to every command, and the options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from suite.config import ExperimentConfig, find_experiments, load_experiment
from suite.contracts import Recorder
from suite.registry import Registry, nearest
from suite.target import target

LOCAL = Path("results/local")
"""Folder of new results, relative to the folder in which the command is called."""
KERNELS = "kernels"
"""The experiment under which `bench` keeps its rows."""
TABLES = "tables"
"""The name under which `report` shows every table and figure of the papers."""


@dataclass(frozen=True)
class Repository:
    """The tables and folders that commands work on. A module that is slow to import stands behind a function."""

    tasks: Registry
    models: Registry
    operators: Registry
    """Names of operators to their workloads."""
    reports: Path
    """Folder of the experiments."""
    reference: Path
    """Folder of the committed results."""
    versions: Callable[[], Mapping[str, int]]
    """Today's version of every operator."""
    recorder: Callable[[], Recorder]
    """Gives the function that records the operators that a run calls."""
    rendering: Callable[[], Any]
    """The module `reports.render`: build, history, render."""
    data: Callable[[], Any]
    """The module `tasks.data`: sources, what is in the cache, downloads."""
    data_rate: Callable[[], Any]
    """The module `tasks.data.rate`: rows per second that a task draws."""
    leakage: Callable[[Any], Mapping[str, int]]
    """Function from a task to the number of inputs that each pair of its splits shares."""

    def experiment(self, name: str) -> tuple[ExperimentConfig, Path]:
        """An experiment and the path of its grid.yaml. ValueError for an unknown one."""
        grids = find_experiments(self.reports)
        if name not in grids:
            raise ValueError(f"unknown experiment {name!r}{nearest(name, grids)}; there are: {', '.join(grids)}")
        return load_experiment(grids[name]), grids[name]

    def experiments(self) -> list[str]:
        """The names of all experiments."""
        return list(find_experiments(self.reports))

    def roots(self, results: Path | None) -> list[Path]:
        """Folders in which stored rows are searched: `results` if given, else the user's own and the committed ones."""
        return [results] if results is not None else [LOCAL, self.reference]


def repository_of(context: typer.Context) -> Repository:
    """The `Repository` that the composition root handed to the command line."""
    repository = context.find_object(Repository)
    assert repository is not None, "the command line was started without a Repository"
    return repository


def shown(path: Path) -> str:
    """A path as the user would write it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _place(text: Any) -> Any:
    """The place of this name. A ValueError of a callback reaches the user in one line, that of a parser does not."""
    return None if text is None else target(text)


ExperimentName = Annotated[
    str, typer.Argument(help="Experiment, e.g. quickstart or h3/table2; see `list experiments`.")
]
OptionalExperimentName = Annotated[
    str | None, typer.Argument(help="Experiment, e.g. quickstart or h3/table2; see `list experiments`.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a value: train.lr=1e-3; repeatable.")]
Results = Annotated[
    Path, typer.Option("--results", parser=str, callback=_place, help="Folder of results; also s3://bucket/folder.")
]
StoredResults = Annotated[
    Path | None,
    typer.Option(
        "--results", parser=str, callback=_place, help="Folder of results; default: yours, or else the reference."
    ),
]
