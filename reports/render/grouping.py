"""Stored runs of an experiment by any of their settings: the table of a sweep that was made with `--set`.

The table of an experiment shows the points of its grid. This one shows every stored run of a scale, whatever its
settings: a line for each combination of values of the settings asked for, a column for each column of the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa

from reports.render.cells import measurement
from reports.render.document import DASH, Document, Grid
from reports.render.plan import make_plan, pick_scale
from reports.render.rows import StoredRun, load_runs, matches
from reports.render.sensitivity import text
from reports.render.units import fixed, shown
from suite.registry import nearest
from suite.settings.config import ExperimentConfig
from suite.settings.grid import iter_keys, lookup, order


def grouped(
    config: ExperimentConfig,
    folder: Path,
    name: str,
    frame: pa.Table | pd.DataFrame,
    keys: Sequence[str],
    scale: str | None,
) -> Document:
    """The stored runs of one scale by the dotted keys. ValueError for a key that no run has.

    A number is the mean over the runs of a line, with their standard deviation; runs that did not end well are counted
    beside it. Where other settings than the seed differ within a line, a note names them.
    """
    runs = load_runs(frame)
    scale = pick_scale(config, runs, scale)
    runs = [run for run in runs if run.scale == scale]
    known = {key for run in runs for key, _ in iter_keys(run.config)}
    for key in keys:
        if runs and not any(lookup(run.config, key) is not None for run in runs):
            raise ValueError(f"--by {key}: no stored run of {name} has it{nearest(key, known)}")
    plan = make_plan(config, folder, scale)
    columns = list(plan.spec.columns)
    groups: dict[tuple[str, ...], list[StoredRun]] = {}
    for run in sorted(runs, key=lambda run: [order(lookup(run.config, key)) for key in keys]):
        groups.setdefault(tuple(text(lookup(run.config, key)) for key in keys), []).append(run)

    def number(column: str, group: Sequence[StoredRun]) -> str:
        found = []
        for run in group:
            value = measurement(plan.spec, column, run) if matches(plan.spec.columns[column], run.config) else None
            if run.status == "ok" and value is not None and value.value is not None:
                found.append(shown(value.value, value.unit, plan.spec.percent))
        if not found:
            return DASH
        spread = f" ± {fixed(statistics.stdev(found), plan.decimals)}" if len(found) > 1 else ""
        return fixed(statistics.fmean(found), plan.decimals) + spread

    lines = []
    mixed: set[str] = set()
    for values, group in groups.items():
        bad = sum(run.status != "ok" for run in group)
        lines.append((*values, *(number(column, group) for column in columns), str(len(group)), str(bad)))
        mixed |= _differing(group) - set(keys)
    notes = [f"every stored run of scale {scale}, points of the grid or not; mean ± standard deviation over runs"]
    if mixed:
        differ = ", ".join(sorted(mixed, key=_names_first))
        notes.append(f"runs of one line also differ in: {differ}; name them with --by to separate them")
    grid = Grid(
        "",
        (*keys, *columns, "runs", "failed"),
        tuple(lines),
        len(keys),
        tuple(tuple(run.run_id for run in group) for group in groups.values()),
    )
    where = f"by {', '.join(keys)}; scale: {scale}"
    return Document(name, f"{name}: {config.title}", where, (grid,), tuple(notes), (), lambda: None)


def _names_first(key: str) -> tuple[bool, str]:
    """Sorts `model.name` before the options of models, which often follow from it."""
    return not key.endswith(".name"), key


def _differing(group: Sequence[StoredRun]) -> set[str]:
    """The settings, the seed aside, that are not the same in all runs."""
    values: dict[str, set[str]] = {}
    for run in group:
        for key, value in iter_keys(run.config):
            values.setdefault(key, set()).add(str(value))
    ignored = ("seed", "data", "task.data", "train.init_from.base")
    return {key for key, found in values.items() if len(found) > 1 and key not in ignored}
