"""Numbers in documents that are quoted from stored rows: a test compares them, `report --update-docs` rewrites them.

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
- `row | column / row | column`: the ratio of two means.
- `tried row | column`: runs of a cell that succeed at every value of `select.best_of`, in ascending order.
- `claims`: how many claims hold, and how many are counted.
- `runs key=value ...`: test accuracy (%) of the stored runs with these settings, seed by seed, probes included;
  `seed=3` keeps one seed, `slice=length=512` takes a part of the test rows, `split=valid step=600` a validation
  during training, `metric=macro_accuracy` another metric.
- `bench operator | implementation | case | metric | device`: newest row of `bench`. `metric` is `time` (ms) if left
  out. `device` is a part of a device's name; if left out, the device that has the most rows is meant.
- `peer operator | implementation | shape | column`: a line of `results/peers.csv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple, Protocol

from reports.render.read_table import read_table

QUOTE = re.compile(r"<!--= (\S+) -->")
NUMBER = re.compile(r"(?<![\w^.,/=-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w^]|[.,/]\d)")
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)


class Query(NamedTuple):
    """The sources of one key, and the experiment and scale that they are of."""

    experiment: str
    scale: str
    sources: str


class Source(Protocol):
    """Where the values come from; each method raises ValueError for what it does not have."""

    def cell(self, experiment: str, scale: str, row: str, column: str, what: str) -> list[float]:
        """The values of one cell in the shown unit."""

    def tried(self, experiment: str, scale: str, row: str, column: str) -> list[float]:
        """Successes of one cell at every value of a setting."""

    def claims(self, experiment: str, scale: str) -> tuple[int, int]:
        """Claims that hold, and that are counted."""

    def runs(self, experiment: str, scale: str, selector: dict[str, str]) -> list[float]:
        """Test accuracy (or another metric, fractions in %) of stored runs, in the order of their seeds."""

    def bench(self, operator: str, implementation: str, case: str, metric: str = "time", device: str = "") -> float:
        """A measurement of an operator."""

    def peer(self, operator: str, implementation: str, shape: str, column: str) -> float:
        """A measurement of another project's operator."""


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


def quotes(text: str, queries: Mapping[str, Query], source: Source) -> list[Quote]:
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


def _values(query: Query, source: Source) -> Iterator[float]:
    for term in query.sources.split(";"):
        yield from _term(term.strip(), source, query.experiment, query.scale)


def _term(term: str, source: Source, experiment: str, scale: str) -> list[float]:
    kind, _, rest = term.partition(" ")
    parts = [part.strip() for part in rest.split("|")]
    if term == "claims":
        return [float(count) for count in source.claims(experiment, scale)]
    if kind == "tried":
        return source.tried(experiment, scale, *parts)
    if kind == "runs":
        return source.runs(experiment, scale, dict(pair.partition("=")[::2] for pair in rest.split()))
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
