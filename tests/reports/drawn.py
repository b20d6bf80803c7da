"""Reads the words on a drawn figure, and finds faults of its layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import Any

import matplotlib
from matplotlib.axis import Axis, Tick
from matplotlib.text import Text

from subquad.reports.render.sheet import SMALL, STYLE


@lru_cache(maxsize=4)
def texts(canvas: Any) -> list[Text]:
    """Every text that is visible, the labels of those ticks that are in view included."""
    with matplotlib.rc_context(STYLE):
        canvas.draw_without_rendering()
        return list(_texts(canvas))


def _texts(artist: Any) -> Iterator[Text]:
    if not artist.get_visible():
        return
    if isinstance(artist, Text) and artist.get_text().strip():
        yield artist
    parts = artist.get_children()
    if isinstance(artist, Axis):
        ticks = artist._update_ticks()
        parts = [part for part in parts if not isinstance(part, Tick)]
        parts += [label for tick in ticks for label in (tick.label1, tick.label2)]
    for part in parts:
        yield from _texts(part)


def faults(canvas: Any) -> list[str]:
    """Letters that are too small, texts that leave the sheet, and texts that cover each other."""
    shown = texts(canvas)
    with matplotlib.rc_context(STYLE):
        boxes = [text.get_window_extent() for text in shown]
    sheet = canvas.bbox
    found = [f"small: {text.get_text()!r}" for text in shown if text.get_fontsize() < SMALL]
    for text, box in zip(shown, boxes, strict=True):
        if min(box.x0, box.y0, sheet.width - box.x1, sheet.height - box.y1) < -0.5:
            found.append(f"cut: {text.get_text()!r}")
    for (one, a), (other, b) in combinations(zip(shown, boxes, strict=True), 2):
        # boxes of lines have some room above and below the letters
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1:
            found.append(f"{one.get_text()!r} covers {other.get_text()!r}")
    return found


def words(canvas: Any) -> str:
    """All that is written, in one line."""
    return " ".join(" ".join(text.get_text().split()) for text in texts(canvas))
