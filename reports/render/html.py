"""A document as one self-contained HTML page, which loads no script, font or other file.

The tooltip of a table line names the runs behind it.
"""

from __future__ import annotations

from html import escape

from reports.render.document import Document
from reports.render.plots import svg

CSS = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th.word, td.word { text-align: left; }
td.agrees, td.holds { color: #00693e; } td.worse, td.fails { color: #b3261e; } td.better { color: #0b57d0; }
ul { padding-left: 1.2rem; color: #444; font-size: .9rem; }
svg { max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) {
  body { background: #161616; color: #e6e6e6; } th, td { border-color: #3a3a3a; } ul { color: #b5b5b5; }
  td.agrees, td.holds { color: #6fcf97; } td.worse, td.fails { color: #ff8a80; } td.better { color: #8ab4f8; }
  svg { background: #fff; }
}
"""
VERDICTS = ("agrees", "worse", "better", "holds", "fails")


def html(document: Document) -> str:
    """The text of the page, with the figure as inline SVG."""
    title, where = escape(document.title), escape(document.where)
    out = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{CSS}</style></head><body>",
        f"<h1>{title}</h1><p>{where}</p>",
        svg(document),
    ]
    for grid in document.grids:
        if grid.heading:
            out.append(f"<h2>{escape(grid.heading)}</h2>")
        cells = "".join(_cell("th", text, i < grid.num_words) for i, text in enumerate(grid.header))
        out.append(f"<table><thead><tr>{cells}</tr></thead><tbody>")
        for line, run_ids in zip(grid.lines, grid.run_ids, strict=True):
            tooltip = f' title="runs: {escape(", ".join(run_ids))}"' if run_ids else ""
            cells = "".join(_cell("td", text, i < grid.num_words) for i, text in enumerate(line))
            out.append(f"<tr{tooltip}>{cells}</tr>")
        out.append("</tbody></table>")
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
