"""Plan of a report, made before any stored run is read: scale, grid points, rows, columns, published values.

`read_table` reads the CSV files that somebody wrote by hand, so that every fault names the file and the line.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from subquad.reports.render.document import unit_shown
from subquad.suite.metrics import METRICS, smaller_is_better
from subquad.suite.registry import nearest
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import check_table, lookup, points, same, seeds_of
from subquad.suite.settings.report_spec import TableSpec


def read_table(path: Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Returns the place of every line, in words for a message, and its texts by column.

    A file that is missing or empty has no lines. ValueError for a header without one of these columns, and for a line
    that ends before one of them or has more values than the header. All other columns are optional: they are empty in a
    line that ends before them.
    """
    if not path.exists():
        return []
    found = []
    try:
        # spreadsheets begin a file with a mark of its encoding, which does not belong to the first column's name
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = next(filter(None, reader), [])
            missing = [name for name in columns if name not in header]
            if header and missing:
                raise ValueError(
                    f"{path}: the header has no {', '.join(missing)}; it needs {','.join(columns)}, separated by commas"
                )
            for texts in filter(None, reader):
                least = 1 + max(map(header.index, columns))
                where = f"{path}, line {reader.line_num}"
                if not least <= len(texts) <= len(header):
                    allowed = f"{least} to {len(header)}" if least < len(header) else f"{least}"
                    raise ValueError(
                        f"{where}: has {len(texts)} values, needs {allowed}; put a text with commas in quotes, and "
                        f"write nothing between two commas for an empty value"
                    )
                found.append((where, dict(zip_longest(header, texts, fillvalue=""))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read as a CSV file in UTF-8 ({error}); save it as one") from None
    return found


def slice_part(name: str, key: str) -> float | str | None:
    """The value of one key of a slice name, as a number where it is one: 512 for `length` of `length=512,width=64`.

    None where the name does not have the key.
    """
    parts = dict(part.partition("=")[::2] for part in name.split(",") if part)
    if key not in parts:
        return None
    try:
        number = float(parts[key])
    except ValueError:
        return parts[key]
    return int(number) if number.is_integer() else number


def matches(selector: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether a resolved run has every value that a selector names.

    Keys without a dot (`slice`, `metric`, `split`) name a measurement and no setting of the run, so they are skipped.
    """
    return all(same(value, lookup(config, key)) for key, value in selector.items() if "." in key)


@dataclass(frozen=True)
class Published:
    """One value of expected.csv, in its own unit; `value` is None where the paper has none and `note` says why."""

    value: float | None
    decimals: int
    """Decimals as printed in the paper."""
    unit: str
    better: str
    """`higher`, `lower`, or empty where neither direction is better."""
    note: str
    source: str
    hardware: str = ""
    follows: str = ""
    """`experiment | row | column` of the same number in another table, where it is counted."""


@dataclass(frozen=True)
class Plan:
    """The table that an experiment asks for at one scale."""

    config: ExperimentConfig
    spec: TableSpec
    scale: str
    points: Sequence[Mapping[str, Any]]
    """Every point of the grid, as dotted keys and values."""
    published: Mapping[tuple[str, str], Published]
    """(row, column) to the paper's value."""

    @property
    def reduced(self) -> bool:
        """Whether this scale is smaller than the one the paper's numbers belong to."""
        return self.scale != "paper" and bool(self.config.source or self.config.scales.get(self.scale))

    @property
    def cannot_run(self) -> bool:
        """Whether this scale is one that cannot run here."""
        return self.scale in self.config.cannot_run

    @property
    def num_seeds(self) -> int:
        """Seeds that the grid asks for."""
        return len(seeds_of(self.config, self.scale))

    @property
    def decimals(self) -> int:
        """Decimals of a value in the table: those of the grid, else the most that the paper prints, at least one."""
        if self.spec.decimals is not None:
            return self.spec.decimals
        return max([value.decimals for value in self.published.values()] + [1])

    def places(self) -> list[tuple[str, str]]:
        """The (row, column) of every cell in table order; rows that only the paper has, e.g. chance, come first."""
        if not self.config.baseline:
            return list(self.published)
        known = [row for row, column in self.published if column in self.spec.columns and row not in self.spec.rows]
        only = [(r, c) for r in dict.fromkeys(known) for c in self.spec.columns if (r, c) in self.published]
        return only + [(row, column) for row in self.spec.rows for column in self.spec.columns]

    def is_speedup(self, column: str) -> bool:
        """Whether a column has ratios of the rows to one of them, and no runs of its own."""
        return "speedup_over" in self.spec.columns.get(column, ())

    def points_of(self, row: str, column: str) -> list[Mapping[str, Any]]:
        """The points that the grid of this scale has for a cell.

        A key that a point leaves at its default may have the wanted value, so only a stated value excludes a point.
        """
        wanted = {**self.spec.rows[row], **self.spec.columns[column]}
        length = slice_part(wanted.get("slice", ""), "length")
        # the cells of a row ask for the same values again and again
        fitting = self._all.intersection(*(self._having(key, value) for key, value in wanted.items()))
        points = [self.points[i] for i in sorted(fitting)]
        return [p for p in points if length in p.get("bench.lengths", p.get("speed.lengths", [length]))]

    @cached_property
    def outside(self) -> list[str]:
        """Columns of the table of which this scale has no cell."""
        rows, columns = self.spec.rows, self.spec.columns
        return [column for column in columns if not any(self.points_of(row, column) for row in rows)]

    @cached_property
    def _all(self) -> frozenset[int]:
        return frozenset(range(len(self.points)))

    @cached_property
    def _found(self) -> dict[tuple[str, str], frozenset[int]]:
        return {}

    def _having(self, key: str, value: Any) -> frozenset[int]:
        """Places of the points that have a value under a key, or leave it at its default."""
        known = self._found.get((key, repr(value)))
        if known is None:
            known = frozenset(i for i, point in enumerate(self.points) if same(value, point.get(key, value)))
            self._found[key, repr(value)] = known
        return known

    def setting(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The values of `table.mean_over` in a resolved run."""
        return tuple(str(lookup(config, key)) for key in self.spec.mean_over)

    def num_settings(self, row: str, column: str) -> int:
        """Number of settings of `table.mean_over` that the grid of this scale has for a cell."""
        return self._count(row, column, self.spec.mean_over)

    def num_values(self, row: str, column: str) -> int:
        """Number of values of `select.best_of` that the grid of this scale has for a cell."""
        return self._count(row, column, self.config.select.best_of if self.config.select else ())

    def _count(self, row: str, column: str, keys: Sequence[str]) -> int:
        return len({tuple(str(point.get(key)) for key in keys) for point in self.points_of(row, column)})


def make_plan(config: ExperimentConfig, folder: Path, scale: str) -> Plan:
    """The plan of one experiment; `folder` is where expected.csv may lie."""
    grid = points(config, scale)
    published = read_expected(folder / "expected.csv")
    spec = config.table or (plain_table(config, grid) if config.baseline else published_table(published))
    check_table(config, scale, str(folder / "grid.yaml"))
    plan = Plan(config, spec, scale, grid, published)
    _check_published(plan, folder / "expected.csv")
    return plan


def _check_published(plan: Plan, path: Path) -> None:
    """Raises ValueError for a published number in another unit than that in which its column shows ours.

    So it does where the number and the metric of its column contradict each other on which direction is better, and
    where its row or column differs from one of the table in spaces or capitals only: it would stand in no cell.
    """
    units = {name: unit_shown([domain.unit], plan.spec.percent) for name, domain in METRICS.items() if domain.unit}
    known = {"%", *units.values(), *(domain.unit for domain in METRICS.values())}
    for (row, column), value in plan.published.items() if plan.config.baseline else ():
        for kind, name, names in (("row", row, plan.spec.rows), ("column", column, plan.spec.columns)):
            if name not in names and (meant := next((other for other in names if _plain(other) == _plain(name)), "")):
                raise ValueError(f"{path}: the table has no {kind} {name!r}, but {meant!r}; write both alike")
        if column not in plan.spec.columns:
            continue
        metric = "" if plan.is_speedup(column) else plan.spec.of(column, "metric")
        unit = units.get(metric) if metric else "x"
        # a unit in the paper's own words, such as `ppl` or `x`, is taken for ours
        if unit and value.unit and value.unit != unit and value.unit in known:
            raise ValueError(
                f"{path}: {row} | {column}: its unit is {value.unit}, and the table shows {unit}; convert the number, "
                "or change metric or percent of the table"
            )
        lower = smaller_is_better(metric)
        if value.better and lower is not None and lower != (value.better == "lower"):
            raise ValueError(
                f"{path}: {row} | {column}: better is {value.better}, and of {metric} a "
                f"{'smaller' if lower else 'larger'} value is better; correct it, or the metric of the table"
            )


def _plain(name: str) -> str:
    return "".join(name.split()).casefold()


def pick_scale(config: ExperimentConfig, stored: Collection[str], asked: str | None) -> str:
    """The scale asked for; without one, `paper` if it has runs, else the first that has, else the first that can run.

    stored: the scales that have runs. ValueError where the grid has no scale of the asked name.
    """
    if asked is not None:
        if asked not in config.scales:
            names = ", ".join(config.scales)
            raise ValueError(f"unknown scale {asked!r}{nearest(asked, config.scales)}; there are: {names}")
        return asked
    order = sorted(config.scales, key=lambda name: name != "paper")
    return next((name for name in order if name in stored), next(iter([*config.runnable, *config.scales])))


def plain_table(config: ExperimentConfig, grid: Sequence[Mapping[str, Any]]) -> TableSpec:
    """The table of a grid that states none.

    Where two settings change between points, one is that of the rows and the other that of the columns, which is the
    one that stands last in the sweep. Where the figure's x axis is a setting that changes, that is always the one of
    the columns, and there is a row for every combination of the others, so that each is a line of the figure. Else
    there is a row for every point, named by what changes, with the one column `accuracy`, or, where the grid times
    something, a column for every length.
    """
    hidden = config.select.best_of if config.select else ()
    varying = [
        key
        for key in dict.fromkeys(key for point in grid for key in point)
        if key not in hidden and len({str(point.get(key)) for point in grid}) > 1
    ]
    # a point begins with the settings of the baseline, whatever their order in the sweep
    swept = [
        key
        for axis, values in config.sweep.items()
        for value in values
        for key in (value if isinstance(value, Mapping) else [axis])
    ]
    places = {key: place for place, key in enumerate(dict.fromkeys(swept))}
    x = config.figure.x if config.figure else None
    varying.sort(key=lambda key: (key == x, places.get(key, 0)))

    def label(point: Mapping[str, Any], keys: Sequence[str]) -> str:
        if len(keys) == 1 and isinstance(point.get(keys[0]), (str, int, float)):
            return str(point[keys[0]])
        return ", ".join(f"{key}={point[key]}" for key in keys if key in point) or "all"

    def rows(keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {label(point, keys): {key: point[key] for key in keys if key in point} for point in grid}

    if config.timed:
        stated = [point[key] for point in grid for key in ("bench.lengths", "speed.lengths") if key in point]
        lengths = dict.fromkeys(length for values in stated for length in values)
        columns: dict[str, dict[str, Any]] = {f"T={length}": {"slice": f"length={length}"} for length in lengths}
        return TableSpec(rows=rows(varying), columns=columns, metric="time", split="", percent=False, decimals=4)
    if varying and (len(varying) == 2 or x in varying):
        *others, last = varying
        if x == last:
            # a setting that changes only with x, such as steps that depend on the length, makes no further lines
            others = [key for key in others if not _follows(key, x, grid)]
        name = last.rpartition(".")[2]
        if all(isinstance(point.get(last), (str, int, float)) for point in grid):
            return TableSpec(
                rows=rows(others), columns={f"{name} {point[last]}": {last: point[last]} for point in grid}
            )
    return TableSpec(rows=rows(varying), columns={"accuracy": {}})


def _follows(key: str, x: str, grid: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a setting has one value for each value of another."""
    return len({(str(point.get(x)), str(point.get(key))) for point in grid}) == len({str(p.get(x)) for p in grid})


def published_table(published: Mapping[tuple[str, str], Published]) -> TableSpec:
    """The table of a grid that has no runs: the rows and columns of expected.csv, which select nothing."""
    rows: dict[str, dict[str, Any]] = {row: {} for row, _ in published}
    columns: dict[str, dict[str, Any]] = {column: {} for _, column in published}
    return TableSpec(rows=rows, columns=columns, percent={value.unit for value in published.values()} == {"%"})


DIRECTIONS = ("higher", "lower", "")
"""The column `better` of expected.csv has one of these words, or is empty."""


def read_expected(path: Path) -> dict[tuple[str, str], Published]:
    """(row, column) to the published value; empty where there is no file. ValueError names a line that is wrong."""
    found = {}
    for where, line in read_table(path, ("row", "column", "value", "unit", "better", "note", "source")):
        if line["better"] not in DIRECTIONS:
            raise ValueError(f"{where}: better is {line['better']!r}; write higher, lower or nothing")
        if (line["row"], line["column"]) in found:
            raise ValueError(f"{where}: {line['row']} | {line['column']} has a number already; leave one of them out")
        found[line["row"], line["column"]] = Published(
            value=number_in(line["value"], where) if line["value"] else None,
            decimals=len(line["value"].partition(".")[2]),
            unit=line["unit"],
            better=line["better"],
            note=line["note"],
            source=line["source"],
            hardware=line.get("hardware", ""),
            follows=line.get("follows", ""),
        )
    return found


def number_in(text: str, where: str, column: str = "value") -> float:
    """Returns the number that the text in a column stands for. Raises ValueError where it is none."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {column} is {text!r}, no number; leave it empty, and give the reason as the note")
    return number
