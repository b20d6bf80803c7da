"""A report as text: terminal, markdown, LaTeX. All print the same grids of strings, so they cannot disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reports.render.table import COST_METRICS, UNPUBLISHED, Cell, Claim, Cost, Report

DASH = "—"


@dataclass(frozen=True)
class Grid:
    """A table of strings: a heading, a header, lines, and how many columns from the left are words."""

    heading: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    num_words: int
    run_ids: tuple[tuple[str, ...], ...]
    """The runs behind each line."""


@dataclass(frozen=True)
class Document:
    """What every format prints; `draw` gives its matplotlib figure, or None where there is none."""

    name: str
    title: str
    where: str
    grids: tuple[Grid, ...]
    notes: tuple[str, ...]
    """What stands under the first grid."""
    provenance: tuple[str, ...]
    draw: Callable[[], Any]


def document(report: Report) -> Document:
    """The report of an experiment, ready to print."""

    def figure() -> Any:
        # drawing needs matplotlib, which takes a second to import
        from reports.render.plots import draw

        return draw(report)

    title, where = heading(report)
    return Document(report.experiment, title, where, tuple(grids(report)), report.notes, report.provenance, figure)


def fixed(value: float, decimals: int, sign: bool = False) -> str:
    """A number with a fixed count of decimals and no negative zero."""
    text = f"{value:+.{decimals}f}" if sign else f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.replace("-", "+") if sign else text.lstrip("-")
    return text


def amount(value: float, binary: bool = False) -> str:
    """Three significant digits and a prefix: `74.1K`, `1.25M`; `2.50Gi` where binary."""
    base = 1024 if binary else 1000
    prefixes = ("", "Ki", "Mi", "Gi", "Ti") if binary else ("", "K", "M", "G", "T")
    power = 0
    while abs(value) >= base * 0.9995 and power < len(prefixes) - 1:
        value /= base
        power += 1
    decimals = 0 if power == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f}{prefixes[power]}"


def grids(report: Report) -> Iterator[Grid]:
    """The comparison, the claims and the costs of a report, each where it has lines."""
    comparison = report.has_published
    unit = f" ({report.unit})" if report.unit else ""
    seeds_or_spread = "spread" if report.timed else "seeds"
    header: tuple[str, ...] = ("row", "column", f"ours{unit}", seeds_or_spread)
    if comparison:
        header = ("row", "column", f"paper{unit}", f"ours{unit}", seeds_or_spread, "difference", "verdict")
    lines: list[tuple[str, ...]] = []
    for cell in report.cells:
        ours, seeds = _ours(cell, report.decimals), _spread(cell) if report.timed else _seeds(cell)
        if comparison:
            difference = "" if cell.difference is None else fixed(cell.difference, report.decimals, sign=True)
            lines.append((cell.row, cell.column, _paper(cell), ours, seeds, difference, cell.verdict))
        else:
            lines.append((cell.row, cell.column, ours, seeds))
    yield Grid("", header, tuple(lines), 2, tuple(cell.run_ids for cell in report.cells))
    if report.claims:
        claims = tuple((_verdict(claim), claim.text, claim.formula, claim.source) for claim in report.claims)
        yield Grid("Claims", ("verdict", "claim", "checked as", "source"), claims, 4, ((),) * len(claims))
    if report.costs:
        names = [name for name in COST_METRICS if any(name in cost.values for cost in report.costs)]
        titles = ("model", *(_cost_title(name) for name in names), "device")
        costs = tuple((c.label, *(_cost(c, name) for name in names), c.device) for c in report.costs)
        yield Grid("Cost: median [smallest, largest]", titles, costs, 1, tuple(cost.run_ids for cost in report.costs))


def _paper(cell: Cell) -> str:
    if cell.published is None:
        return ""
    if cell.published.value is not None:
        return fixed(cell.published.value, cell.published.decimals)
    word = cell.published.note.split(";")[0].split(" ")[0]
    return UNPUBLISHED.get(word, "")


def _ours(cell: Cell, decimals: int) -> str:
    if not cell.planned:
        return ""
    if cell.mean is None:
        text = ", ".join(kind for kind, _ in cell.failures) or DASH
    else:
        text = fixed(cell.mean, decimals) + ("" if cell.sd is None else f" ± {fixed(cell.sd, decimals)}")
    return text + "".join(cell.marks)


def _seeds(cell: Cell) -> str:
    if not cell.planned:
        return ""
    text = f"{cell.num_seeds}" if cell.num_seeds == cell.planned else f"{cell.num_seeds} of {cell.planned}"
    return "; ".join([text, *(f"{count} {kind}" for kind, count in cell.failures)])


def _spread(cell: Cell) -> str:
    return "" if cell.spread is None else f"{cell.spread:.1%}"


def _verdict(claim: Claim) -> str:
    detail = f" ({claim.detail})" if claim.detail else ""
    return f"{claim.verdict}{''.join(claim.marks)}{detail}"


def _cost_title(name: str) -> str:
    return {
        "num_parameters": "parameters",
        "state_size": "state size",
        "train_throughput": "train tokens/s",
        "inference_throughput": "inference tokens/s",
        "decode_throughput": "decode tokens/s",
        "peak_memory": "peak memory (B)",
        "peak_rss": "peak process memory (B)",
    }[name]


def _cost(cost: Cost, name: str) -> str:
    if name not in cost.values:
        return DASH
    middle, low, high = cost.values[name]
    if name in ("num_parameters", "state_size"):
        where = f" ({cost.length})" if name == "state_size" and cost.length else ""
        return f"{middle:,.0f}{where}"
    binary = name.startswith("peak")
    text = amount(middle, binary)
    return text if low == high else f"{text} [{amount(low, binary)}, {amount(high, binary)}]"


def heading(report: Report) -> list[str]:
    """Name and title, then source and scale."""
    named = f"source: {report.source}; " if report.source else ""
    return [f"{report.experiment}: {report.title}", f"{named}scale: {report.scale}"]


def _padded(grid: Grid, header: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    for line in (header, *lines):
        yield [
            text.ljust(width) if i < grid.num_words else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ]


def terminal(document: Document) -> str:
    """Aligned plain text; a row's name stands only where it changes."""
    out = [document.title, document.where, ""]
    for grid in document.grids:
        if grid.heading:
            out += ["", grid.heading]
        previous = ""
        lines = []
        for line in grid.lines:
            lines.append(("" if line[0] == previous and grid.num_words == 2 else line[0], *line[1:]))
            previous = line[0]
        first, *rest = (("  ".join(line)).rstrip() for line in _padded(grid, grid.header, lines))
        out += [first, "-" * max(map(len, (first, *rest))), *rest]
        if not grid.heading:
            out += ["", *document.notes]
    return "\n".join([*out, "", *document.provenance]).rstrip() + "\n"


def markdown(document: Document) -> str:
    """Pipe tables, which hosts of repositories show."""
    out = [f"# {document.title}", "", document.where, ""]
    for grid in document.grids:
        if grid.heading:
            out += ["", f"## {grid.heading}", ""]
        escaped = [[text.replace("|", "\\|") for text in line] for line in (grid.header, *grid.lines)]
        first, *rest = ("| " + " | ".join(line) + " |" for line in _padded(grid, escaped[0], escaped[1:]))
        rule = "|" + "|".join(" --- " if i < grid.num_words else " ---: " for i in range(len(grid.header))) + "|"
        out += [first, rule, *rest]
        if not grid.heading:
            out += ["", *(f"- {_starless(note)}" for note in document.notes)]
    out += ["", "## Provenance", "", *(f"- {line}" for line in document.provenance)]
    return "\n".join(out) + "\n"


def _starless(text: str) -> str:
    return text.replace("*", "\\*")


LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "±": r"$\pm$",
    "—": "---",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    "§": r"$^\S$",
    "*": r"$^*$",
}


def tex(text: str) -> str:
    """Text with every character that LaTeX reads as something else replaced."""
    return "".join(LATEX.get(character, character) for character in text)


def latex(document: Document) -> str:
    """A `tabular` a grid, for booktabs; the notes follow as a small paragraph, provenance as comments."""
    out = [f"% {line}" for line in (document.title, document.where, *document.provenance)]
    for grid in document.grids:
        out += ["", f"% {grid.heading}"] if grid.heading else [""]
        columns = "l" * grid.num_words + "r" * (len(grid.header) - grid.num_words)
        out += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        out += [" & ".join(map(tex, grid.header)) + r" \\", r"\midrule"]
        out += [" & ".join(map(tex, line)) + r" \\" for line in grid.lines]
        out += [r"\bottomrule", r"\end{tabular}"]
        if not grid.heading:
            out += ["", r"{\footnotesize", *(tex(note) + r"\\" for note in document.notes), "}"]
    return "\n".join(out) + "\n"
