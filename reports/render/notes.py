"""Lines under a report's table: footnotes of marks, missing runs, the criterion, and the provenance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from reports.render.cells import OUTRIGHT, Cell
from reports.render.marks import MIXED, ONE_SEED, REDUCED, SELECTED, STAND_IN
from reports.render.plan import Plan
from reports.render.rows import StoredRun

LONGEST_LIST = 12
"""A footnote names at most this many rows and cells."""


def notes_of(plan: Plan, cells: Sequence[Cell], runs: Sequence[StoredRun]) -> list[str]:
    """The lines under the table, in a fixed order, each only where it applies.

    runs: all runs that the cells show.
    """
    used = {mark for cell in cells for mark in cell.marks}
    notes = []
    if REDUCED in used:
        notes.append(f"{REDUCED} reduced: scale {plan.scale} ({_changes(plan)}); no verdict against the paper")
    if ONE_SEED in used:
        notes.append(f"{ONE_SEED} one seed")
    if STAND_IN in used:
        reasons = "; ".join(sorted({run.stand_in for run in runs if run.stand_in}))
        notes.append(f"{STAND_IN} stand-in data, not comparable with the paper: {reasons}")
    if MIXED in used:
        mixes = "; ".join(
            f"{', '.join(where) or 'all cells'}: {words}" for words, where in _places(cells, lambda cell: cell.mixed)
        )
        notes.append(f"{MIXED} mean over runs of different operators, which may not agree: {mixes}")
    if SELECTED in used and plan.config.select is not None:
        select = plan.config.select
        picks = "the column `best at` of the table of every cell"
        if not choices_are_listed(cells):
            places = _places(cells, lambda cell: cell.chosen)
            picks = "; ".join(f"{words}: {', '.join(where)}" if where else words for words, where in places)
        notes.append(f"{SELECTED} {select.rule}: {picks}")
    if plan.config.timed:
        notes.append(
            "a value is the median of raw samples; spread: half the distance between their quartiles, over the median"
        )
    asked = [cell for cell in cells if cell.planned]
    missing = sum(cell.missing for cell in asked)
    outside = sum(cell.missing and not plan.points_of(cell.row, cell.column) for cell in asked)
    within = f", {outside} of them not in scale {plan.scale}" if outside else ""
    notes.append(f"— not run: {missing} of {len(asked)} cells{within}")
    notes += [f"scale {scale} cannot run here: {reason}" for scale, reason in plan.config.cannot_run.items()]
    if any(cell.published and cell.planned for cell in cells):
        tolerance, far, twice = (_points(plan, factor * plan.spec.tolerance) for factor in (1, OUTRIGHT, 2))
        notes.append(
            f"verdicts: a seed succeeds if it is within {tolerance} of the {plan.spec.reference} or better; unstable: "
            f"one seed succeeds, and another diverged or is worse by more than {far}; otherwise the mean or the median "
            f"counts, whichever is farther from the {plan.spec.reference}; agrees: within {tolerance}; unclear: within "
            f"two standard errors and within {twice}; no verdict is given while a run is missing"
        )
    sources = sorted({cell.published.source for cell in cells if cell.published})
    if sources and (plan.cannot_run or any(cell.published and cell.planned for cell in cells)):
        notes.append(f"{plan.spec.reference}'s numbers from: {'; '.join(sources)}")
    return notes


def _points(plan: Plan, distance: float) -> str:
    """Text of a distance in the unit of the cells."""
    unit = "" if not plan.spec.percent else " point" if distance == 1 else " points"
    return f"{distance:g}{unit}"


def _changes(plan: Plan) -> str:
    """Text of the options that a reduced scale changes: `train.epochs: 20, model.d_model: [64]`."""
    scale = dict(plan.config.scales.get(plan.scale, {}))
    sweep: Mapping[str, Sequence[Any]] = scale.pop("sweep", {})
    changed = [f"{key}: {value}" for key, value in scale.items()]
    for axis, values in sweep.items():
        if any(isinstance(value, Mapping) for value in values):
            # such values are too long to print
            changed.append(f"{axis}: {len(values)} of {len(plan.config.sweep.get(axis, values))}")
        else:
            changed.append(f"{axis}: {values}")
    return ", ".join(changed)


def choices_are_listed(cells: Sequence[Cell]) -> bool:
    """Whether the values of `select.best_of` stand in the list of cells, because a footnote would name too many."""
    places = _places(cells, lambda cell: cell.chosen)
    return len({cell.column for cell in cells}) > 1 and sum(len(where) for _, where in places) > LONGEST_LIST


def _places(cells: Sequence[Cell], text: Callable[[Cell], str]) -> list[tuple[str, list[str]]]:
    """Every text that a cell has, in order, and the cells that have it.

    They are named as `row / column`, by the row alone where all cells of a row with a value have the text, and by
    nothing where all cells of the table with a value have it.
    """
    places: dict[str, list[Cell]] = {}
    for cell in cells:
        if text(cell):
            places.setdefault(text(cell), []).append(cell)
    filled = [cell for cell in cells if cell.mean is not None or text(cell)]
    if len(places) == 1 and len(filled) == len(*places.values()) > 1:
        return [(words, []) for words in places]
    named: list[tuple[str, list[str]]] = []
    for words, found in sorted(places.items()):
        names: dict[str, None] = {}
        for cell in found:
            row = [other for other in filled if other.row == cell.row]
            whole = len(row) > 1 and all(text(other) == words for other in row)
            names[cell.row if whole else f"{cell.row} / {cell.column}"] = None
        named.append((words, list(names)))
    return named


def provenance_of(runs: Sequence[StoredRun]) -> list[str]:
    """Devices, versions, commits and dates of the runs shown; empty where there are none."""
    if not runs:
        return []

    def listed(values: Iterable[str]) -> str:
        return ", ".join(sorted({value for value in values if value})) or "unknown"

    dates = sorted(run.started_at[:10] for run in runs if run.started_at)
    return [
        f"runs: {len(runs)}",
        f"device: {listed(run.device for run in runs)}",
        f"torch: {listed(run.torch for run in runs)}",
        f"precision: {listed(run.precision for run in runs)}",
        f"commit: {listed(run.commit for run in runs)}",
        f"dates: {dates[0]} to {dates[-1]}" if dates else "dates: unknown",
    ]
