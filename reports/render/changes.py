"""The newest time of every case of our kernels against the one of the commit before, and their figure.

Both are of one device, mostly in different runs. So a case is called slower or faster only where the quartiles of the
samples are apart, the medians differ by more than 3 %, and by more than two runs of one commit do. What else differs
between the runs is named, and so is the change of the other implementations that both runs timed, which no commit of
ours changes. `bench --compare` measures both commits in one run, and what it says of them stands.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from subquad.reports.render.speed import Point

if TYPE_CHECKING:
    from subquad.reports.render.sheet import Canvas, Width

SMALLEST = 1.03
"""A smaller ratio of medians is no change."""
RULE = (
    "Slower and faster: medians differ by more than 3 % and by more than two runs of one commit, and quartiles are "
    "apart. Unclear: by more than 3 %, but not both. Where bench --compare timed both in one run, its verdict stands."
)
OURS = "triton"
"""The implementation whose changes are of interest; others are looked at where no operator has it."""
Verdict = Literal["slower", "faster", "unclear", "unchanged"]
MARKS: dict[str, tuple[str, str]] = {
    "slower": (">", "#a32a2a"),
    "faster": ("<", "#2f62c4"),
    "unclear": ("o", "#777777"),
}
"""Verdict to its mark and colour."""


@dataclass(frozen=True)
class Change:
    """One case at two commits on one device."""

    newest: Point
    before: Point
    repeats: float
    """The largest ratio of the medians of two runs of this case at one commit; 1 where none was repeated."""
    others: float | None
    """Ratio of the medians, newest over before, of the other implementations of the case; None without any."""

    @property
    def ratio(self) -> float:
        """Median of the newest over the one before, or of the ratios of rounds where both are of one run."""
        assert self.newest.value is not None
        assert self.before.value is not None
        return float(self.in_one_run.get("ratio", self.newest.value / self.before.value))

    @property
    def in_one_run(self) -> Mapping[str, Any]:
        """The verdict of `bench --compare` on the two, if one run of it measured both; empty otherwise."""
        return self.newest.compared if self.newest.run_id == self.before.run_id else {}

    @property
    def verdict(self) -> Verdict:
        if self.in_one_run:
            word: Verdict | Literal["same"] = self.in_one_run["verdict"]
            return "unchanged" if word == "same" else word
        (low, high), (before_low, before_high) = self.newest.quartiles, self.before.quartiles
        if max(self.ratio, 1 / self.ratio) <= SMALLEST:
            return "unchanged"
        apart = low > before_high or high < before_low
        if not apart or max(self.ratio, 1 / self.ratio) <= self.repeats:
            return "unclear"
        return "slower" if self.ratio > 1 else "faster"

    @property
    def fastest(self) -> float:
        """Ratio of the fastest samples. It stays near 1 where a busy host delays only some of the calls."""
        return min(self.newest.samples, default=1.0) / min(self.before.samples, default=1.0)

    @property
    def differs(self) -> str:
        """The settings other than the commit that differ: `shapes: paper, then quick`; or that both are of one run."""
        if self.in_one_run:
            low, high = self.in_one_run["low"], self.in_one_run["high"]
            return f"measured in one run: ratio between {low:.3f} and {high:.3f}"
        pairs = ((name, self.before.setting.get(name), value) for name, value in self.newest.setting.items())
        return "; ".join(f"{name}: {old}, then {new}" for name, old, new in pairs if old != new)


def changes_of(points: Sequence[Point]) -> list[Change]:
    """The changes of our kernels, by device, the slowest first. points: oldest first."""
    measured = [point for point in points if point.value]
    ours = OURS if any(point.implementation == OURS for point in measured) else None
    cases: dict[tuple[str, ...], list[Point]] = {}
    for point in measured:
        cases.setdefault(point.key, []).append(point)
    found = []
    for key, history in cases.items():
        newest = history[-1]
        before = next((point for point in reversed(history) if point.commit != newest.commit), None)
        if before is not None and ours in (None, newest.implementation):
            beside = [others for other, others in cases.items() if other[:-1] == key[:-1] and other != key]
            found.append(Change(newest, before, _repeats(history), _others(newest, before, beside)))
    return sorted(found, key=lambda change: (change.newest.device, -change.ratio))


def _repeats(history: Sequence[Point]) -> float:
    by_commit: dict[str, list[float]] = {}
    for point in history:
        by_commit.setdefault(point.commit, []).append(point.value or 0.0)
    return max(max(values) / min(values) for values in by_commit.values())


def _others(newest: Point, before: Point, beside: Sequence[Sequence[Point]]) -> float | None:
    ratios = []
    for history in beside:
        new = next((point.value for point in history if point.run_id == newest.run_id), None)
        old = next((point.value for point in history if point.run_id == before.run_id), None)
        if new and old:
            ratios.append(new / old)
    return statistics.median(ratios) if ratios else None


HEADER = (
    "operator",
    "case",
    "pass",
    "before ms",
    "newest ms",
    "ratio",
    "verdict",
    "fastest",
    "repeats",
    "others",
    "differs",
)


def line_of(change: Change) -> tuple[str, ...]:
    """The line of a change in a table with the titles `HEADER`."""

    def time(point: Point) -> str:
        low, high = point.quartiles
        return f"{point.value:.4f} [{low:.4f}, {high:.4f}]"

    others = "" if change.others is None else f"{change.others:.3f}"
    newest = change.newest
    where = (newest.op, newest.case, newest.direction)
    commits = f"commit: {change.before.commit[:7]}, then {newest.commit[:7]}"
    numbers = (f"{change.ratio:.3f}", change.verdict, f"{change.fastest:.3f}", f"{change.repeats:.3f}", others)
    return (*where, time(change.before), time(newest), *numbers, "; ".join(filter(None, (commits, change.differs))))


def draw_changes(changes: Sequence[Change], width: Width = "page") -> Canvas | None:
    """The cases that changed, a panel for every device; None where none was measured at two commits."""
    import matplotlib
    from matplotlib.lines import Line2D

    from subquad.reports.render.sheet import SMALL, STYLE, TEXT, WIDTHS, Heading, settled, sheet, verbatim, wrapped

    if not changes:
        return None
    devices = list(dict.fromkeys(change.newest.device for change in changes))
    shown = {d: [c for c in changes if c.newest.device == d and c.verdict != "unchanged"] for d in devices}
    counts = {name: sum(change.verdict == name for change in changes) for name in (*MARKS, "unchanged")}
    title = "Kernels since the commit before: " + ", ".join(f"{count} {name}" for name, count in counts.items())
    legend: list[tuple[Any, str]] = [
        (Line2D([], [], ls="none", marker=mark, ms=4, color=color), name) for name, (mark, color) in MARKS.items()
    ]
    legend.append((Line2D([], [], lw=4, alpha=0.3, color="#777777"), "quartiles of the newest"))
    note = f"{RULE} Measured on {' and '.join(devices)}."
    room = WIDTHS[width]
    labels = {id(c): wrapped(_label(c.newest), room * 0.36, SMALL) for cs in shown.values() for c in cs}
    texts = {id(c): wrapped(_times(c), room * 0.3, SMALL) for cs in shown.values() for c in cs}
    lines = {d: [max(len(labels[id(c)]), len(texts[id(c)])) for c in found] for d, found in shown.items()}
    # a row is as high as its lines, and a panel has a title and room at its edges
    high = {d: sum(0.115 * n + 0.05 for n in found) + 0.12 for d, found in lines.items()}
    body = sum(high.values()) + 0.2 * len(devices) + 0.25
    with matplotlib.rc_context(STYLE):
        heading = Heading(title, "", "time of the newest over the one before", note=note)
        canvas = sheet(width, body, heading, legend)
        axes = canvas.subplots(len(devices), 1, sharex=True, squeeze=False, height_ratios=list(high.values()))[:, 0]
        for ax, device in zip(axes, devices, strict=True):
            places, at = [], 0.06
            for count in lines[device]:
                places.append(at + (0.115 * count + 0.05) / 2)
                at += 0.115 * count + 0.05
            for change, y in zip(shown[device], places, strict=True):
                mark, color = MARKS[change.verdict]
                low, high_ = (quartile / (change.before.value or 1.0) for quartile in change.newest.quartiles)
                ax.plot([low, high_], [y, y], color=color, lw=4, alpha=0.3, solid_capstyle="butt")
                ax.plot([1, change.ratio], [y, y], color=color, lw=1)
                ax.plot(change.ratio, y, mark, ms=4, color=color)
                text = verbatim("\n".join(texts[id(change)]))
                at_edge = {
                    "transform": ax.get_yaxis_transform(),
                    "va": "center",
                    "fontsize": SMALL,
                    "linespacing": 0.95,
                }
                ax.text(1.02, y, text, color="#333333", **at_edge)
            ax.axvline(1, color="black", lw=0.8, zorder=0)
            ax.set_xscale("log", base=2)
            ax.set_yticks(
                places, [verbatim("\n".join(labels[id(change)])) for change in shown[device]], linespacing=0.95
            )
            ax.set_ylim(at + 0.06, 0)
            ax.set_title(verbatim(device if shown[device] else f"{device}: no case changed"), loc="left", fontsize=TEXT)
            ax.tick_params(axis="y", length=0)
        _ratio_ticks(axes[-1])
        return settled(canvas)


def _label(point: Point) -> str:
    passes = {"forward": "fwd", "forward+backward": "fwd+bwd"}
    return f"{point.op} {point.case} {passes.get(point.direction, point.direction)}"


def _times(change: Change) -> str:
    times = f"{change.before.value:.3g} → {change.newest.value:.3g} ms"
    return f"{times}\n{change.before.commit[:7]} → {change.newest.commit[:7]}"


def _ratio_ticks(ax: Any) -> None:
    from matplotlib.ticker import NullLocator

    low, high = ax.get_xlim()
    names: Mapping[float, str] = {1 / 8: "⅛", 1 / 4: "¼", 1 / 2: "½", 1: "1", 2: "2", 4: "4", 8: "8"}
    ticks = [tick for tick in names if low <= tick <= high]
    ax.set_xticks(ticks, [names[tick] for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
