"""The results tables of documents: one number of each experiment, which `report --update-docs` rewrites.

    | [experiment](folder) | [scale](folder of its rows) | row | column | unit | paper | ours | claims |

`ours` is the mean of a cell with its standard deviation and marks, `claims` how many claims hold, and how many are
counted. Numbers keep their decimals. A dash stands for what a cell or an experiment does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from reports.render.claims import tally
from reports.render.report import Report

LINE = re.compile(
    r"^\| \[(?P<experiment>[^]]+)\]\((?:\.\./)?reports/(?P=experiment)/\) "
    r"\| \[(?P<scale>\w+)\]\((?:\.\./)?results/reference/(?P=experiment)/(?P=scale)/\) "
    r"\| (?P<row>[^|]+) \| (?P<column>[^|]+) \| (?P<unit>[^|]+) \| (?P<paper>[^|]+) \| (?P<ours>[^|]+) "
    r"\| (?P<claims>[^|]+) \|$",
    re.MULTILINE,
)
OURS = re.compile(r"(?P<mean>[\d.]+)(?: ± (?P<sd>[\d.]+))?[†‡§¶*]*")
NONE = "—"


def rewritten(text: str, report: Callable[[str, str], Report]) -> str:
    """The text with the numbers, marks and claims of every line as the reports have them.

    report: gives the report of an experiment at a scale. Raises ValueError for a line whose cell is not in it.
    """
    return LINE.sub(lambda line: _line(line, report(line["experiment"], line["scale"])), text)


def _line(line: re.Match[str], report: Report) -> str:
    name = f"{line['experiment']}, {line['scale']}: {line['row']} | {line['column']}"
    found = next((cell for cell in report.cells if (cell.row, cell.column) == (line["row"], line["column"])), None)
    ours = OURS.fullmatch(line["ours"])
    if found is None or found.mean is None or ours is None:
        raise ValueError(f"{name} has no number")
    mean = _rounded(found.mean, ours["mean"])
    spread = "" if found.sd is None else f" ± {_rounded(found.sd, ours['sd'] or ours['mean'])}"
    paper = NONE
    if line["paper"] != NONE:
        if found.published is None or found.published.value is None:
            raise ValueError(f"{name} has no number of a paper")
        paper = _rounded(found.published.value, line["paper"])
    held, counted = tally(report.claims)
    new = {
        "paper": paper,
        "ours": mean + spread + "".join(found.marks),
        "claims": f"{held} of {counted}" if report.claims else NONE,
    }
    return line[0][: line.start("paper") - line.start()] + " | ".join(new.values()) + " |"


def _rounded(value: float, text: str) -> str:
    """A value with as many decimals as a text has."""
    return f"{value:.{len(text.partition('.')[2])}f}"
