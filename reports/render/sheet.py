"""The sheet that a figure is drawn on: width, letters, heading, legend and note, with room for each of them.

A figure is as wide as a column of a paper or as its page, and no letter is smaller than 6.5 points. Text is wrapped by
its measured width, so that nothing is cut. Above the panels are the title and the details under it, below them the
legend and the note; the panels share what is between.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

Width = Literal["column", "page"]
WIDTHS: Mapping[Width, float] = {"column": 3.3, "page": 7.0}
"""Widths of a figure in inches: one column of a paper of two columns, and its whole page."""
SMALL, TEXT, TITLE = 6.5, 7.0, 9.0
"""Sizes of letters, in points; none is smaller than the first."""
LINE = 1.15
"""Height of a line, in sizes of its letters."""
LINE_SPACING = 1.04 * LINE
"""The same for matplotlib, which counts without the part of a letter that is below its line."""
EDGE = 0.06
"""Free strip at each edge of a figure, in inches."""
GREY = "#555555"
STYLE: Any = {
    "svg.hashsalt": "subquad",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    # hinting moves letters to whole dots, so that a text is wider at one resolution than at another
    "text.hinting": "none",
    "font.size": TEXT,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.size": 2.0,
    "ytick.major.size": 2.0,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True)
class Heading:
    """The words around the panels of a figure."""

    title: str
    details: str = ""
    """Below the title."""
    x_label: str = ""
    """Below all panels."""
    y_label: str = ""
    """Beside all panels."""
    note: str = ""
    """Below the legend: what a mark means, of what each value is the best, on which rows, over how many seeds."""


WORD = re.compile(r"[^\s\[]*\[[^\]]*\]\S*|\S+")
"""A word, or all that is between two brackets: `[-1, 1]` has no line break."""


@cache
def measure(text: str, size: float, weight: str = "normal") -> float:
    """The width of a line of text, in inches."""
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    # outlines are measured: a renderer of pixels would read the settings of matplotlib, which take longer to change
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, False)
    return float(width) / 72


def wrapped(text: str, room: float, size: float, weight: str = "normal") -> list[str]:
    """The lines of a text of which none is wider than `room` inches.

    A word that is wider alone is broken, behind a sign between its parts (`mamba_ssm`, `h3/table2`) if one fits.
    """
    lines: list[str] = []
    for part in text.splitlines():
        line = ""
        for word in WORD.findall(part):
            longer = f"{line} {word}".strip()
            if measure(longer, size, weight) <= room:
                line = longer
                continue
            lines += [line] * bool(line)
            while measure(word, size, weight) > room and len(word) > 1:
                fits = [n for n in range(1, len(word)) if n == 1 or measure(word[:n], size, weight) <= room]
                end = max((n for n in fits if word[n - 1] in "_-/=,"), default=fits[-1])
                lines.append(word[:end])
                word = word[end:]
            line = word
        lines += [line] * bool(line)
    return lines


def filled(text: str, room: float, size: float = SMALL) -> str:
    """`wrapped` as one text for matplotlib."""
    return verbatim("\n".join(wrapped(text, room, size)))


def verbatim(text: str) -> str:
    """The text for matplotlib, which takes what is between two dollar signs for a formula."""
    return text.replace("$", r"\$")


def sheet(width: Width, body: float, heading: Heading, legend: Sequence[tuple[Any, str]] = ()) -> Canvas:
    """A canvas with all words around the panels, which are then drawn into the strip of `body` inches between them.

    body: height of the panels with their ticks and labels, in inches.
    legend: pairs of a handle of matplotlib and its label.
    """
    inches = WIDTHS[width]
    room = inches - 2 * EDGE
    title = wrapped(heading.title, room, TITLE, "bold")
    details = wrapped(heading.details, room, TEXT)
    note = wrapped(heading.note, room, SMALL)
    x_label = wrapped(heading.x_label, room, TEXT)
    y_label = wrapped(heading.y_label, body, TEXT)
    columns, lines = _legend_shape([label for _, label in legend], room)
    above = _height(title, TITLE) + _height(details, TEXT) + EDGE
    under = _height(note, SMALL) + lines * LEGEND_LINE + EDGE * (2 if legend else 1)
    below, beside = under + _height(x_label, TEXT), _height(y_label, TEXT)
    height = above + body + below
    canvas = Canvas(figsize=(inches, height))
    FigureCanvasAgg(canvas)
    pad = 0.03
    canvas.set_layout_engine(
        "constrained",
        rect=((EDGE + beside) / inches, below / height, (room - beside) / inches, body / height),
        w_pad=pad,
        h_pad=pad,
    )
    top = height - EDGE
    for text, size, weight, color in ((title, TITLE, "bold", "black"), (details, TEXT, "normal", GREY)):
        if text:
            _write(canvas, text, EDGE / inches, top / height, size=size, weight=weight, color=color)
        top -= _height(text, size)
    if x_label:
        at = (inches + beside) / 2 / inches, below / height
        _write(canvas, x_label, *at, size=TEXT, ha="center")
    if y_label:
        at = (EDGE + beside / 2) / inches, (below + body / 2) / height
        _write(canvas, y_label, *at, size=TEXT, ha="center", va="center", rotation=90)
    if note:
        _write(canvas, note, EDGE / inches, (EDGE + _height(note, SMALL)) / height, size=SMALL, color=GREY)
    if legend:
        _legend(canvas, legend, columns, (EDGE / inches, (under - EDGE / 2) / height))
    return canvas


def settled(canvas: Canvas) -> Canvas:
    """The canvas with its panels where the layout puts them, in steps of a hundredth of a point.

    The solver of the layout gives other last digits in other processes, which would make other files.
    """
    # the layout alone puts the panels where drawing the whole canvas would, and takes less time
    if engine := canvas.get_layout_engine():
        engine.execute(canvas)
    places = {ax: ax.get_position().bounds for ax in canvas.axes}
    canvas.set_layout_engine("none")
    width, height = (7200 * inches for inches in canvas.get_size_inches())
    for ax, (left, bottom, wide, high) in places.items():
        steps = (left * width, bottom * height, wide * width, high * height)
        x, y, dx, dy = map(round, steps)
        ax.set_position((x / width, y / height, dx / width, dy / height))
    return canvas


def _write(canvas: Canvas, lines: Sequence[str], x: float, y: float, **style: Any) -> None:
    style = {"va": "top", "linespacing": LINE_SPACING, "in_layout": False, **style}
    canvas.text(x, y, verbatim("\n".join(lines)), **style)


def _height(lines: Sequence[str], size: float) -> float:
    """Height of a text with some room below it, in inches."""
    return (len(lines) * LINE + 0.3) * size / 72 if lines else 0.0


def labelled(labels: Sequence[str], width: Width) -> tuple[list[str], float, float]:
    """Labels of rows in lines of at most a quarter of the figure, the width of the widest, and the height of a row."""
    longest = WIDTHS[width] * 0.27
    lines = [wrapped(label, longest, SMALL) for label in labels]
    wide = max(measure(line, SMALL) for label in lines for line in label)
    return [verbatim("\n".join(label)) for label in lines], wide, 0.02 + max(map(len, lines)) * ROW_LINE


ROW_LINE = SMALL / 72
"""Height of a line of a row's label, in inches."""


def label_rows(ax: Any, labels: Sequence[str]) -> None:
    """Writes the labels beside the rows of an axis, of which the first is at 0."""
    ax.set_yticks(range(len(labels)), labels)
    for label in ax.get_yticklabels():
        label.set_linespacing(1.0)


def log_ticks(low: float, high: float, room: float) -> list[float]:
    """Round numbers between two others, at least two if there are any, as many as fit into `room` inches."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)):
        ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) >= 2:
            break
    if len(ticks) < 2:
        # one tick alone, such as 7 between 6.1 and 7.4, would not show the scale, so the ticks are evenly spaced
        even = MaxNLocator(3 if room > 0.8 else 2).tick_values(low, high)
        ticks = [float(tick) for tick in even if low <= tick <= high]
    kept = ticks[:1]
    for tick in ticks[1:]:
        apart = math.log(tick / kept[-1]) / math.log(high / low) * room * 0.85
        if apart > (measure(f"{tick:g}", SMALL) + measure(f"{kept[-1]:g}", SMALL)) / 2 + 0.06:
            kept.append(tick)
    return kept or [float(f"{low:.3g}")]


HANDLE, GAP = 1.6, 1.4
"""Lengths of a handle of the legend and of the gap between its columns, in sizes of its letters."""
LEGEND_LINE = 1.35 * TEXT / 72
"""Height of a line of the legend, in inches."""


def _legend_shape(labels: Sequence[str], room: float) -> tuple[int, int]:
    """Returns the numbers of columns and lines of the legend, with as few lines as fit into the room.

    Of the shapes with so few lines it has the fewest columns, which fills the lines evenly. A single column is wrapped.
    """
    found = {columns: math.ceil(len(labels) / columns) for columns in range(2, len(labels) + 1)}
    fitting = [(lines, columns) for columns, lines in found.items() if _legend_width(labels, columns) <= room]
    if fitting:
        lines, columns = min(fitting)
        return columns, lines
    return min(len(labels), 1), sum(len(wrapped(label, room - (HANDLE + 0.5) * TEXT / 72, TEXT)) for label in labels)


def _legend_width(labels: Sequence[str], columns: int) -> float:
    """The width of a legend of so many columns, in inches."""
    # matplotlib fills column by column; if the labels do not divide evenly, the first columns have one more
    full, rest = divmod(len(labels), columns)
    ends = list(itertools.accumulate(full + (column < rest) for column in range(columns)))
    parts = [labels[start:end] for start, end in itertools.pairwise([0, *ends])]
    return sum(max(measure(label, TEXT) for label in part) + (HANDLE + 0.5 + GAP) * TEXT / 72 for part in parts)


def _legend(canvas: Canvas, legend: Sequence[tuple[Any, str]], columns: int, corner: tuple[float, float]) -> None:
    room = canvas.get_figwidth() - 2 * EDGE - (HANDLE + 0.5) * TEXT / 72
    found = canvas.legend(
        [handle for handle, _ in legend],
        [str(i) for i in range(len(legend))],
        loc="upper left",
        bbox_to_anchor=corner,
        ncols=columns,
        frameon=False,
        fontsize=TEXT,
        handlelength=HANDLE,
        handletextpad=0.5,
        columnspacing=GAP,
        labelspacing=0.25,
        borderpad=0.0,
        borderaxespad=0.0,
    )
    found.set_in_layout(False)
    # the texts are set afterwards, because matplotlib leaves out labels that begin with an underscore
    for text, (_, label) in zip(found.get_texts(), legend, strict=True):
        text.set_text(filled(label, room, TEXT))
