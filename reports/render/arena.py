"""The arena: who is fastest at which operator, from the rows of `bench --arena`, and before it of `bench` with peers.

A comparison is one case (operator, shape, dtype, pass) in one run on one device, with a time of at least one kernel of
another project. Times of different runs or devices are never divided. Of each case and device the newest comparison is
shown, whoever won; the history has all runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from subquad.reports.render.document import DASH, Document, Grid
from subquad.reports.render.speed import case_of
from subquad.suite.bench.cases import is_not_installed
from subquad.suite.environment import CALL
from subquad.suite.store.storage import TEXTS

SCALE = "arena"
OURS = "triton"
PLAIN = "torch"
"""Our path in plain PyTorch, which enters no kernel."""
BEFORE = ("sdpa-flash", "flash-linear-attention")
"""Kernels of other projects in rows of before the arena, which do not say of an implementation whose it is."""
METHODS = {
    1: "calls from Python, in one process",
    2: "recorded as a CUDA graph, the fastest of three processes",
    3: "as 2; an implementation that tunes itself does so while others are compiled on the same GPU",
}
SHOWN = {OURS: "ours"}
"""Names that a reader would not know."""
SWEPT = "1, sweep"
"""Method of the runs that measured a kernel of ours beside one of another project while ours was being written."""
UNRECORDED = "°"
"""Behind a name in an arena of a GPU: the call could not be recorded, so its host counts."""


@dataclass(frozen=True)
class Entrant:
    """One implementation in one comparison."""

    name: str
    time_ms: float | None
    status: str
    reason: str
    is_recorded: bool

    @property
    def label(self) -> str:
        shown = SHOWN.get(self.name, self.name)
        return shown if self.is_recorded else f"{shown} {UNRECORDED}"


@dataclass(frozen=True)
class Comparison:
    """One case in one run."""

    op: str
    case: str
    direction: str
    entrants: tuple[Entrant, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.case, self.direction

    @cached_property
    def ranking(self) -> list[tuple[Entrant, float]]:
        """Those with a time, the fastest first."""
        timed = [(entrant, entrant.time_ms) for entrant in self.entrants if entrant.time_ms is not None]
        return sorted(timed, key=lambda pair: pair[1])

    @property
    def counts(self) -> bool:
        """Whether a kernel of another project has a time."""
        return any(entrant.name != OURS for entrant, _ in self.ranking)

    @property
    def ours_ms(self) -> float | None:
        return next((time for entrant, time in self.ranking if entrant.name == OURS), None)


@dataclass(frozen=True)
class ArenaRun:
    """One run on one device."""

    run_id: str
    started_at: str
    device: str
    commit: str
    method: int
    versions: tuple[str, ...]
    """The versions of torch, Triton and the packages of the entrants, such as `torch 2.11.0`."""
    comparisons: tuple[Comparison, ...]
    refusals: tuple[tuple[Entrant, Comparison], ...] = ()
    is_sweep: bool = False

    @property
    def method_text(self) -> str:
        return SWEPT if self.is_sweep else str(self.method)

    @property
    def order(self) -> tuple[str, int]:
        return self.started_at, self.method

    @property
    def wins(self) -> Counter[str]:
        """The number of comparisons that each implementation won."""
        return Counter(found.ranking[0][0].name for found in self.comparisons)


def runs_of(frame: pd.DataFrame) -> list[ArenaRun]:
    """The runs with a comparison, oldest first."""
    times = frame[frame["metric"] == "time"].fillna({name: "" for name in TEXTS if name in frame})
    found = []
    for (run_id, started_at, device), rows in times.groupby(["run_id", "started_at", "device"], sort=False):
        records: Any = rows.to_dict("records")
        if (run := _run(str(run_id), str(started_at), str(device), records)) is not None:
            found.append(run)
    return sorted(found, key=lambda run: run.order)


def _run(run_id: str, started_at: str, device: str, rows: Sequence[Mapping[str, Any]]) -> ArenaRun | None:
    """The run of these rows, or None where nothing in it is a comparison with another project."""
    is_arena = rows[0]["scale"] == SCALE
    if not is_arena and rows[0]["scale"] not in ("quick", "paper"):
        # others of these rows vary the options of a kernel, or have the time of one of several
        rows = [row for row in rows if "peer" in _settings(row["config"])]
    settings = [_settings(row["config"]) for row in rows]
    cases: dict[tuple[str, str, str], dict[str, Entrant]] = {}
    for row, found in zip(rows, settings, strict=True):
        if row["model"] == OURS or row["model"] in BEFORE or (is_arena and row["model"] != PLAIN):
            entrant = _entrant(row, found, on_gpu=bool(row["cuda"]))
            entrants = cases.setdefault((row["task"], *case_of(row["slice"])), {})
            old = entrants.get(entrant.name)
            if old is None or (entrant.time_ms or float("inf")) < (old.time_ms or float("inf")):
                entrants[entrant.name] = entrant
    every = [Comparison(*key, tuple(found.values())) for key, found in cases.items()]
    counted = tuple(one for one in every if one.counts and (is_arena or one.ours_ms is not None))
    refusals = tuple(
        (entrant, one)
        for one in every
        for entrant in one.entrants
        if entrant.time_ms is None and not is_not_installed(entrant.reason)
    )
    if not counted and not (is_arena and refusals):
        return None
    row = rows[0]
    method = max((int(found.get("method", 1)) for found in settings), default=1)
    versions = (f"torch {row['torch']}", f"triton {row['triton']}", *sorted(set(_versions(settings))))
    return ArenaRun(
        run_id,
        started_at,
        device,
        row["commit"] or "unknown",
        method,
        versions,
        counted,
        refusals,
        row["scale"] == "sweep",
    )


def _settings(text: str) -> dict[str, Any]:
    found = json.loads(text or "{}")
    return found if isinstance(found, dict) else {}


def _entrant(row: Mapping[str, Any], settings: Mapping[str, Any], *, on_gpu: bool) -> Entrant:
    value = None if pd.isna(row["value"]) else float(row["value"])
    missing = bool(settings.get("not_recorded")) and on_gpu
    return Entrant(row["model"], value, row["status"], row["error"], not missing)


def _versions(settings: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for found in settings:
        for name, version in found.get("packages", {}).items():
            yield f"{name} {version}"
        # a sentence that begins with name and version
        yield from [found["peer"].partition(";")[0]] if isinstance(found.get("peer"), str) else []


def arena(frame: pd.DataFrame, known: Mapping[str, Sequence[str]] | None = None) -> Document:
    """The document of stored rows of the experiment `kernels`, of any devices and dates.

    known: other projects' kernels that the arena calls where they are installed, by operator.
    """
    runs = runs_of(frame)
    newest: dict[tuple[str, tuple[str, str, str]], tuple[ArenaRun, Comparison]] = {}
    for run in runs:
        for found in run.comparisons:
            newest[run.device, found.key] = run, found
    devices = sorted({device for device, _ in newest})
    shown = {device: [pair for (where, _), pair in newest.items() if where == device] for device in devices}
    grids = [_summary(shown), *(_table(device, pairs) for device, pairs in shown.items())]
    missing = _missing(runs, known or {})
    grids += [grid for grid in (_refused(runs), missing, _history(runs)) if grid.lines]
    total = [pair for pairs in shown.values() for pair in pairs]
    ours = sum(found.ranking[0][0].name == OURS for _, found in total)
    return Document(
        name="arena",
        title="Arena: who is fastest at which operator",
        where=(
            f"{len(total)} comparisons on {', '.join(devices) or 'no device'}: ours is the fastest in {ours}, "
            f"a kernel of another project in {len(total) - ours}. {len(missing.lines)} more kernels of other projects "
            "have no comparison yet; they are listed below, and may be faster."
        ),
        grids=tuple(grids),
        notes=tuple(_notes(runs)),
        provenance=(),
    )


def _notes(runs: Sequence[ArenaRun]) -> Iterator[str]:
    if not runs:
        yield f"no rows yet; start with: {CALL} bench --arena"
        return
    yield "ours: our Triton kernel. Others are of the projects they are named after; PyTorch has those named sdpa."
    yield "Before it is timed, an implementation is compared with the recurrence in float64; a wrong one has no time."
    yield "A case is shown once for each device, from its newest run. Times of two runs are never divided."
    for method in sorted({run.method for run in runs}):
        yield f"method {method}: {METHODS.get(method, 'unknown to this version')}."
    if any(run.is_sweep for run in runs):
        yield f"method {SWEPT}: a kernel of another project was compared with ours there, and not with the recurrence."
    yield f"measure it on your GPU: {CALL} bench --arena --minutes 12; the same command continues"
    if any(not entrant.is_recorded for run in runs for found in run.comparisons for entrant in found.entrants):
        yield f"{UNRECORDED}: the call could not be recorded, so the time of its host counts."


def _summary(shown: Mapping[str, Sequence[tuple[ArenaRun, Comparison]]]) -> Grid:
    lines, runs = [], []
    for device, pairs in shown.items():
        for op in sorted({found.op for _, found in pairs}):
            mine = [(run, found) for run, found in pairs if found.op == op]
            wins = Counter(found.ranking[0][0].name for _, found in mine)
            winners = ", ".join(f"{SHOWN.get(name, name)} {count}" for name, count in wins.most_common())
            lines.append((device, op, winners, str(len(mine)), str(wins[OURS])))
            runs.append(tuple(dict.fromkeys(run.run_id for run, _ in mine)))
    header = ("device", "operator", "comparisons won", "comparisons", "won by ours")
    return Grid("", header, tuple(lines), 3, tuple(runs))


def _table(device: str, pairs: Sequence[tuple[ArenaRun, Comparison]]) -> Grid:
    header = ("operator", "case", "pass", "fastest", "others, times as long", "ms", "ours, ms", "measured", "method")
    lines, runs = [], []
    for run, found in sorted(pairs, key=lambda pair: pair[1].key):
        (first, best), *rest = found.ranking
        others = ", ".join(f"{entrant.label} {time / best:.2f}" for entrant, time in rest)
        ours = DASH if found.ours_ms is None else f"{found.ours_ms:.4f}"
        line = (*found.key, first.label, others or DASH, f"{best:.4f}", ours, run.started_at[:10], run.method_text)
        lines.append(line)
        runs.append((run.run_id,))
    return Grid(f"Times on {device}", header, tuple(lines), 5, tuple(runs))


def _refused(runs: Sequence[ArenaRun]) -> Grid:
    """Implementations without a time in the newest run that tried them, each with the reason."""
    last: dict[tuple[str, ...], tuple[ArenaRun, Entrant | None]] = {}
    for run in runs:
        for entrant, found in run.refusals:
            last[(run.device, entrant.name, *found.key)] = run, entrant
        for found in run.comparisons:
            for timed, _ in found.ranking:
                last[(run.device, timed.name, *found.key)] = run, None
    reasons: dict[tuple[str, ...], list[tuple[str, ArenaRun]]] = {}
    for (device, name, op, case, direction), (run, refused) in last.items():
        if refused is not None:
            reason = f"{refused.status}: {refused.reason}"
            reasons.setdefault((name, op, device, reason), []).append((f"{case} {direction}", run))
    lines, ids = [], []
    for (name, op, device, reason), cases in sorted(reasons.items()):
        text = cases[0][0] if len(cases) == 1 else f"{cases[0][0]} and {len(cases) - 1} more"
        lines.append((SHOWN.get(name, name), op, text, reason, device, max(run.started_at[:10] for _, run in cases)))
        ids.append(tuple(dict.fromkeys(run.run_id for _, run in cases)))
    header = ("implementation", "operator", "cases", "why it has no time", "device", "measured")
    return Grid("Without a time", header, tuple(lines), 5, tuple(ids))


def _missing(runs: Sequence[ArenaRun], known: Mapping[str, Sequence[str]]) -> Grid:
    """Kernels of other projects that no run has timed."""
    timed = {(one.op, entrant.name) for run in runs for one in run.comparisons for entrant, _ in one.ranking}
    lines = tuple((op, name) for op, names in sorted(known.items()) for name in names if (op, name) not in timed)
    return Grid("Not measured yet", ("operator", "implementation"), lines, 2, ((),) * len(lines))


def _history(runs: Sequence[ArenaRun]) -> Grid:
    header = ("measured", "device", "method", "commit", "versions", "comparisons", "won by ours")
    lines, method = [], None
    for run in runs:
        changed = " (changed)" if method not in (None, run.method) else ""
        method = run.method
        where = (run.started_at[:16].replace("T", " "), run.device, f"{run.method_text}{changed}", run.commit[:10])
        lines.append((*where, ", ".join(run.versions), str(len(run.comparisons)), str(run.wins[OURS])))
    return Grid("History", header, tuple(lines), 5, tuple((run.run_id,) for run in runs))
