r"""A document as LaTeX tables that can be pasted into a paper and need the package booktabs alone.

A table is a float with caption, label and notes. It is as wide as one column of a two-column page if its numbers
fit there in a readable font, and as wide as the text otherwise. A table that is wider than the text is divided: columns
of words are wrapped, and columns of numbers follow below, as on a terminal. A table that is taller than a page goes on
in another float.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from subquad.reports.render.document import LISTED, Document, Grid
from subquad.reports.render.printing import blocks, narrowed, total

GREEK = {
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "δ": "delta",
    "λ": "lambda",
    "μ": "mu",
    "π": "pi",
    "σ": "sigma",
    "Δ": "Delta",
}
ESCAPES = {
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
    # `\\*` and `\\[` would be read as one command at the end of a table line
    "*": r"{*}",
    "[": r"{[}",
    "]": r"{]}",
    '"': "''",
    "`": r"\`{}",
    # the default font prints other signs in place of these three
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "±": r"$\pm$",
    "—": "---",
    "–": "--",
    "−": "$-$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "≈": r"$\approx$",
    "→": r"$\rightarrow$",
    "²": "$^2$",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    "‖": r"$^\|$",
    "◊": r"$^\diamond$",
    "⌉": r"$^\rceil$",
    "⇕": r"$^\Updownarrow$",
    "§": r"$^\S$",
    "¶": r"$^\P$",
    "…": r"\ldots{}",
    "\u200b": r"\allowbreak{}",
    "\u2060": "{}",
    **{letter: rf"$\{name}$" for letter, name in GREEK.items()},
}


def tex(text: str) -> str:
    """Text with every character that LaTeX reads as something else, or cannot print, replaced."""
    text = text.replace(">=", "≥").replace("<=", "≤")
    # the sign of a number is longer than a hyphen, and two hyphens would become one dash
    text = re.sub(r"(?<!\S)-(?=\d)", "−", text).replace("--", "-\u2060-")
    return "".join(ESCAPES.get(character) or _plain(character) for character in text)


def _plain(character: str) -> str:
    """A character that LaTeX prints in its default encoding: an accent is left out, and what is unknown is named."""
    if character.isascii():
        return character
    base = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return base or f"({unicodedata.name(character, 'unknown character').lower()})"


def latex(document: Document, details: bool = False) -> str:
    """The first table of a document as floats, with its notes; title and provenance are comments above it.

    details: the other tables as well, each in floats of its own.
    """
    out = [r"% \usepackage{booktabs}"]
    out += [f"% {line}" for line in (document.title, document.where, *document.provenance)]
    caption, label = document.caption or document.title, f"tab:{document.label or document.name}"
    notes = document.notes if details else [note.removesuffix(LISTED) for note in document.notes]
    out += ["", *_floats(document.grids[0], caption, label, notes)]
    for grid in document.grids[1:] if details else ():
        slug = re.sub("[^a-z]+", "-", grid.heading.lower().partition(":")[0]).strip("-")
        out += ["", *_floats(grid, f"{grid.heading} ({document.title})", f"{label}-{slug}", ())]
    return "\n".join(out) + "\n"


COLUMN, TEXT, PAGE = 229, 345, 505.0
"""Width of a column, and width and height of the text, in points. These are the smallest of the usual classes
(`article` with two columns and with one), so that a table fits into the others, too."""
GAP = 6
"""Distance of two columns of a table, in points."""


class Shape(NamedTuple):
    """A kind of float, and the font of the table in it."""

    kind: str
    room: int
    """Width of the float in points."""
    font: str
    digit: float
    """Width of a digit of Computer Modern in points; that of other fonts is smaller."""
    leading: float
    """Distance of two lines in points."""

    def wide(self, text: str) -> int:
        """Width of a text in points, estimated from the letters of Computer Modern and rather too large."""
        return math.ceil(self.digit * sum(WIDTHS.get(x, 1.5 if x.isupper() else 1.0) for x in text))


FONTS = ((r"\small", 4.63, 11.0), (r"\footnotesize", 4.25, 9.5), (r"\scriptsize", 3.98, 8.0))
SHAPES = tuple(Shape(kind, room, *font) for kind, room in (("table", COLUMN), ("table*", TEXT)) for font in FONTS)
"""In the order in which they are tried."""
WIDTHS = {" ": 0.67} | dict.fromkeys("ijl.,:;'|()[]!-", 0.75) | dict.fromkeys("mw%±×≥≤<>=+MW—…", 1.65)
"""Width of a character in digits; 1.5 of any other capital, and 1 of the rest."""


class Columns(NamedTuple):
    """The columns of a table with their widths in points."""

    grid: Grid
    shape: Shape
    natural: list[int]
    """Widths of what is not broken into lines."""
    widths: list[int]

    def wrapped(self, i: int) -> bool:
        """Whether the words of a column are broken into lines."""
        return self.widths[i] < self.natural[i]

    def cell(self, text: str, i: int) -> str:
        """LaTeX of a cell."""
        return rf"\raggedright {_breakable(text)}" if self.wrapped(i) else tex(text)

    def height(self, texts: Sequence[str]) -> float:
        """Height of a line in points."""
        words = [i for i in range(len(texts)) if self.wrapped(i)]
        lines = [math.ceil(1.2 * self.shape.wide(texts[i]) / self.widths[i]) for i in words]
        return self.shape.leading * max([1, *lines]) + 2


def _columns(grid: Grid) -> Columns:
    """The columns in the first shape that has room for all of them, or in the last one, with words that are wrapped."""
    for shape in SHAPES:
        natural = [
            max(shape.wide(text) for text in (*title.split(" "), *(line[i] for line in grid.lines)))
            for i, title in enumerate(grid.header)
        ]
        if total(natural, GAP) <= shape.room:
            break
    parts = (
        _broken(" ".join(column)).replace("\u200b", " ").split(" ")
        for column in zip(grid.header, *grid.lines, strict=True)
    )
    least = [max(map(shape.wide, words)) for words in parts]
    narrow = narrowed(natural, grid.num_words, shape.room, GAP, least)
    # a column of numbers may have a text, too
    left = shape.room - sum(narrow) - GAP * len(narrow)
    numbers = (max(small, min(size, left)) for small, size in zip(least, natural, strict=True))
    return Columns(grid, shape, natural, [*narrow, *list(numbers)[grid.num_words :]])


def _blocks(found: Columns) -> list[list[int]]:
    """The columns of each tabular, about as many in each."""

    def divided(room: int) -> list[list[int]]:
        return list(blocks(found.widths, found.grid.num_words, room, GAP))

    room = found.shape.room
    while room > 0 and len(divided(room - 5)) == len(divided(found.shape.room)):
        room -= 5
    return divided(room)


def _floats(grid: Grid, caption: str, label: str, notes: Sequence[str]) -> Iterator[str]:
    """One float, or several where the table and its notes are taller than a page."""
    found = _columns(grid)
    shape, note_shape = found.shape, SHAPES[-1]
    parts = [part for block in _blocks(found) for part in _tabulars(found, block)]
    for note in notes:
        height = note_shape.leading * math.ceil(1.1 * note_shape.wide(note) / shape.room)
        parts.append((height, [rf"{{{note_shape.font}\raggedright {_breakable(note)}\par}}"]))
    pages: list[list[str]] = [[]]
    left = PAGE - 12 * (2 + math.ceil(1.25 * note_shape.wide(caption) / shape.room))
    for height, lines in parts:
        if pages[-1] and height > left:
            pages.append([])
            left = PAGE - 24
        pages[-1] += lines
        left -= height
    for i, page in enumerate(pages):
        title = [rf"Table~\ref{{{label}}}, continued\par\smallskip"]
        first = [rf"\caption{{{tex(caption)}}}", rf"\label{{{label}}}\smallskip"]
        yield from (rf"\begin{{{shape.kind}}}", r"\centering", *(title if i else first))
        yield from (shape.font, rf"\setlength{{\tabcolsep}}{{{GAP / 2:g}pt}}", *page, rf"\end{{{shape.kind}}}")


def _tabulars(found: Columns, columns: Sequence[int]) -> Iterator[tuple[float, list[str]]]:
    """The `tabular` of some columns, with its height in points; several where it is taller than a page."""
    grid, shape = found.grid, found.shape
    kinds = (f"p{{{found.widths[i]}pt}}" if found.wrapped(i) else "l" if i < grid.num_words else "r" for i in columns)
    titles = [_title(found, i) for i in columns]
    head = [rf"\begin{{tabular}}{{@{{}}{''.join(kinds)}@{{}}}}", r"\toprule", *_groups(found, columns)]
    head += [" & ".join(titles) + r" \\", r"\midrule"]
    body: list[str] = []
    used = least = (6 + max(text.count(r" \\ ") for text in titles)) * shape.leading
    # raggedness gives the two backslashes another meaning in the last column
    end = r" \tabularnewline" if any(map(found.wrapped, columns)) else r" \\"
    for row in _rows(grid, columns):
        height = sum(map(found.height, row))
        if body and used + height > 0.8 * PAGE:
            yield used, [*head, *body, *BOTTOM]
            body, used = [], least
        if body and grid.num_words == 2:
            body.append(r"\addlinespace[2pt]")
        body += [" & ".join(found.cell(line[i], i) for i in columns) + end for line in row]
        used += height
    yield used, [*head, *body, *BOTTOM]


BOTTOM = (r"\bottomrule", r"\end{tabular}\par\smallskip")


def _rows(grid: Grid, columns: Sequence[int]) -> Iterator[list[tuple[str, ...]]]:
    """The lines of each row, those that say nothing in these columns left out; the name stands in the first one."""
    numbers = [i for i in columns if i >= grid.num_words]
    lines = [line for line in grid.lines if not numbers or any(line[i] for i in numbers)]
    if grid.num_words != 2:
        yield from ([line] for line in lines)
        return
    for _, (first, *others) in groupby(lines, key=lambda line: line[0]):
        yield [first, *(("", *line[1:]) for line in others)]


def _groups(found: Columns, columns: Sequence[int]) -> list[str]:
    """The line above the titles, each group over the columns of this tabular that share it, and the rules below it."""
    if not any(found.grid.groups[i] for i in columns if found.grid.groups):
        return []
    spans, rules, place = [], [], 1
    for text, first, behind in found.grid.spans:
        there = [found.widths[i] for i in columns if first <= i < behind]
        if there:
            # a word is never broken
            width, words = max(total(there, GAP), *map(found.shape.wide, text.split(" "))), tex(text)
            if found.shape.wide(text) > width:
                words = rf"\parbox{{{width}pt}}{{\centering {words}}}"
            spans.append(rf"\multicolumn{{{len(there)}}}{{c}}{{{words}}}")
            rules += [rf"\cmidrule(lr){{{place}-{place + len(there) - 1}}}"] * bool(text)
            place += len(there)
    return [" & ".join(spans) + r" \\", " ".join(rules)]


def _title(found: Columns, i: int) -> str:
    """The title of a column, in several lines where it is wider than what stands below it."""
    lines: list[str] = []
    for word in found.grid.header[i].split(" "):
        if lines and found.shape.wide(f"{lines[-1]} {word}") <= found.widths[i]:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    broken = r" \\ ".join(map(tex, lines))
    side = "l" if i < found.grid.num_words else "r"
    return broken if len(lines) < 2 else rf"\shortstack[{side}]{{{broken}}}"


def _breakable(text: str) -> str:
    """LaTeX of a text whose long words may be broken."""
    return tex(_broken(text))


def _broken(text: str) -> str:
    """The text with a mark at the places where a long word, such as a path or a commit, may be broken."""
    return " ".join(BREAK.sub("\u200b", word) if len(word) > 9 else word for word in text.split(" "))


BREAK = re.compile(r"(?<=[/,=._-])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9]{12})(?=[A-Za-z0-9]{6})")
"""Behind a slash, a comma, a sign or a point, and in a run of letters and digits."""
