"""The rows of a submission: packed into a part, and held against the runs that the board asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from subquad.suite.registry import counted, few
from subquad.suite.runs import Run
from subquad.suite.settings.grid import iter_keys, lookup
from subquad.suite.store import endings, parts, storage
from subquad.suite.submissions.folder import Entry

FACTS = {"devices": "device", "torch": "torch", "python": "python", "commits": "commit"}
"""Field of a manifest to the column of the rows whose values it lists."""
HEAD = ("run_id", "config", "metric", "status", "error", "dirty", "duration_s", *FACTS.values())


@dataclass(frozen=True)
class Said:
    """The origin of the rows of a part: devices, versions, commits."""

    facts: Mapping[str, Any]
    """Fields of a manifest."""
    dirty: tuple[str, ...]
    """Runs that were made while files of Subquad differed from its commit."""


def packed(results: Path, runs: Sequence[Run], folder: Path) -> parts.Part:
    """The stored rows of runs as a part of a folder. Runs that were not needed have none."""
    paths = endings.files_of(results, [(run.experiment, run.scale, run.run_id) for run in runs])
    return parts.of_runs(paths, [run.run_id for run in runs], folder)


def said_by(table: pa.Table) -> Said:
    """Reads the origin of rows from their columns."""
    facts = {field: _values(table, column) for field, column in FACTS.items()}
    return Said(facts, _values(table.filter(pc.fill_null(table["dirty"], False)), "run_id"))


def fact_faults(part: Path, entry: Entry) -> Iterator[str]:
    """A sentence on each field of a manifest that its rows contradict."""
    table = storage.load(part, ("run_id", "dirty", *FACTS.values()))
    said = {**said_by(table).facts, "num_runs": len(table["run_id"].unique())}
    for field, value in said.items():
        if (claimed := getattr(entry, field)) != value:
            yield f"{field} is {claimed!r:.100} in the manifest and {value!r:.100} in the rows"


def _values(table: pa.Table, column: str) -> tuple[str, ...]:
    return tuple(sorted(value for value in table[column].unique().to_pylist() if value))


@dataclass(frozen=True)
class Stored:
    """A run in a part, as its row `run` describes it."""

    run_id: str
    settings: Mapping[str, Any]
    row: Mapping[str, Any]


def stored_in(part: Path) -> list[Stored]:
    """The runs of a part."""
    heads = (row for row in storage.load(part, HEAD).to_pylist() if row["metric"] == "run")
    return [Stored(row["run_id"], json.loads(row["config"]), row) for row in heads]


def faults_of(stored: Sequence[Stored], planned: Sequence[Run], needed: Sequence[Run], identity: str) -> Iterator[str]:
    """A sentence for every way in which stored runs are not those that the board asks for.

    planned: all runs of the board. needed: those without which it has a gap. identity: that of the submitted plugin.
    """
    known = {run.run_id: run for run in planned}
    others = [one for one in stored if lookup(one.settings, "plugins.model") != identity]
    if others:
        theirs = ", ".join(sorted({str(lookup(one.settings, "plugins.model")) for one in others}))
        yield (
            f"{counted(len(others))} of another revision of the plugin ({theirs}; the file is {identity}); carry out "
            "the runs again with `submit`"
        )
    for one in stored:
        if one.run_id not in known and one not in others:
            yield f"run {one.run_id}: no run of the board; {_difference(one, planned)}"
    there = {one.run_id for one in stored}
    if missing := [run for run in needed if run.run_id not in there]:
        names = few([_named(run.resolved) for run in missing], 3)
        yield f"{counted(len(missing))} of {len(planned)} missing: {names}"
    if bad := [one for one in stored if one.row["status"] not in ("ok", "diverged", "oom")]:
        yield f"{counted(len(bad))} failed, such as {bad[0].run_id} ({str(bad[0].row['error'])[:100]!r}); repeat them"
    if dirty := [one.run_id for one in stored if one.row["dirty"]]:
        yield (
            f"{counted(len(dirty))} with uncommitted changes of Subquad, which nobody else has ({few(dirty, 3)}); "
            "repeat them in a clean checkout"
        )


def _named(settings: Mapping[str, Any]) -> str:
    return f"{lookup(settings, 'task.name')} at rate {lookup(settings, 'train.lr')}, seed {settings['seed']}"


def _difference(one: Stored, planned: Sequence[Run]) -> str:
    """The settings in which a stored run differs from that run of the board which is most like it."""
    own = dict(iter_keys(dict(one.settings)))
    others = [dict(iter_keys(run.resolved)) for run in planned]
    differing = [[key for key in own.keys() | other.keys() if own.get(key) != other.get(key)] for other in others]
    least, other = min(zip(differing, others, strict=True), key=lambda pair: len(pair[0]))
    shown = [f"{key} is {own.get(key)!r:.40} and there {other.get(key)!r:.40}" for key in sorted(least)]
    return f"the nearest one differs in {few(shown, 4)}; was Subquad of another version, or --set given?"


def numbers_of(part: Path, run_id: str, metrics: Sequence[str]) -> dict[str, float]:
    """The values of metrics that a run has once, such as its number of parameters."""
    rows = storage.load(part, ("metric", "value"), run_id=run_id).to_pylist()
    return {row["metric"]: row["value"] for row in rows if row["metric"] in metrics}
