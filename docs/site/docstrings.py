"""Docstrings of this repository as Markdown, for the reference of the site.

Docstrings are written to be read in a terminal: equations are plain text, and parameters are aligned lists. On a page,
lines of a paragraph would flow together, so equations become blocks of code and parameters become lists.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

WORD = re.compile(r"(?<![\w/\\.`])[A-Za-z][a-z]{2,}(?![\w(\[/`])")
"""A word of a sentence, in contrast to a name, a call or an index of an equation."""
NAMES = {"act", "bias", "conv", "cos", "diag", "exp", "gate", "log", "mean", "norm", "residual", "sin", "sum", "weight"}
"""Words that are names in an equation."""
PARAMETER = re.compile(r"^(?!Source|Departure)((?:[A-Za-z_]\w*(?:, )?)+): +(?=\S)")
INDEXED = re.compile(r"^\w+(?:_\w+|\[[^]]*\])+ += ")
"""A line that defines an element, such as `y_t[d] = ...`."""


def to_markdown(text: str) -> str:
    """The Markdown of a docstring."""
    # the summary is a sentence, also where it begins with an equation
    first, *others = re.split(r"\n\s*\n", text.strip("\n"))
    return "\n\n".join([first, *map(_block, others)])


def _block(block: str) -> str:
    lines = block.split("\n")
    if lines[0].startswith("    "):
        return block
    if _is_equation(lines):
        return "\n".join(["```text", *lines, "```"])
    if PARAMETER.match(lines[0]) and len(lines) > 1 and _is_list(lines):
        return "\n".join(PARAMETER.sub(lambda match: f"- `{match[1]}`: ", line) for line in lines)
    # a list right behind a line of text is one only after an empty line
    return block if lines[0].startswith("- ") else block.replace("\n- ", "\n\n- ", 1)


def _is_equation(lines: list[str]) -> bool:
    """Whether every line defines an element, or hardly any of the paragraph's words belongs to a sentence."""
    if all(INDEXED.match(line) for line in lines):
        return True
    text = " ".join(lines)
    words = [word for word in WORD.findall(text) if word.lower() not in NAMES]
    return re.search(r" (=|->) ", text) is not None and 5 * len(words) <= len(text.split())


def _is_list(lines: list[str]) -> bool:
    """Whether every line begins a parameter or continues one."""
    return all(PARAMETER.match(line) or line.startswith("  ") for line in lines)


class PlainDocstrings(griffe.Extension):
    """Turns the docstrings of everything that is loaded into Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
