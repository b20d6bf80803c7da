"""Documents quote numbers from stored rows: a test compares them, and `report --update-docs` rewrites them.

A comment that begins with an equals sign is the key of a query in `quotes.csv` beside the document. Readers of the page
do not see it:

    H3 reaches 99.5 ± 1.2 % (paper: 100.0).<!--= 7 -->

    key,experiment,scale,query
    7,h3/table2,paper,H3 | Induction Head acc | mean & sd & paper

It belongs to as many numbers before it, of the same table line or paragraph, as its query has values. Numbers in code
spans do not count, nor do those that are part of a word, as in `T2048` or `2^20`. Without an experiment the query is of
the one whose README quotes it, and without a scale of `paper`. The sources of a query are separated by `;`:

- `row | column | what`: a cell of the report. `what` is `mean` (the default), `sd`, `median`, `paper`, `seeds` (the
  value of every seed, in the order of the seeds), `count` (number of seeds) or `successes`. Several rows, columns or
  `what` are joined by ` & `; the last one changes first.
- `row | column | train.lr`: the value of `select.best_of` that a cell shows; no number, so no comparison, until all
  values of the grid have rows. A `grid.yaml` quotes by it the rates that another of its scales has chosen.
- `row | column / row | column`: the ratio of two means.
- `tried row | column`: runs of a cell that succeed at every value of `select.best_of`, in ascending order.
- `claims`: how many claims hold, fail, are unclear and are not run, in this order.
- `count name | what`: a number of `reports/render/count.py` (several are joined by ` & `) of an experiment, of all
  experiments of a folder, or of the `four papers`.
- `runs key=value ...`: test accuracy (%) of the stored runs with these settings, seed by seed, probes included;
  `seed=3` keeps one seed, `slice=length=512` takes a part of the test rows, `split=valid step=600` a validation
  during training, `metric=macro_accuracy` another metric.
- `bench operator | implementation | case | metric | device`: newest row of `bench`. `metric` is `time` (ms) if left
  out. `device` is a part of a device's name; if left out, the device that has the most rows is meant.
- `peer operator | implementation | shape | column`: a line of `results/peers.csv`.

The results tables of documents need no keys. They have one number of each experiment, chosen by rule
(`count.headline`):

    | [experiment](folder) | [scale](folder of its rows) | row | column | unit | paper | ours | claims |

`ours` is the mean of a cell with its standard deviation and marks, and that of the last epoch where the best one was
chosen on test; `claims` says how many hold, fail, are unclear and are not run. A dash stands for what is not there.
The README has the same of few experiments in five columns, at the paper's scale:

    | [experiment](folder) | row: column (unit) | paper | ours | claims |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from subquad.reports.render.count import (
    CLAIMS,
    PAPERS,
    SHARED,
    claims_text,
    count,
    headline,
    prefix,
    scale_to_count,
    total,
)
from subquad.reports.render.document import DASH, shown
from subquad.reports.render.floors import with_floors
from subquad.reports.render.layout import last_text, ours_text, paper_text
from subquad.reports.render.plan import number_in, pick_scale, read_table
from subquad.reports.render.report import Report, report_of
from subquad.reports.render.rows import StoredRun, load_runs, rows_of
from subquad.suite.settings.config import find_experiments, load_experiment
from subquad.suite.settings.grid import lookup, same
from subquad.suite.store import storage

QUOTE = re.compile(r"<!--= (\S+) -->")
NUMBER = re.compile(r"(?<![\w^.,/=-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w^]|[.,/]\d)")
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)


class Query(NamedTuple):
    """The sources of one key, and the experiment and scale that they are of."""

    experiment: str
    scale: str
    sources: str


@dataclass(frozen=True)
class Quote:
    """One number of a document and the value that its source gives."""

    start: int
    end: int
    text: str
    value: float
    query: str

    @property
    def current(self) -> str:
        """The value with as many decimals, and with the separator of thousands, that the text has."""
        decimals = len(self.text.partition(".")[2])
        return f"{self.value:{',' if ',' in self.text else ''}.{decimals}f}"


def read_queries(path: Path, experiment: str = "") -> dict[str, Query]:
    """The queries of a `quotes.csv` by their keys; ValueError for a key that stands twice.

    experiment: the one that is meant where a line names none.
    """
    found: dict[str, Query] = {}
    for where, line in read_table(path, ["key", "experiment", "scale", "query"]):
        if line["key"] in found:
            raise ValueError(f"{where}: the key {line['key']} stands twice; give each query its own")
        found[line["key"]] = Query(line["experiment"] or experiment, line["scale"] or "paper", line["query"])
    return found


def quotes(text: str, queries: Mapping[str, Query], source: CommittedRows) -> list[Quote]:
    """Every quoted number of a document, in order.

    ValueError for a key without a query, and where more values are named than numbers stand before.
    """
    found: list[Quote] = []
    used = 0
    hidden = [match.span() for match in CODE.finditer(text)]
    numbers = [match for match in NUMBER.finditer(text) if not any(a <= match.start() < b for a, b in hidden)]
    spans = [match.span() for match in CODE.finditer(text) if match.group().startswith("`")]
    for comment in QUOTE.finditer(text):
        if any(a < comment.start() < b for a, b in spans):
            continue
        if comment[1] not in queries:
            raise ValueError(f"<!--= {comment[1]} --> has no line with this key in the quotes.csv beside its document")
        query = queries[comment[1]]
        values = list(_values(query, source))
        begin = max(used, _block_start(text, comment.start()))
        before = [number for number in numbers if begin <= number.start() < comment.start()]
        if len(before) < len(values):
            raise ValueError(
                f"{query.sources!r} gives {len(values)} values, and only {len(before)} numbers stand before it"
            )
        for number, value in zip(before[len(before) - len(values) :], values, strict=True):
            found.append(Quote(number.start(), number.end(), number.group(), value, query.sources))
        used = comment.end()
    return found


def updated(text: str, quoted: list[Quote]) -> str:
    """The text with every quoted number as its source has it now."""
    for quote in reversed(quoted):
        text = text[: quote.start] + quote.current + text[quote.end :]
    return text


def _block_start(text: str, at: int) -> int:
    """Start of the table line, or else of the paragraph, that holds a place."""
    line = text.rfind("\n", 0, at) + 1
    return line if text.startswith("|", line) else text.rfind("\n\n", 0, at) + 1


def _values(query: Query, source: CommittedRows) -> Iterator[float]:
    for term in query.sources.split(";"):
        yield from _term(term.strip(), source, query.experiment, query.scale)


def _term(term: str, source: CommittedRows, experiment: str, scale: str) -> list[float]:
    kind, _, rest = term.partition(" ")
    parts = [part.strip() for part in rest.split("|")]
    if term == "claims":
        return [float(count) for count in source.claims(experiment, scale)]
    if kind == "tried":
        return source.tried(experiment, scale, *parts)
    if kind == "runs":
        return source.runs(experiment, scale, dict(pair.partition("=")[::2] for pair in rest.split()))
    if kind == "count":
        counts = source.count(parts[0])
        return [float(counts[name]) for name in parts[1].split(" & ")]
    if kind in ("bench", "peer"):
        least, most = (3, 5) if kind == "bench" else (4, 4)
        if not least <= len(parts) <= most:
            raise ValueError(f"{term!r} has {len(parts)} parts between bars, not {least} to {most}")
        return [source.bench(*parts) if kind == "bench" else source.peer(*parts)]
    if " / " in term:
        above, below = (_term(side.strip(), source, experiment, scale) for side in term.split(" / "))
        return [above[0] / below[0]]
    cells = [part.strip().split(" & ") for part in term.split("|")]
    if not 2 <= len(cells) <= 3:
        raise ValueError(f"{term!r} has {len(cells)} parts between bars, not 2 or 3: row | column | what of the cell")
    places = product(*(cells if len(cells) == 3 else [*cells, ["mean"]]))
    return [value for place in places for value in source.cell(experiment, scale, *place)]


LINE = re.compile(
    r"^\| \[(?P<experiment>[^]]+)\]\((?:\.\./)?reports/(?P=experiment)/\) "
    r"\| \[(?P<scale>\w+)\]\((?:\.\./)?results/reference/(?P=experiment)/(?P=scale)/\) "
    r"\| (?P<row>[^|]+) \| (?P<column>[^|]+) \| (?P<unit>[^|]+) \| (?P<paper>[^|]+) \| (?P<ours>[^|]+) "
    r"\| (?P<claims>[^|]+) \|$",
    re.MULTILINE,
)


SHORT = re.compile(
    r"^\| \[(?P<experiment>[^]]+)\]\(reports/(?P=experiment)/\) "
    r"\| (?P<cell>(?!\[)[^|]+) \| (?P<paper>[^|]+) \| (?P<ours>[^|]+) \| (?P<claims>[^|]+) \|$",
    re.MULTILINE,
)


def rewritten(text: str, report: Callable[[str, str], Report]) -> str:
    """The text with the cell, numbers, marks and claims of every line as the reports have them.

    report: gives the report of an experiment at a scale. Raises ValueError for a line whose report has no number.
    """
    text = LINE.sub(lambda line: _results_line(line, report(line["experiment"], line["scale"])), text)
    return SHORT.sub(lambda line: _short_line(line, report(line["experiment"], "paper")), text)


def _short_line(line: re.Match[str], report: Report) -> str:
    row, column, unit, paper, ours, claims = _numbers(report, "")
    # an outcome that no claim has is left out
    said = " · ".join(part for part in claims.split(" · ") if not part.startswith("0 "))
    new = (f"{row}: {column}" + (f" ({unit})" if unit else ""), paper, ours, said or DASH)
    return line[0][: line.start("cell") - line.start()] + " | ".join(new) + " |"


def _results_line(line: re.Match[str], report: Report) -> str:
    return line[0][: line.start("row") - line.start()] + " | ".join(_numbers(report, line["unit"])) + " |"


def _numbers(report: Report, unit: str) -> tuple[str, str, str, str, str, str]:
    """Row, column, unit, the paper's number, ours and the claims of the cell that stands for an experiment.

    unit: the one of a cell that has none.
    """
    cell = headline(report)
    if cell is None:
        raise ValueError(f"{report.experiment}, {report.scale} has no number")
    words = [report.spec.reference] * (report.spec.reference != "paper") + [cell.verdict] * (cell.verdict in SHARED)
    paper = paper_text(cell) if cell.published and cell.published.value is not None else ""
    last = last_text(cell, report.decimals)
    return (
        cell.row,
        cell.column,
        cell.unit or unit,
        paper + (f" ({', '.join(words)})" if words else "") if paper else DASH,
        ours_text(cell, report.decimals) + (f" (last epoch {last})" if last else ""),
        claims_text(count(report), prefix(report)) or DASH,
    )


class CommittedRows:
    """The committed results as the source of quoted numbers. Each method raises ValueError for what it does not have.

    experiments: name to the path of its grid.yaml.
    """

    def __init__(self, results: Path, experiments: Mapping[str, Path]) -> None:
        self.results, self.experiments = results, experiments
        # a document quotes many cells of few reports
        self.report = cache(self._report)
        self.stored = cache(self._stored)
        self.having = cache(self._having)
        self.committed = cache(self._committed)
        self.kernels = cache(self._kernels)
        self.timings = cache(self._timings)
        self.config = cache(lambda experiment: load_experiment(self.experiments[experiment]))

    def _committed(self, experiment: str) -> list[StoredRun]:
        return load_runs(rows_of(storage.files([self.results / "reference"], experiment)))

    def _kernels(self) -> pd.DataFrame:
        # beside the shapes of `bench` lie sweeps of configurations, which measure no revision
        files = storage.files([self.results / "reference"], "kernels")
        return with_floors(storage.read([path for path in files if path.parent.name in ("paper", "quick")]))

    def _timings(self) -> tuple[str, dict[tuple[str, ...], list[tuple[str, float]]]]:
        """The device that has the most rows, and device and value of each measurement, the newest last."""
        rows = self.kernels()
        usable = rows[rows["status"] == "ok"].sort_values("started_at")
        found: dict[tuple[str, ...], list[tuple[str, float]]] = {}
        for *key, device, value in zip(
            *(usable[name] for name in ("task", "model", "slice", "metric", "device", "value")), strict=True
        ):
            found.setdefault(tuple(key), []).append((device, value))
        return rows["device"].mode()[0], found

    def _report(self, experiment: str, scale: str) -> Report:
        if experiment not in self.experiments:
            raise ValueError(f"there is no experiment {experiment!r}")
        folder, runs = self.experiments[experiment].parent, self.committed(experiment)
        return report_of(self.config(experiment), folder, experiment, runs, scale=scale)

    def _stored(self, experiment: str, scale: str) -> list[StoredRun]:
        probes = load_runs(rows_of(storage.files_below(self.results / "reference" / "probes" / experiment)))
        runs = self.committed(experiment)
        # a probe can have become a run of the grid since, and then be stored again
        known = {run.run_id for run in runs}
        return [run for run in runs + [probe for probe in probes if probe.run_id not in known] if run.scale == scale]

    def cell(self, experiment: str, scale: str, row: str, column: str, what: str) -> list[float]:
        report = self.report(experiment, scale)
        cells, published = report.cells, report.published.get((row, column))
        found = next((cell for cell in cells if (cell.row, cell.column) == (row, column)), None)
        if found is None:
            known = " or ".join(sorted({cell.row for cell in cells} if row else {cell.column for cell in cells}))
            raise ValueError(f"{experiment}, {scale}: no cell {row!r} | {column!r}; rows are {known}")
        values: dict[str, float | None] = {
            "mean": found.mean,
            "sd": found.sd,
            "median": found.median,
            "paper": None if published is None else published.value,
            "count": float(found.num_seeds),
            "successes": None if found.successes is None else float(found.successes),
        }
        if what == "seeds":
            return list(found.values)
        select = self.report(experiment, scale).config.select
        if select is not None and what in select.best_of:
            # `best of 2 of 3` is not the choice yet
            chosen = re.search(rf"(?:^|, ){re.escape(what)}=([^,\s]+).*\(best of \d+\)$", found.chosen)
            return [float(chosen[1])] if chosen else []
        if what not in values:
            settings = select.best_of if select is not None else ()
            raise ValueError(f"{what!r} is not one of {', '.join([*values, 'seeds', *settings])}")
        value = values[what]
        if value is None:
            raise ValueError(f"{experiment}, {scale}: {row} | {column} has no {what}")
        return [value]

    def tried(self, experiment: str, scale: str, row: str, column: str) -> list[float]:
        for found in self.report(experiment, scale).sensitivity:
            if (found.row, found.column) == (row, column):
                return [float(successes) for _, successes, _ in found.tried]
        raise ValueError(f"{experiment}, {scale}: {row!r} | {column!r} has no runs at several values of a setting")

    def claims(self, experiment: str, scale: str) -> list[int]:
        report = self.report(experiment, scale)
        counts = count(report)
        return [counts[prefix(report) + name] for name in CLAIMS]

    def count(self, name: str) -> Mapping[str, int]:
        """The count of an experiment, of all experiments of a folder, or of the `four papers`."""
        folders = PAPERS if name == "four papers" else (name,)
        named = [known for known in self.experiments if known == name or known.partition("/")[0] in folders]
        if not named:
            raise ValueError(f"count: there is no experiment and no folder {name!r}")
        return total(map(self._counted, named))

    def _counted(self, experiment: str) -> Mapping[str, int]:
        config = self.config(experiment)
        stored = {run.scale for run in self.committed(experiment)}
        scale = pick_scale(config, stored, scale_to_count(config))
        others = [self.report(experiment, other) for other in sorted(stored - {scale}) if other in config.scales]
        return count(self.report(experiment, scale), others)

    def _having(self, experiment: str, scale: str, key: str) -> list[tuple[object, set[int]]]:
        """The values that runs have under a key, each with the places of its runs in `stored`."""
        found: dict[str, tuple[object, set[int]]] = {}
        for place, run in enumerate(self.stored(experiment, scale)):
            value = lookup(run.config, key)
            found.setdefault(repr(value), (value, set()))[1].add(place)
        return list(found.values())

    def runs(self, experiment: str, scale: str, selector: dict[str, str]) -> list[float]:
        wanted = dict(selector)
        part = wanted.pop("slice", "")
        split = wanted.pop("split", "test")
        step = wanted.pop("step", None)
        metric = wanted.pop("metric", "accuracy")
        stored = self.stored(experiment, scale)
        places = set(range(len(stored)))
        for key, text in wanted.items():
            sought = json_value(text)
            alike = (having for value, having in self.having(experiment, scale, key) if same(sought, value))
            places &= set().union(*alike)
        found = []
        for run in (stored[place] for place in sorted(places)):
            if run.status != "ok":
                continue
            value = run.find(metric, split, part, step=None if step is None else int(step))
            if value is not None and value.value is not None:
                found.append((run.seed, shown(value.value, value.unit, percent=True)))
        if not found or len({seed for seed, _ in found}) < len(found):
            raise ValueError(f"{experiment}, {scale}: {selector} selects {len(found)} runs, not one for every seed")
        return [value for _, value in sorted(found)]

    def bench(self, operator: str, implementation: str, case: str, metric: str = "time", device: str = "") -> float:
        commonest, timings = self.timings()
        wanted = operator, implementation, case, metric
        here = [v for name, v in timings.get(wanted, []) if (device in name if device else name == commonest)]
        if not here:
            raise ValueError(f"no row of {' | '.join(wanted)} on {device or 'the device that has the most rows'}")
        return here[-1]

    def peer(self, operator: str, implementation: str, shape: str, column: str) -> float:
        path = self.results / "peers.csv"
        for where, line in read_table(path, ("op", "implementation", "shape", column)):
            if (line["op"], line["implementation"], line["shape"]) == (operator, implementation, shape):
                return number_in(line[column], where, column)
        raise ValueError(f"{path}: has no {operator}, {implementation}, {shape}")


def json_value(text: str) -> object:
    """The value that a text stands for: `true`, a number, null, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def queries_of(path: Path, home: Path, source: CommittedRows) -> dict[str, Query]:
    """The queries beside a document; that of an experiment quotes this experiment unless a line says otherwise."""
    folder = path.parent.relative_to(home).as_posix().removeprefix("reports/")
    return read_queries(path.with_name("quotes.csv"), folder if folder in source.experiments else "")


def quoted(path: Path, home: Path, source: CommittedRows) -> list[Quote]:
    """The quoted numbers of one document."""
    return quotes(path.read_text(), queries_of(path, home, source), source)


def documents(home: Path) -> list[Path]:
    """The documents that quote numbers: those of the repository, of experiments and of operators, and the grids."""
    folders = ("docs", "kernels", "reports", "results")
    pages = (path for name in folders for path in sorted((home / name).rglob("*.md")))
    return [*sorted(home.glob("*.md")), *pages, *sorted((home / "reports").rglob("grid.yaml"))]


def update_documents(reports: Path) -> list[Path]:
    """Writes the quoted numbers and the results tables of all documents again; gives those that changed.

    A quote without a source raises ValueError before any document is written.

    reports: the folder of the experiments, in the home of the repository.
    """
    home = reports.resolve().parent
    source = CommittedRows(home / "results", find_experiments(reports))
    changed = {}
    for path in documents(home):
        text = path.read_text()
        new = rewritten(updated(text, quoted(path, home, source)), source.report)
        if new != text:
            changed[path] = new
    for path, new in changed.items():
        path.write_text(new)
    return list(changed)
