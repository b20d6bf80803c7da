"""The words of a figure: what it found as its title, and a caption that says of what each value is the best.

A finding about the seeds that succeed is printed only where it is the same for every threshold of `STRICTNESS`, so that
it does not hang on the one that the grid chose.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from subquad.reports.render.document import EPOCH_ON_TEST, REDUCED, SELECTED_ON_TEST, STAND_IN
from subquad.reports.render.judge import Cell
from subquad.reports.render.report import Report
from subquad.reports.render.selection import training_times
from subquad.suite.metrics import smaller_is_better

STRICTNESS = (90.0, 95.0, 99.0)
"""Thresholds of success, in percent, at all of which a finding must hold."""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SETTINGS = {
    "train.lr": "learning rate",
    "train.weight_decay": "weight decay",
    "train.epochs": "number of epochs",
    "train.dropout": "dropout",
}
"""Dotted keys of `select.best_of` in words."""
SPLITS = {"valid": "validation", "test": "test", "train": "training", "test-last": "test"}
DECIDED = ("agrees", "better", "unclear", "unstable", "worse", "differs")
"""Verdicts on a cell that compare it with the paper."""


@dataclass(frozen=True)
class Words:
    """Title, the line below it, the label of the axis of values, and the note below the panels."""

    title: str
    details: str
    x_label: str
    note: str


def words_of(report: Report, notes: Sequence[str] = ()) -> Words:
    """The words of the figure of a report; notes are put before the caption."""
    title = report.title[:1].upper() + report.title[1:]
    agreeing, found = agreement(report), finding(report)
    kind = reduced_words(report)
    headline, details = title, [agreeing]
    if found and not agreeing:
        # a finding that fits behind the title stands there, a longer one above it
        joined = f"{title}: {found}"
        headline, details = (joined, []) if len(joined) <= LONGEST else (_sentence(found), [title])
    below = ". ".join(map(_sentence, filter(None, (*details, kind))))
    return Words(headline, below, value_label(report), " ".join([*notes, caption(report)]))


def unknown(report: Report, drawn: Mapping[str, Collection[str]]) -> list[str]:
    """A sentence for each cost, to the rows that are drawn against it, of which some rows with values are not."""
    rows = list(dict.fromkeys(cell.row for cell in report.cells if cell.values))
    lost = {label: [row for row in rows if row not in found] for label, found in drawn.items()}
    return [f"Not known: {label} of {', '.join(names)}." for label, names in lost.items() if names]


LONGEST = 90
"""Number of letters up to which title and finding are one line."""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def reduced_words(report: Report) -> str:
    """The reasons why the rows are no repetition of the paper's: a reduced scale, stand-in data; empty without any."""
    marks = {mark for cell in report.cells for mark in cell.marks}
    # a grid of our own has no numbers to compare with
    compared = f", not comparable with the {report.spec.reference}" if report.config.source is not None else ""
    words = {REDUCED: f"reduced scale ({report.scale}){compared}"}
    words[STAND_IN] = "stand-in data"
    return "; ".join(text for mark, text in words.items() if mark in marks)


def value_label(report: Report) -> str:
    """The axis of values in words, with its unit: `test accuracy (%)`."""
    columns = {cell.column for cell in report.cells if cell.values} or set(report.spec.columns)
    metrics = {report.spec.of(column, "metric") for column in columns}
    splits = {report.spec.of(column, "split") for column in columns}
    if len(metrics) > 1:
        return "value"
    metric = metrics.pop().replace("_", " ")
    split = SPLITS.get(splits.pop(), "") if len(splits) == 1 else ""
    better = smaller_is_better(metric.replace(" ", "_")) or False
    brackets = ", ".join([report.unit] * bool(report.unit) + ["lower is better"] * better)
    return f"{split} {metric}".strip() + (f" ({brackets})" if brackets else "")


def on_the_way_label(report: Report) -> str:
    """The same of a figure of evaluations on the way: `validation bits per byte (lower is better)`."""
    spec = report.figure.spec
    lower = " (lower is better)" if smaller_is_better(spec.y) else ""
    return spec.y_label or f"{SPLITS[spec.split]} {spec.y.replace('_', ' ')}{lower}"


def finding(report: Report) -> str:
    """A sentence on the number of rows that succeed in every column with every seed; none if it depends on the
    threshold."""
    select = report.config.select
    if select is None or select.success is None or report.unit != "%":
        return ""
    columns = {cell.column for cell in report.cells if cell.values and cell.unit == "%"}
    rows: dict[str, list[Cell]] = {}
    for cell in report.cells:
        if cell.column in columns and cell.values:
            rows.setdefault(cell.row, []).append(cell)
    complete = {row: cells for row, cells in rows.items() if len(cells) == len(columns)}
    if len(complete) < 2 or min(len(cell.values) for cells in complete.values() for cell in cells) < 2:
        return ""

    def solving(threshold: float) -> list[str]:
        # a run without a value has not solved anything
        whole = {row: cells for row, cells in complete.items() if not any(cell.lost for cell in cells)}
        return [row for row, cells in whole.items() if min(v for c in cells for v in c.values) >= threshold]

    tasks = all("task.name" in report.spec.columns[column] for column in columns)
    noun = "task" if tasks else "setting"
    what = f"all {_number(len(columns))} {noun}s" if len(columns) > 1 else f"the {noun}"
    found = [solving(threshold) for threshold in sorted({*STRICTNESS, select.success})]
    most = max(map(len, found))
    if not most:
        return f"no model solves {what} with every seed"
    if all(rows == found[0] for rows in found):
        who = "every model" if most == len(complete) else f"{_number(most)} of {len(complete)} models"
        return f"{who} {'solves' if who.startswith(('every', 'one')) else 'solve'} {what} with every seed"
    # a bound that holds for every threshold says something only where it is far from all rows
    few = (
        f"at most {_number(most)} of {len(complete)} models {'solves' if most == 1 else 'solve'} {what} with every seed"
    )
    return few if 4 * most <= len(complete) else ""


def agreement(report: Report) -> str:
    """A sentence on the number of cells that agree with the paper, of those with a verdict; empty without any."""
    decided = [cell for cell in report.cells if cell.verdict in DECIDED]
    if not decided:
        return ""
    counts = Counter(cell.verdict for cell in report.cells)
    better, others = counts["better"], counts["at chance"]
    more = f"; {better} {'is' if better == 1 else 'are'} better" if better else ""
    chance = f"; {others} more {'is' if others == 1 else 'are'} at chance" if others else ""
    noun = "number agrees" if len(decided) == 1 else "numbers agree"
    return f"{counts['agrees']} of {len(decided)} {noun} with the {report.spec.reference}{more}{chance}"


def _number(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def caption(report: Report) -> str:
    """Over how many seeds the values are, of what each is the best, by which rows, and on which devices."""
    measured = [cell for cell in report.cells if cell.values]
    parts = []
    if measured and not report.timed:
        counts = sorted({len(cell.values) for cell in measured})
        span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        # the table beside such a figure has means
        drawn = "Medians of " if report.figure.spec.kind == "lines" else ""
        parts.append("One seed in each cell." if counts == [1] else f"{drawn}{span} seeds in each cell.")
    if report.timed:
        parts.append("Median of raw samples.")
    select = report.config.select
    if select is not None and any(cell.chosen for cell in measured):
        names = " and ".join(SETTINGS.get(key, key) for key in select.best_of)
        tried = max(
            (int(n) for cell in measured for n in re.findall(r"best of (?:\d+ to )?(\d+)", cell.chosen)), default=0
        )
        split = SPLITS[select.split]
        on_test = any(SELECTED_ON_TEST in cell.marks for cell in measured)
        rows = ", which are the test rows" if on_test and select.split != "test" else ""
        by = select.by.replace("_", " ")
        # a single value is not the best of several
        parts += [f"Best {names} of up to {tried} by {by} on {split}{rows}."] * (tried > 1)
    if any(EPOCH_ON_TEST in cell.marks for cell in measured):
        parts.append("Best epoch, chosen on the test rows.")
    if times := training_times(report.runs):
        parts.append(f"Each run trained for {times}.")
    parts += [f"Not run: {absent(report)}."] * bool(measured and absent(report))
    if diverged := dict.fromkeys(cell.row for cell in report.cells if "diverged" in dict(cell.failures)):
        parts.append(f"Diverged: runs of {_named(list(diverged), len(report.spec.rows))}.")
    devices = devices_of(report)
    if devices:
        parts.append(f"Measured on {' and '.join(devices)}.")
    return " ".join(parts)


MOST_NAMES = 5
"""Number of rows up to which a caption names them, as those without a run."""


def absent(report: Report) -> str:
    """The rows of the grid without any run, by their names or, where these are many, by their number.

    A figure that drew them would show them last, as if they were the worst.
    """
    asked = {row: [cell for cell in report.cells if cell.row == row and cell.planned] for row in report.spec.rows}
    rows = [row for row, cells in asked.items() if cells and all(cell.missing for cell in cells)]
    return _named(rows, len(report.spec.rows))


def _named(rows: Sequence[str], count: int) -> str:
    return ", ".join(rows) if len(rows) <= MOST_NAMES else f"{len(rows)} of {count} rows"


def devices_of(report: Report) -> list[str]:
    """The devices of the runs shown, without how many runs shared one."""
    return sorted({run.processor for run in report.runs if run.device})
