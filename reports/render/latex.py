"""A document as LaTeX tables, for a paper that loads the package booktabs."""

from __future__ import annotations

import re
import unicodedata

from reports.render.document import Document, Grid

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
    # in the default font these three are other signs
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
    "§": r"$^\S$",
    "¶": r"$^\P$",
    "…": r"\ldots{}",
    "\u200b": "{}",
    **{letter: rf"$\{name}$" for letter, name in GREEK.items()},
}


def tex(text: str) -> str:
    """Text with every character that LaTeX reads as something else, or cannot print, replaced."""
    text = text.replace(">=", "≥").replace("<=", "≤")
    # the sign of a number is longer than a hyphen, and two hyphens would become one dash
    text = re.sub(r"(?<!\S)-(?=\d)", "−", text).replace("--", "-\u200b-")
    return "".join(ESCAPES.get(character) or _plain(character) for character in text)


def _plain(character: str) -> str:
    """A character that LaTeX prints in its default encoding: an accent is left out, and what is unknown is named."""
    if character.isascii():
        return character
    base = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return base or f"({unicodedata.name(character, 'unknown character').lower()})"


def latex(document: Document) -> str:
    r"""A `tabular` for each grid; the notes follow as a small paragraph, the provenance as comments."""
    out = [r"% \usepackage{booktabs}"]
    out += [f"% {line}" for line in (document.title, document.where, *document.provenance)]
    for grid in document.grids:
        out += ["", f"% {grid.heading}"] if grid.heading else [""]
        out += _tabular(grid)
        if not grid.heading:
            out += ["", r"{\footnotesize", *(tex(note) + r"\\" for note in document.notes), "}"]
    return "\n".join(out) + "\n"


def _tabular(grid: Grid) -> list[str]:
    columns = "l" * grid.num_words + "r" * (len(grid.header) - grid.num_words)
    out = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    if grid.groups:
        spans = [rf"\multicolumn{{{behind - first}}}{{c}}{{{tex(text)}}}" for text, first, behind in grid.spans]
        rules = [rf"\cmidrule(lr){{{first + 1}-{behind}}}" for text, first, behind in grid.spans if text]
        out += [" & ".join(spans) + r" \\", " ".join(rules)]
    out += [" & ".join(map(tex, grid.header)) + r" \\", r"\midrule"]
    out += [" & ".join(map(tex, line)) + r" \\" for line in grid.named_lines]
    return [*out, r"\bottomrule", r"\end{tabular}"]
