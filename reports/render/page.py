"""The scoreboard as one self-contained HTML page: three questions, and a page for each mixer, task and experiment.

Python writes the numbers into the page as compressed JSON, and the scripts draw tables and charts from them, one view
at a time, so that a page of 50,000 rows opens at once. It loads no other file.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from subquad.reports.render.board import NOTES, NUMBERS, Board, counts_of, crossovers, folder_of, health
from subquad.reports.render.changes import RULE, Change, changes_of
from subquad.reports.render.costs import Curve, curves_of, tied
from subquad.reports.render.count import CELLS, PAPERS, claims_text, count, prefix
from subquad.reports.render.figure import looks_of
from subquad.reports.render.finding import on_the_way_label
from subquad.reports.render.judge import Cell, setting_text
from subquad.reports.render.layout import claim_texts, last_text, ours_text, paper_text, seeds_text
from subquad.reports.render.printing import style
from subquad.reports.render.report import Report
from subquad.reports.render.rows import StoredRun, days_of
from subquad.reports.render.speed import Point, points_of
from subquad.suite.environment import CALL
from subquad.suite.metrics import smaller_is_better
from subquad.suite.store.documents import operators_in

HERE = Path(__file__).parent
MOST_POINTS = 60
"""Points of a curve that the page keeps; the eye sees no more in a small chart."""
BYTES_AN_ELEMENT = 4
"""States are counted in float32, whatever the precision of the run, so that models compare."""
SCRIPTS = ("widgets.js", "home.js", "lists.js", "subjects.js", "page.js")
"""Elements, tables and charts; the first screen; tables of everything; a mixer, pair, task or experiment; addresses."""
BODY = """
<a class="skip" href="#main">Skip to the content</a>
<header><p class="name"><a href="#">Subquad</a></p>
<nav aria-label="Views"></nav><div class="search" role="search"></div></header>
<main id="main" tabindex="-1"><p>The numbers are being unpacked.</p></main>
<footer><p id="where"></p></footer>
<noscript><p>This page draws its tables with JavaScript, which is switched off.</p></noscript>
"""


def page(board: Board) -> str:
    """The text of the page."""
    text = json.dumps(page_data(board), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # a fixed time makes equal data equal bytes; base64 has no character that could end a script
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Subquad: {escape(board.title)}</title><style>{style()}</style></head><body>",
            BODY,
            f'<script type="application/octet-stream" id="data">{packed}</script>',
            f"<script>{script()}</script></body></html>",
            "",
        ]
    )


def script() -> str:
    """The script of the page, in the order in which its parts need each other."""
    return "".join((HERE / name).read_text() for name in SCRIPTS)


def page_data(board: Board) -> dict[str, Any]:
    """Everything that the page shows, as values of JSON."""
    settings, operators, steps = _Indexed(), _Indexed(), _Indexed()
    reports = board.reports + board.others
    runs = {run.run_id: run for report in reports for run in report.runs}
    # ids cannot be compressed, so that each stands once
    place = {run_id: i for i, run_id in enumerate(runs)}
    return {
        "title": board.title,
        "where": _where(board, list(runs.values())),
        "health": health(board),
        "notes": NOTES,
        "parts": CELLS,
        "papers": PAPERS,
        "totals": [_line(name, counts) for name, counts in counts_of(board)],
        "folders": board.folders,
        "about": [[a.kind, a.name, a.summary, a.path, a.text] for a in board.about],
        "experiments": [_experiment(report, board, i < len(board.reports)) for i, report in enumerate(reports)],
        "cells": [_cell(report, i, cell, place) for i, report in enumerate(reports) for cell in report.cells],
        "runs": [_run(run, settings, operators, steps) for run in runs.values()],
        "settings": settings.values,
        "steps": steps.values,
        "operators": operators.values,
        "claims": [
            [i, claim.verdict, *claim_texts(claim)] for i, report in enumerate(board.reports) for claim in report.claims
        ],
        "rates": [found for i, report in enumerate(reports) for found in _rates(report, i)],
        "onTheWay": [found for i, report in enumerate(reports) for found in _on_the_way(report, i)],
        "tradeoff": [found for i, report in enumerate(reports) if (found := _tradeoff(report, i, place))["points"]],
        "kernels": _kernels(points_of(board.kernels)),
        "changeRule": RULE,
        "crossover": [
            {
                "experiment": found.experiment,
                "row": found.row,
                "attention": found.attention,
                "device": found.device,
                "unit": found.unit,
                "points": found.points,
                "start": found.start,
                "text": found.text,
            }
            for report in reports
            for found in crossovers(report)
        ],
    }


class _Indexed:
    """Distinct texts, each kept once and named by its index."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}

    def add(self, text: str) -> int:
        return self._indices.setdefault(text, len(self._indices))

    @property
    def values(self) -> list[Any]:
        return [json.loads(text) for text in self._indices]


def _where(board: Board, runs: Sequence[StoredRun]) -> str:
    devices = sorted({run.device.partition(",")[0] for run in runs if run.device})
    when = f", made {days}" if (days := days_of(runs)) else ""
    on = f" on {', '.join(devices)}" if devices else ""
    return f"{len(board.reports)} experiments, {len(runs)} runs{on}{when}"


def _experiment(report: Report, board: Board, counted: bool) -> dict[str, Any]:
    counts = count(report, board.others)
    return {
        "folder": folder_of(report.experiment),
        "title": report.title,
        "source": report.source,
        "scale": report.scale,
        "unit": report.unit,
        "notes": report.notes,
        "counted": counted,
        "cost": board.costs.get(report.experiment, ""),
        "estimate": board.estimates.get((report.experiment, report.scale), ""),
        "reference": report.spec.reference,
        "timed": report.timed,
        "success": None if report.config.select is None else report.config.select.success,
        "cannotRun": dict(report.config.cannot_run),
        # chance, whether smaller is better, and the metric of every column that a run can fill
        "columns": {
            column: [report.spec.of(column, "chance"), smaller_is_better(metric), metric]
            for column in report.spec.columns
            if (metric := report.spec.of(column, "metric"))
        },
        **_line(report.experiment, counts),
        "claims": claims_text(counts, prefix(report)),
    }


def _line(name: str, counts: Mapping[str, int]) -> dict[str, Any]:
    """The counts of an experiment, folder or sum."""
    both = claims_text(counts), claims_text(counts, "reduced claims: ")
    return {"name": name, "counts": {n: counts[n] for n in NUMBERS}, "claims": both[0], "reduced": both[1]}


def _cell(report: Report, index: int, cell: Cell, place: Mapping[str, int]) -> dict[str, Any]:
    text, reference = paper_text(cell), report.spec.reference
    printed = reference == "paper"
    published = cell.published.value if cell.published and printed else None
    return {
        "experiment": index,
        "row": cell.row,
        "column": cell.column,
        "paper": text if printed or not text else f"{text} ({reference})",
        "published": published,
        "ours": ours_text(cell, report.decimals),
        "last": last_text(cell, report.decimals),
        "mean": None if cell.mean is None else _short(cell.mean),
        "values": [_short(value) for value in cell.values if math.isfinite(value)],
        "seeds": seeds_text(cell),
        "verdict": cell.verdict or ("" if cell.mean is not None else "not run" if cell.missing else ""),
        "chosen": cell.chosen,
        "planned": cell.planned,
        "lost": cell.lost,
        "runs": [place[run_id] for run_id in cell.run_ids],
        "command": _command(report, cell) if cell.planned else "",
    }


def _command(report: Report, cell: Cell) -> str:
    """The command that runs a cell, with filters for the settings of its row and column."""
    wanted: Mapping[str, Any] = {**report.spec.rows.get(cell.row, {}), **report.spec.columns.get(cell.column, {})}
    filters = [
        f"--only {shlex.quote(f'{key}={json.dumps(value) if isinstance(value, (bool, type(None))) else value}')}"
        for key, value in wanted.items()
        # the filter of a command takes single values
        if "." in key and not isinstance(value, (Mapping, list, tuple))
    ]
    return " ".join([f"{CALL} run", report.experiment, "--scale", report.scale, *filters])


def _rates(report: Report, index: int) -> list[list[Any]]:
    """[experiment, row, column, [[value, successes, runs], ...], window] of every cell with a choice of settings."""
    return [
        [index, found.row, found.column, [[setting_text(v), good, runs] for v, good, runs in found.tried], found.window]
        for found in report.sensitivity
    ]


def _run(run: StoredRun, settings: _Indexed, operators: _Indexed, steps: _Indexed) -> dict[str, Any]:
    config = {key: value for key, value in run.config.items() if key != "seed"}
    return {
        "id": run.run_id,
        "seed": run.seed,
        "status": run.status,
        "error": run.error,
        "device": run.device,
        "torch": run.torch,
        "precision": run.precision,
        "commit": run.commit,
        "date": run.started_at[:10],
        "seconds": None if run.seconds is None else _short(run.seconds),
        "parameters": _any_slice(run, "num_parameters"),
        "state": None if (state := _any_slice(run, "state_size")) is None else BYTES_AN_ELEMENT * state,
        "settings": settings.add(json.dumps(config, sort_keys=True)),
        "operators": operators.add(json.dumps(sorted(operators_in(run.operators)))),
        "curves": _curves(run, steps),
    }


def _curves(run: StoredRun, steps: _Indexed) -> list[list[Any]]:
    """[metric, split, index of the steps, values] of everything that a run measured at several steps."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for value in run.values:
        if not value.slice and value.value is not None and math.isfinite(value.value) and value.split:
            found.setdefault((value.metric, value.split), []).append((value.step, value.value))
    curves = []
    for (metric, split), points in sorted(found.items()):
        points.sort()
        if points[0][0] < points[-1][0]:
            step = -(-len(points) // MOST_POINTS)
            # the last point is always kept
            kept = points[::-1][::step][::-1]
            index = steps.add(json.dumps([x for x, _ in kept]))
            curves.append([metric, split, index, visible([y for _, y in kept])])
    return curves


def visible(values: Sequence[float]) -> list[float]:
    """Heights of a line with the digits that a small chart shows: three of each, and steps of 1/200 of its height."""
    height = max(values) - min(values)
    least = -math.floor(math.log10(height / 200)) if height else 0
    return [round(y, max(least, 2 - math.floor(math.log10(abs(y))))) if y else 0 for y in values]


def _tradeoff(report: Report, index: int, place: Mapping[str, int]) -> dict[str, Any]:
    """Accuracy on the test split, size of the state and speed of training of every run that has recorded them."""
    rows = {run_id: cell.row for cell in report.cells for run_id in cell.run_ids}
    points = []
    for run in report.runs:
        accuracy, state = run.find("accuracy", "test"), _any_slice(run, "state_size")
        if run.status != "ok" or run.run_id not in rows or accuracy is None or accuracy.value is None or not state:
            continue
        speed = run.find("train_throughput")
        points.append(
            [
                rows[run.run_id],
                _short(100 * accuracy.value),
                BYTES_AN_ELEMENT * state,
                None if speed is None or speed.value is None else _short(speed.value),
                place[run.run_id],
            ]
        )
    return {"experiment": index, "points": points, "looks": looks_of(cell.row for cell in report.cells)}


def _on_the_way(report: Report, index: int) -> Iterator[dict[str, Any]]:
    """For each column of a report whose figure is curves: against each cost [label, [[row, its seeds, their median,
    whether it is a tie with the best], ...]], the best row first."""
    spec = report.figure.spec
    lower = bool(smaller_is_better(spec.y))

    def merit(curve: Curve) -> float:
        middle = statistics.median(seed[-1][1] for seed in curve.seeds)
        return middle if lower else -middle

    shown = spec.costs if spec.kind == "curves" else ()
    found = {cost.label: sorted(curves_of(report, cost), key=merit) for cost in shown}
    for column in report.spec.columns:
        there = {label: [curve for curve in curves if curve.column == column] for label, curves in found.items()}
        if any(len(seed) > 1 for curves in there.values() for curve in curves for seed in curve.seeds):
            yield {
                "experiment": index,
                "column": column,
                "value": on_the_way_label(report),
                "looks": looks_of(cell.row for cell in report.cells),
                "costs": [
                    [
                        label,
                        [
                            [c.row, _points(c.seeds), _points([c.middle])[0], c.row in tied(curves, lower)]
                            for c in curves
                        ],
                    ]
                    for label, curves in there.items()
                ],
            }


def _points(seeds: Sequence[Sequence[tuple[float, float]]]) -> list[list[list[float | None]]]:
    return [[[_short(x), _short(y)] for x, y in seed] for seed in seeds]


def _any_slice(run: StoredRun, metric: str) -> float | None:
    return next((value.value for value in run.values.of_metric(metric) if value.value is not None), None)


def _kernels(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Every case of an operator with its newest measurement at each commit, oldest first."""
    cases: dict[tuple[str, str, str, str, str], dict[str, Point]] = {}
    for point in points:
        by_commit = cases.setdefault(point.key, {})
        # a commit that is measured again stands where it was measured last
        by_commit.pop(point.commit, None)
        by_commit[point.commit] = point
    changes = {change.newest.key: change for change in changes_of(points)}
    return [
        {
            "device": device,
            "operator": operator,
            "case": case,
            "pass": direction,
            "implementation": implementation,
            "history": [_measured(point) for point in by_commit.values()],
            "change": _change(changes.get((device, operator, case, direction, implementation))),
        }
        for (device, operator, case, direction, implementation), by_commit in sorted(cases.items())
    ]


def _change(change: Change | None) -> dict[str, Any] | None:
    """The newest measurement of a case against the one of the commit before, by the rule of `changes`."""
    if change is None:
        return None
    return {
        "before": _measured(change.before),
        "now": _measured(change.newest),
        "ratio": _short(change.ratio),
        "verdict": change.verdict,
        "others": change.others if change.others is None else _short(change.others),
        "differs": change.differs,
        "inOneRun": bool(change.in_one_run),
    }


def _measured(point: Point) -> list[Any]:
    """[commit, date, status, run id, median, lower and upper quartile (ms), floor (ms) or None]."""
    head = [point.commit[:10], point.started_at[:10], point.status, point.run_id]
    if point.value is None:
        return [*head, None, None, None, None]
    low, high = point.quartiles
    floor = point.others.get("floor_time")
    return [*head, *map(_short, (point.value, low, high)), None if floor is None else _short(floor)]


def _short(value: float) -> float | None:
    """A number with the digits that a chart can show, or None for one that JSON has not: infinity or NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
