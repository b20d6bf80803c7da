"""The file `grid.yaml`: an experiment as a baseline and the axes that change.

An axis is a list of values of one dotted key, or a list of mappings that change several keys together:

    sweep:
      train.lr: [1.0e-3, 1.0e-4]                       # one key
      model:                                           # several keys at a time; the axis name is only a name
        - {model.name: attention, model.position: learned}
        - {model.name: h3}

A grid trains models on tasks (sections task, model, train), or times operators (the one section bench):

    baseline:
      bench: {dtype: bfloat16, lengths: [512, 1024]}
    sweep:
      series:
        - {bench.op: attention, bench.implementation: torch, bench.shape: {B: 1, H: 16, K: 64}}

or times models on random inputs (sections model and speed):

    baseline:
      model: {name: gsa, d_model: 2048}
      speed: {measure: train, lengths: [2048], tokens: 16384}

`suite.settings.grid` expands it into runs.

A scale that cannot run here (data that nobody may pass on, more than a few days of a GPU) is stated with its reason:

    cannot_run:
      paper: 300 billion tokens of the Pile, which is no longer distributed

`run` refuses such a scale, `report` shows the paper's numbers and the reason. A grid of which no scale can run may
leave out the baseline; its table is then the one of expected.csv.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from subquad.suite.bounds import Fraction, Seed, Size
from subquad.suite.options import Config, parse, read_yaml_file, reason_of, shortened
from subquad.suite.registry import nearest
from subquad.suite.settings.report_spec import FigureSpec, Select, Source, TableSpec

SECTIONS = ("task", "model", "train")
"""Sections of a grid that trains."""
BENCH = ("bench",)
"""Sections of a grid that times operators."""
SPEED = ("model", "speed")
"""Sections of a grid that times models."""


def _in_a_line(text: str) -> str:
    """The text without line breaks, because it becomes a part of messages."""
    return " ".join(text.split())


def _checked_axis(values: list[Any]) -> list[Any]:
    """Returns the values of an axis. Raises ValueError for a mapping among them whose keys are no dotted keys."""
    for value in values:
        for key in value if isinstance(value, Mapping) else ():
            if not isinstance(key, str):
                raise ValueError(f"expected a dotted key such as train.lr, got {shortened(key)}")
    return values


Sweep = dict[str, Annotated[list[Any], Field(min_length=1), AfterValidator(_checked_axis)]]


def _listed(value: Any) -> Any:
    """Raises ValueError for a single number, because it could be a seed or the number of seeds."""
    if isinstance(value, (int, float, str)):
        raise ValueError(f"expected a list of seeds, such as [0, 1, 2], got {shortened(value)}")
    return value


def _different(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Raises ValueError for a seed that stands twice, which would be one run in place of two."""
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"expected different seeds, such as [0, 1, 2], got {shortened(list(seeds))}")
    return seeds


Seeds = Annotated[tuple[Seed, ...], Field(min_length=1), BeforeValidator(_listed), AfterValidator(_different)]


@cache
def _kinds() -> dict[str, TypeAdapter[Any]]:
    """The types of the seeds and the sweep of a scale, each of which takes a millisecond to make."""
    return {"seeds": TypeAdapter(Seeds), "sweep": TypeAdapter(Sweep)}


def _checked_scale(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a scale, whose own seeds and sweep are of the same types as those of the grid."""
    for key, kind in _kinds().items():
        if key in options:
            try:
                kind.validate_python(options[key])
            except ValidationError as error:
                where = ".".join(map(str, (key, *error.errors()[0]["loc"])))
                raise ValueError(f"{where}: {reason_of(error)}") from None
    return options


Scale = Annotated[dict[str, Any], AfterValidator(_checked_scale)]


class Budget(Config):
    """The quantity that all mixers of a board share. An experiment with a budget takes submissions (`submit`)."""

    of: Literal["num_parameters", "state_size"]
    """Parameters of the whole network, or elements that one sequence keeps between two steps."""
    value: Size
    within: Fraction
    """Part of the value by which a mixer may miss it."""
    task: str
    """Task of the grid on whose vocabulary and length the network is measured."""


class ExperimentConfig(Config):
    """One `grid.yaml`."""

    title: str
    reads: str = ""
    """Name of the folder beside this one whose grid and rows this experiment shows, in a table of its own. It has no
    runs of its own: what is not given here is as there, and `run` makes the rows of the other."""
    source: Source | None = None
    baseline: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Section to options that all runs share. Empty only where no scale can run."""
    sweep: Sweep = Field(default_factory=dict)
    """Axis to its values; the runs are the product of all axes."""
    seeds: Seeds = (0,)
    select: Select | None = None
    scales: dict[str, Scale] = Field(default={"paper": {}}, min_length=1)
    """Name of a protocol size, which is a folder of results, to overrides by dotted key; `seeds` and `sweep` may stand
    there too. The first scale is the default, and every scale but `paper` is reduced."""
    cannot_run: dict[str, Annotated[str, AfterValidator(_in_a_line)]] = Field(default_factory=dict)
    """Name of a scale that cannot run here to the reason."""
    table: TableSpec | None = None
    figure: FigureSpec | None = None
    budget: Budget | None = None

    def check_options(self) -> None:
        for scale in self.scales:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", scale):
                raise ValueError(
                    f"scales: expected a name of letters, digits, '.', '_', '+', '-', got {shortened(scale)}"
                )
        for scale in self.cannot_run:
            if scale not in self.scales:
                raise ValueError(f"cannot_run: unknown scale {scale!r}{nearest(scale, self.scales)}")
        if not self.baseline and self.runnable:
            raise ValueError(f"baseline: missing, and cannot_run says nothing about {', '.join(self.runnable)}")
        columns = self.table.columns if self.table is not None else {}
        for column in self.figure.columns if self.figure is not None else ():
            if column not in columns:
                raise ValueError(f"figure.columns: the table has no column {column!r}{nearest(column, columns)}")

    @property
    def runnable(self) -> tuple[str, ...]:
        """The scales that can run here, in the order of the grid."""
        return tuple(scale for scale in self.scales if scale not in self.cannot_run)

    @property
    def sections(self) -> tuple[str, ...]:
        """The first words of the dotted keys of this kind of grid."""
        if "speed" in self.baseline:
            return SPEED
        return BENCH if "bench" in self.baseline else SECTIONS

    @property
    def timed(self) -> bool:
        """Whether the grid times operators or models instead of training."""
        return self.sections != SECTIONS


PLUGINS = "plugins"
"""Value of `model.name` or `task.name` in a sweep that stands for the names that plugins define."""
PluginNames = Mapping[str, Sequence[str]]
"""`model.name` and `task.name` to the names that plugins define."""
NO_PLUGINS: PluginNames = {"model.name": (), "task.name": ()}


def name_plugins(config: ExperimentConfig, names: PluginNames) -> ExperimentConfig:
    """The experiment with the names of plugins in place of the word `plugins`; without plugins, that value goes.

    A table that states its rows gets one for each model of a plugin that the sweep has.
    """

    def named(axis: str, value: Any) -> list[Any]:
        if axis in names and value == PLUGINS:
            return list(names[axis])
        for key, found in names.items():
            if isinstance(value, Mapping) and value.get(key) == PLUGINS:
                return [{**value, key: name} for name in found]
        return [value]

    def with_names(sweep: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        return {axis: [new for value in values for new in named(axis, value)] for axis, values in sweep.items()}

    scales = {
        scale: {**values, "sweep": with_names(values["sweep"])} if isinstance(values.get("sweep"), Mapping) else values
        for scale, values in config.scales.items()
    }
    sweep, table = with_names(config.sweep), config.table
    if table is not None:
        models = [value.get("model.name") for axis in sweep.values() for value in axis if isinstance(value, Mapping)]
        models += sweep.get("model.name", [])
        rows = {name: {"model.name": name} for name in names["model.name"] if name in models}
        table = table.model_copy(update={"rows": {**table.rows, **rows}})
    return config.model_copy(update={"sweep": sweep, "scales": scales, "table": table})


def load_experiment(path: Path, plugins: PluginNames = NO_PLUGINS) -> ExperimentConfig:
    """Reads and checks one grid.yaml. Raises ValueError, in one line with the path, for what it must not hold."""
    # opening a named pipe would wait for a writer
    if not path.is_file():
        raise ValueError(f"{path}: no regular file")
    values = read_yaml_file(path)
    if values is None:
        raise ValueError(f"{path}: the file is empty; expected a mapping with title, baseline, ...")
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping with title, baseline, ...; got {type(values).__name__}")
    if isinstance(beside := values.get("reads"), str) and beside:
        values = {**_grid_beside(path, beside), **values}
    return name_plugins(parse(ExperimentConfig, values, str(path)), plugins)


OF_A_VIEW = frozenset({"title", "reads", "source", "table", "figure"})
"""The keys that the grid of an experiment has which reads another one's rows."""


def _grid_beside(path: Path, name: str) -> dict[str, Any]:
    """The runs of the experiment whose rows the grid at this path reads. ValueError where there is none."""
    other = path.parent.parent / name / "grid.yaml"
    if "/" in name or not other.is_file():
        raise ValueError(f"{path}: reads: there is no experiment {name!r} beside this one")
    try:
        found = read_yaml_file(other)
    except ValueError as error:
        raise ValueError(f"{path}: reads: {error}") from None
    if not isinstance(found, dict) or "reads" in found:
        raise ValueError(f"{path}: reads: {other} has no runs of its own")
    return {key: value for key, value in found.items() if key not in OF_A_VIEW}


def find_experiments(folder: Path) -> dict[str, Path]:
    """Name of every experiment, which is its folder below `folder`, to its grid.yaml."""
    return {str(path.parent.relative_to(folder)): path for path in sorted(folder.rglob("grid.yaml"))}


def check_sections(config: ExperimentConfig, where: str) -> None:
    """Raises ValueError for an unknown section of the baseline, or one of another kind of grid."""
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
