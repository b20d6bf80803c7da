"""A document as plain text for the terminal, as Markdown, or as a self-contained HTML page (LaTeX: `latex`).

The HTML page loads no script, font or other file; the tooltip of a table line names
the runs behind it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from subquad.reports.render.document import Document, Grid

NARROWEST = 12
"""Characters that a column of words keeps, at least, when a table is fitted to a width."""
GAP = "  "


COLORS = {
    "agrees": 32,
    "holds": 32,
    "better": 34,
    "worse": 31,
    "fails": 31,
    "differs": 31,
    "unclear": 33,
    "unstable": 35,
}
"""Beginnings of cells to the colour that a terminal gives them (ANSI); the words say the same."""


def terminal(document: Document, width: int | None = None, *, color: bool = False) -> str:
    """Aligned plain text; a row's name stands only where it changes.

    width: characters of a line. Words are wrapped within their column, and columns of numbers that do not fit follow
    below. Without a width, lines are as long as they need to be.
    color: give verdicts a colour, by codes of a terminal.
    """
    out = [*_wrapped(document.title, width), *_wrapped(document.where, width), ""]
    for grid in document.grids:
        if grid.heading:
            out += ["", grid.heading]
        out += _fitted(grid, width, color)
        if not grid.heading:
            out += ["", *(line for note in document.notes for line in _wrapped(note, width))]
    out += ["", *(line for text in document.provenance for line in _wrapped(text, width))]
    return "\n".join(out).rstrip() + "\n"


def _fitted(grid: Grid, width: int | None, color: bool) -> Iterator[str]:
    """The lines of a grid, in as many tables below each other as the width needs."""
    lines = grid.named_lines
    widths = [max(len(line[i]) for line in (grid.header, *lines)) for i in range(len(grid.header))]
    for text, first, behind in grid.spans:
        widths[behind - 1] += max(0, len(text) - total(widths[first:behind]))
    if width is not None:
        widths[: grid.num_words] = narrowed(widths, grid.num_words, width)
    tables = list(blocks(widths, grid.num_words, width))
    for i, block in enumerate(tables):
        if i:
            yield ""
        # a line may have nothing to say in the columns of one table
        said = [line for line in lines if len(tables) == 1 or any(line[j] for j in block if j >= grid.num_words)]
        yield from _table(grid, said, widths, block, color)


def total(widths: Sequence[int], gap: int = len(GAP)) -> int:
    """The width of columns with the gaps between them."""
    return sum(widths) + gap * (len(widths) - 1)


def narrowed(
    widths: Sequence[int], num_words: int, width: int, gap: int = len(GAP), least: Sequence[int] = ()
) -> list[int]:
    """Widths of the columns of words: the widest ones give way until everything fits, or half of the line is left."""
    words, least = list(widths[:num_words]), least or [NARROWEST] * num_words
    room = max(width - total(widths, gap) + sum(words), width // 2 - gap * num_words)
    while sum(words) > room and (wide := [i for i, size in enumerate(words) if size > least[i]]):
        words[max(wide, key=words.__getitem__)] -= 1
    return words


def blocks(widths: Sequence[int], num_words: int, width: int | None, gap: int = len(GAP)) -> Iterator[list[int]]:
    """The columns of each table: those of words in every one, and at least one of numbers."""
    words = list(range(num_words))
    block: list[int] = []
    for i in range(num_words, len(widths)):
        if block and width is not None and total([widths[j] for j in (*words, *block, i)], gap) > width:
            yield words + block
            block = []
        block.append(i)
    yield words + block


def _table(
    grid: Grid, lines: Sequence[Sequence[str]], widths: Sequence[int], columns: Sequence[int], color: bool
) -> Iterator[str]:
    def line(texts: Sequence[str], color: bool = False) -> Iterator[str]:
        codes = {i: _code(texts[i]) for i in columns} if color else {}
        parts = [
            textwrap.wrap(texts[i], max(widths[i], 1)) or [""] if i < grid.num_words else [texts[i]] for i in columns
        ]
        for row in range(max(map(len, parts))):
            shown = [part[row] if row < len(part) else "" for part in parts]
            yield GAP.join(
                _colored(text, text.ljust(widths[i]) if i < grid.num_words else text.rjust(widths[i]), codes.get(i))
                for text, i in zip(shown, columns, strict=True)
            ).rstrip()

    head = [*([_spans(grid, widths, columns)] if grid.groups else []), *line(grid.header)]
    rest = [text for texts in lines for text in line(texts)]
    yield from [*head, "-" * max(map(len, (*head, *rest)))]
    # codes take no room on the screen, so they come after the measuring
    yield from [text for texts in lines for text in line(texts, color)] if color else rest


def _code(text: str) -> int | None:
    return next((code for word, code in COLORS.items() if text.startswith(word)), None)


def _colored(text: str, padded: str, code: int | None) -> str:
    return padded.replace(text, f"\x1b[{code}m{text}\x1b[0m", 1) if code and text else padded


def _spans(grid: Grid, widths: Sequence[int], columns: Sequence[int]) -> str:
    """The line above the titles, each group over the columns of this table that share it."""
    parts = []
    for text, first, behind in grid.spans:
        there = [widths[i] for i in columns if first <= i < behind]
        if there:
            # a group that goes on in another table has less room here, and none of its words is cut there
            parts.append(text.center(total(there)) if len(text) <= total(there) else text)
    return GAP.join(parts).rstrip()


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent="  ") or [""]


def markdown(document: Document) -> str:
    """Pipe tables, which hosts of repositories show."""
    out = [f"# {document.title}", "", document.where, ""]
    for grid in document.grids:
        if grid.heading:
            out += ["", f"## {grid.heading}", ""]
        lines = [[text.replace("|", "\\|") for text in line] for line in (grid.titles, *grid.lines)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        first, *rest = (
            "| "
            + " | ".join(
                text.ljust(size) if i < grid.num_words else text.rjust(size)
                for i, (text, size) in enumerate(zip(line, widths, strict=True))
            )
            + " |"
            for line in lines
        )
        rule = "|" + "|".join(" --- " if i < grid.num_words else " ---: " for i in range(len(grid.header))) + "|"
        out += [first, rule, *rest]
        if not grid.heading:
            out += ["", *(f"- {_starless(note)}" for note in document.notes)]
    if document.provenance:
        out += ["", "## Provenance", "", *(f"- {line}" for line in document.provenance)]
    return "\n".join(out) + "\n"


def _starless(text: str) -> str:
    return text.replace("*", "\\*")


VERDICTS = tuple(COLORS)
"""Beginnings of cells that the style sheet gives a colour."""


def style() -> str:
    """The style sheet of every page that the suite writes."""
    return (Path(__file__).parent / "page.css").read_text()


def html(document: Document) -> str:
    """The text of the page, with the figure as inline SVG."""
    from subquad.reports.render.draw import svg

    title, where = escape(document.title), escape(document.where)
    out = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{style()}</style></head><body>",
        f"<h1>{title}</h1><p>{where}</p>",
        svg(document).replace("<svg ", '<svg class="figure" ', 1),
    ]
    for grid in document.grids:
        if grid.heading:
            out.append(f"<h2>{escape(grid.heading)}</h2>")
        cells = "".join(_cell("th", text, i < grid.num_words) for i, text in enumerate(grid.header))
        above = "".join(f'<th colspan="{behind - first}">{escape(text)}</th>' for text, first, behind in grid.spans)
        above = f'<tr class="group">{above}</tr>' if above else ""
        out.append(f'<div class="wide"><table><thead>{above}<tr>{cells}</tr></thead><tbody>')
        for line, run_ids in zip(grid.named_lines, grid.run_ids, strict=True):
            tooltip = f' title="runs: {escape(", ".join(run_ids))}"' if run_ids else ""
            cells = "".join(_cell("td", text, i < grid.num_words) for i, text in enumerate(line))
            out.append(f"<tr{tooltip}>{cells}</tr>")
        out.append("</tbody></table></div>")
        if not grid.heading:
            out.append(_bullets(document.notes))
    out += ["<h2>Provenance</h2>", _bullets(document.provenance), "</body></html>"]
    return "\n".join(out) + "\n"


def _cell(tag: str, text: str, word: bool) -> str:
    verdict = next((name for name in VERDICTS if tag == "td" and text.startswith(name)), "")
    names = " ".join(name for name in ("word" if word else "", verdict) if name)
    return f"<{tag}{f' class={chr(34)}{names}{chr(34)}' if names else ''}>{escape(text)}</{tag}>"


def _bullets(lines: tuple[str, ...]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
