"""The standing of a submission on its board: as its author sent it, or repeated by us, with the values of both.

A repeat is another sample of the same run: devices and versions round differently, and training amplifies that. So ours
agrees where it lies between the lowest and the highest of the submitted seeds of its setting, or beyond them by no more
than the tolerance of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from subquad.suite.identity import setting_of
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.store import storage
from subquad.suite.submissions.folder import Entry, Manifest, part_of, read_manifest, repeated_parts, submissions_below

SUBMITTED, BY_US, DIFFERS = "submitted", "repeated by us", "our repeat differs"
COLUMNS = ("run_id", "seed", "config", "metric", "split", "slice", "step", "value", "status", "device")


@dataclass(frozen=True)
class Score:
    """The value that a run reached, by the metric that the table shows."""

    seed: int
    setting: str
    """Its settings without the seed."""
    task: str
    value: float | None
    """None where the run ended with an error."""
    device: str


@dataclass(frozen=True)
class Comparison:
    """A run of the author beside the same run of ours."""

    task: str
    seed: int
    theirs: float | None
    ours: float | None
    device: str
    """The device of our run."""
    agrees: bool


@dataclass(frozen=True)
class Standing:
    """A submission on one board."""

    folder: Path
    manifest: Manifest
    entry: Entry
    part: Path
    comparisons: tuple[Comparison, ...]

    @property
    def state(self) -> str:
        if not self.comparisons:
            return SUBMITTED
        return BY_US if all(one.agrees for one in self.comparisons) else DIFFERS

    @property
    def label(self) -> str:
        """The row of the table."""
        return f"{self.manifest.name} ({self.state})"

    def note(self, percent: bool) -> str:
        """The line under the table."""
        name = self.manifest.name
        if not self.comparisons:
            return f"{name}: rows of its author, which nobody has repeated (docs/submit.md)"
        shown = "; ".join(
            f"{one.task}, seed {one.seed}: {_number(one.theirs, percent)}, ours {_number(one.ours, percent)}"
            for one in self.comparisons
        )
        devices = " and ".join(dict.fromkeys(one.device for one in self.comparisons))
        return f"{name}: rows of its author; we have repeated on {devices}: {shown}"


def _number(value: float | None, percent: bool) -> str:
    return "an error" if value is None else f"{value * (100 if percent else 1):.1f}"


def standings(
    home: Path, board: str, config: ExperimentConfig, scale: str, skip: Callable[[str], None] | None = None
) -> list[Standing]:
    """The submissions on a board at one scale.

    skip: called with a sentence on each submission that cannot be read, which is left out; None: it is a ValueError.
    """
    found = []
    for folder in submissions_below(home):
        try:
            standing = _standing(folder, board, config, scale)
        except ValueError as error:
            if skip is None:
                raise
            skip(str(error))
        else:
            found += [] if standing is None else [standing]
    return found


def _standing(folder: Path, board: str, config: ExperimentConfig, scale: str) -> Standing | None:
    """The submission in a folder, or None where it is not on this board at this scale."""
    manifest = read_manifest(folder)
    entry = manifest.boards.get(board)
    if entry is None or entry.scale != scale:
        return None
    part = part_of(folder, board, entry)
    compared = compare(config, scores(config, [part]), scores(config, repeated_parts(folder, board, scale)))
    return Standing(folder, manifest, entry, part, tuple(compared))


def scores(config: ExperimentConfig, parts: Sequence[Path]) -> dict[str, Score]:
    """Run id to what the run reached, on all test rows."""
    assert config.table is not None
    wanted = (config.table.metric, config.table.split)
    found: dict[str, Score] = {}
    values: dict[str, tuple[int, float]] = {}
    for table in storage.tables(parts, COLUMNS):
        for row in table.to_pylist():
            if row["metric"] == "run":
                settings = json.loads(row["config"])
                task = settings["task"]["name"]
                found[row["run_id"]] = Score(row["seed"], setting_of(settings), task, None, row["device"])
            elif (row["metric"], row["split"]) == wanted and not row["slice"] and row["value"] is not None:
                values[row["run_id"]] = max(values.get(row["run_id"], (-1, 0.0)), (row["step"], row["value"]))
    return {
        run_id: Score(one.seed, one.setting, one.task, values[run_id][1] if run_id in values else None, one.device)
        for run_id, one in found.items()
    }


def compare(config: ExperimentConfig, theirs: Mapping[str, Score], ours: Mapping[str, Score]) -> Iterable[Comparison]:
    """Every run of ours beside that of the author with its id; a run of ours that the author does not have differs."""
    assert config.table is not None
    points = 100 if config.table.percent else 1
    for run_id, our in sorted(ours.items(), key=lambda item: (item[1].task, item[1].seed)):
        their = theirs.get(run_id)
        seeds = [one.value for one in theirs.values() if one.setting == our.setting]
        values = [value * points for value in seeds if value is not None]
        if their is None or their.value is None or our.value is None:
            agrees = their is not None and their.value is None and our.value is None
        else:
            tolerance = config.table.tolerance
            agrees = min(values) - tolerance <= our.value * points <= max(values) + tolerance
        value = None if their is None else their.value
        yield Comparison(our.task, our.seed, value, our.value, our.device, agrees)


def with_standings(config: ExperimentConfig, found: Sequence[Standing]) -> ExperimentConfig:
    """The board with the submissions as further points of its grid and rows of its table."""
    if not found or config.table is None:
        return config
    axis = model_axis(config)
    points = [{"model.name": one.manifest.name, **one.entry.options} for one in found]
    rows: dict[str, dict[str, Any]] = {one.label: {"model.name": one.manifest.name} for one in found}
    table = config.table.model_copy(update={"rows": {**config.table.rows, **rows}})
    return config.model_copy(update={"sweep": {**config.sweep, axis: [*config.sweep[axis], *points]}, "table": table})


def with_notes(report: Any, found: Sequence[Standing]) -> Any:
    """The report of a board (`reports.render.Report`) with a line on each submission under its table."""
    return replace(report, notes=(*report.notes, *(one.note(report.spec.percent) for one in found)))


def model_axis(config: ExperimentConfig) -> str:
    """The axis of a board on which the mixers are."""
    return next(axis for axis, values in config.sweep.items() if any("model.name" in value for value in values))
