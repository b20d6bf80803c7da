"""The `Repository` that the composition root gives to every command, and the options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from subquad.suite.commands.console import skipped
from subquad.suite.contracts import Recorder
from subquad.suite.plugins import load_plugins
from subquad.suite.registry import Registry, nearest
from subquad.suite.settings.config import ExperimentConfig, find_experiments, load_experiment
from subquad.suite.store.target import is_folder, target

if TYPE_CHECKING:
    from subquad.suite.store.rows import Selection

LOCAL = Path("results/local")
"""Folder of new results, relative to the folder in which the command is called."""
KERNELS = "kernels"
"""The experiment under which `bench` keeps its rows."""
ARENA = "arena"
"""The name under which `report` shows the operators beside other projects'."""
TABLES = "tables"
"""The name under which `report` shows every table and figure of the papers."""


class Experiment(NamedTuple):
    """One experiment."""

    name: str
    """Its folder below `reports`, or the last part of its path if it lies elsewhere."""
    config: ExperimentConfig
    path: Path
    """Its grid.yaml."""

    @property
    def rows(self) -> str:
        """The name of the experiment under which its rows are stored: its own, or that of the one that it reads."""
        return (PurePosixPath(self.name).parent / self.config.reads).as_posix() if self.config.reads else self.name


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
    """Folder of the committed results: that of the checkout, or in the cache, where `pull` puts them."""
    submissions: Path
    """Folder of the mixers that others have submitted (`suite.submissions`)."""
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
    checkpoints: Callable[[], Any]
    """The module `models.checkpoints`: public layouts of weights."""
    token_task: Callable[[int, int], dict[str, Any]]
    """Settings of a task on tokens, given the size of the vocabulary and the longest sequence."""
    pull: Callable[..., Path] | None = None
    """Brings the committed results and the submissions of an installed wheel into the cache; None in a checkout."""

    def with_plugins(self, names: Iterable[str]) -> Repository:
        """This repository with the tasks, models and operators of plugins beside its own (`suite.plugins`)."""
        found = self
        for plugin in load_plugins(names):
            by = f"--plugin {plugin.name}"
            found = replace(
                found,
                tasks=found.tasks.extended(plugin.entries["task"], by),
                models=found.models.extended(plugin.entries["model"], by),
                operators=found.operators.extended(plugin.entries["operator"], by),
            )
        return found

    def experiment(self, name: str) -> Experiment:
        """An experiment by its name, or by the path of a folder that holds a grid.yaml. ValueError for an unknown one.

        The word `plugins` among the values of `model.name` or `task.name` in a sweep stands for the names of plugins.
        """
        return self._experiment(name, find_experiments(self.reports))

    def every_experiment(self, paper: str = "", words: Sequence[str] = ()) -> list[Experiment]:
        """All experiments, or those of a paper, from one walk through their folder.

        words: leave out grids whose text has none of these, unread, since to read all takes a quarter of a second.
        """
        grids = find_experiments(self.reports)
        chosen = [name for name in grids if name.startswith(paper and f"{paper}/")]
        if words:
            texts = {name: grids[name].read_text(encoding="utf-8", errors="replace") for name in chosen}
            chosen = [name for name in chosen if any(word in texts[name] for word in words)]
        return [self._experiment(name, grids) for name in chosen]

    def _experiment(self, name: str, grids: Mapping[str, Path]) -> Experiment:
        path = grids.get(name, Path(name, "grid.yaml"))
        if Path(name).name == path.name and Path(name).is_file():
            raise ValueError(f"{name} is a file; give its folder, {Path(name).parent}")
        if not path.is_file():
            if part := [known for known in grids if known.startswith(f"{name.rstrip('/')}/")]:
                raise ValueError(f"{name!r} has several experiments; name one of: {', '.join(part)}")
            if Path(name).is_dir():
                raise ValueError(f"{name}: the folder has no grid.yaml; `list experiments` names those of the suite")
            known = "`list experiments` names all of them"
            raise ValueError(
                f"unknown experiment {name!r}{nearest(name, grids)}, and no folder with a grid.yaml; {known}"
            )
        if name not in grids:
            name = next((known for known, grid in grids.items() if grid.samefile(path)), path.resolve().parent.name)
            if name in grids and not grids[name].samefile(path):
                raise ValueError(f"{path}: its rows would mix with those of the experiment {name!r}; rename the folder")
        plugins = {
            f"{registry.kind}.name": [key for key, entry in registry.entries.items() if entry.plugin]
            for registry in (self.tasks, self.models)
        }
        return Experiment(name, load_experiment(path, plugins), path)

    def experiments(self) -> list[str]:
        """The names of all experiments."""
        return list(find_experiments(self.reports))

    @property
    def unfetched(self) -> str:
        """A clause that says how to get the committed results, where an installation has not fetched them; else ""."""
        there = self.pull is None or self.reference.is_dir()
        return "" if there else "; the committed rows are not on this machine: `subquad results pull` fetches them"

    def require_reference(self, what: str) -> None:
        """Raises ValueError, with the words that name what is wanted in front, where committed results are not here."""
        if self.unfetched:
            raise ValueError(f"{what}: no rows of yours{self.unfetched}")

    def roots(self, results: Path | None) -> list[Path]:
        """Folders in which stored rows are searched: `results` if given, else the user's own and the committed ones."""
        return [results] if results is not None else [LOCAL, self.reference]

    def files(self, experiment: str, results: Path | None) -> list[Path]:
        """Files with the rows of an experiment, of one folder: `results`, or the user's own, or else the committed.

        ValueError where these would be the committed ones, and an installation has not fetched them.
        """
        from subquad.suite.store import storage

        found = next((found for root in self.roots(results) if (found := storage.files([root], experiment))), [])
        if not found and (grid := find_experiments(self.reports).get(experiment)) is not None:
            rows = Experiment(experiment, load_experiment(grid), grid).rows
            if rows != experiment:
                return self.files(rows, results)
        if not found and results is None and self.unfetched and experiment in (KERNELS, *self.experiments()):
            self.require_reference(experiment)
        return found

    def selection(self, names: Sequence[str], results: Path | None, only: Sequence[str]) -> Selection:
        """The rows of experiments, or of folders with results, that satisfy filters. ValueError where there are none.

        An experiment is named as for `experiment`; `kernels` stands for the rows of `bench`.
        """
        from subquad.suite.store import storage
        from subquad.suite.store.rows import Selection

        paths: dict[Path, None] = {}
        for name in names:
            folder = target(name)
            known = name == KERNELS or name in self.experiments() or (folder / "grid.yaml").is_file()
            if not known and is_folder(folder):
                found = storage.files_below(folder)
            else:
                found = self.files(name if name == KERNELS else self.experiment(name).name, results)
            if not found:
                where = f"below {results}" if results else "stored"
                raise ValueError(f"{name}: no rows {where}; `run` and `bench` make them, `status` shows what is to do")
            paths.update(dict.fromkeys(found))
        return Selection(list(paths), only, skip=skipped)


def repository_of(context: typer.Context, plugins: Iterable[str] | None = None) -> Repository:
    """The `Repository` that the composition root handed to the command line, with the names of plugins added."""
    repository = context.find_object(Repository)
    assert repository is not None, "the command line was started without a Repository"
    return repository.with_plugins(plugins or ())


def shown(path: Path) -> str:
    """A path as the user would write it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _place(text: Any) -> Any:
    """The place of this name. A ValueError of a callback reaches the user in one line, that of a parser does not."""
    if str(text or "").startswith("-"):
        raise ValueError(f"--results {text}: this is no folder but the beginning of an option; write ./{text}")
    place = None if text is None else target(text)
    if isinstance(place, Path) and place.is_file():
        raise ValueError(f"--results {text}: this is a file; name the folder of results")
    return place


def _stored_place(text: Any) -> Any:
    """The place of this name, at which a command that makes no rows reads them. Only the default need not be there."""
    place = _place(text)
    return place if place in (None, LOCAL) else existing(place, f"--results {text}")


def existing(folder: Path, words: str) -> Path:
    """Returns the folder, or raises ValueError, with the words that gave it in front, where there is none."""
    if not is_folder(folder):
        raise ValueError(f"{words}: there is no such folder")
    return folder


def _experiment_names(context: typer.Context, incomplete: str) -> list[str]:
    """The experiments whose names begin so, for the completion of a shell."""
    return [name for name in repository_of(context).experiments() if name.startswith(incomplete)]


_EXPERIMENT = typer.Argument(
    autocompletion=_experiment_names,
    help="Experiment, e.g. h3/table2 (see `list experiments`), or a folder with a grid.yaml.",
)
ExperimentName = Annotated[str, _EXPERIMENT]
ExperimentNames = Annotated[list[str], _EXPERIMENT]
OptionalExperimentName = Annotated[str | None, _EXPERIMENT]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", metavar="FILE_OR_MODULE", help="Python file or module with models, tasks, operators; repeatable."
    ),
]
Weights = Annotated[str, typer.Argument(help="Beginning of the id of a run with kept weights, or a file of weights.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a value: train.lr=1e-3; runs each of several: train.lr=1e-3,3e-3 or model.name=dss-*; repeatable.",
    ),
]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change an option: num_train=1000; repeatable.")]
Results = Annotated[
    Path, typer.Option("--results", parser=str, callback=_place, help="Folder of results; also s3://bucket/folder.")
]
OwnResults = Annotated[
    Path, typer.Option("--results", parser=str, callback=_stored_place, help="Folder of results; default: yours.")
]
StoredResults = Annotated[
    Path | None,
    typer.Option(
        "--results",
        parser=str,
        callback=_stored_place,
        help="Folder of results; default: yours, or else the reference.",
    ),
]
