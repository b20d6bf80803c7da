"""A document as one self-contained HTML page, which loads no script, font or other file.

The tooltip of a table line names the runs behind it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from reports.render.document import Document

VERDICTS = ("agrees", "worse", "better", "differs", "unclear", "unstable", "holds", "fails", "void")
"""Beginnings of cells that the style sheet gives a colour."""


def style() -> str:
    """The style sheet of every page that the suite writes."""
    return (Path(__file__).parent / "page.css").read_text()


def html(document: Document) -> str:
    """The text of the page, with the figure as inline SVG."""
    from reports.render.plots import svg

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
