"""A document as text: terminal, markdown, LaTeX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.render.document import Document, Grid


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
    if document.provenance:
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
    "¶": r"$^\P$",
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
