"""Selects the runs that a report shows: those of each cell of its table.

`select_runs` keeps the runs that are points of the grid, in a timing those of one device, of these the runs with the
best value of `select.best_of`, and in each cell those of one setting. It notes the runs that are left out.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from subquad.reports.render.plan import Plan, matches
from subquad.reports.render.rows import StoredRun
from subquad.suite.identity import setting_of
from subquad.suite.registry import counted
from subquad.suite.settings.grid import iter_keys, lookup, same
from subquad.suite.settings.report_spec import Select


@dataclass(frozen=True)
class Tried:
    """The values of `select.best_of` that were tried in the setting of a chosen run."""

    compared: int
    """Number of values that were compared."""
    lacks_earlier: bool
    """Whether a value before the chosen one in the grid was not compared, because some of its runs are missing."""
    at_edge: bool = False
    """Whether none of the compared values is smaller, or none is larger, than the chosen one of a setting. One that is
    good enough (`select.enough`) needs no neighbour, and a zero none below it."""


OWN_VALIDATION = frozenset(
    (
        *("image-folder", "lra-image", "lra-listops", "lra-pathfinder", "lra-pathx", "lra-retrieval", "recordings"),
        *("sc09", "species", "speech-commands", "text-file", "text-recall", "wikitext", "youtubemix"),
    )
)
"""Tasks whose source has a validation split of its own, so that `split_policy: paper` does not validate on test."""


def validates_on_test(config: Mapping[str, Any]) -> bool:
    """Whether the validation rows of a resolved run are its test rows."""
    return lookup(config, "task.split_policy") == "paper" and lookup(config, "task.name") not in OWN_VALIDATION


Planned = Callable[[], Iterable[Mapping[str, Any]]]
"""Gives the resolved settings of the runs that a grid has today."""
Settled = Mapping[tuple[str, str], Sequence[StoredRun]]
"""(row, column) to the runs that its cell shows."""


@dataclass(frozen=True)
class Selection:
    """The runs behind a report."""

    compared: Sequence[StoredRun]
    """Every run that the report could show; its cells have the best of them."""
    settled: Settled
    tried: Mapping[str, Tried]
    """Run id to the values of `select.best_of` that were compared."""
    left_out: Sequence[str]
    """A note for each kind of run that is not shown."""
    apart: Sequence[str] = ()
    """Dotted keys whose values tell runs that are not shown from those that are."""

    @property
    def shown(self) -> list[StoredRun]:
        """The runs that the cells show, each once."""
        return list({run.run_id: run for found in self.settled.values() for run in found}.values())


def select_runs(plan: Plan, stored: Sequence[StoredRun], planned: Planned = tuple) -> Selection:
    """The runs of every cell.

    stored: runs of the experiment, of any scales. planned: is asked only where a cell has runs of several settings.
    """
    compared, left_out, apart = on_grid([run for run in stored if run.scale == plan.scale], plan.points)
    timed = compared if plan.config.timed else [run for run in compared if is_of_one_device(run)]
    if timed:
        of_device, elsewhere = one_device(timed)
        others = {run.run_id for run in timed} - {run.run_id for run in of_device}
        compared = [run for run in compared if run.run_id not in others]
        if elsewhere:
            left_out.append(f"left out: {counted(elsewhere)} on another device than that of the newest run")
    best, tried = select_best(compared, plan.config.select, plan.points, plan.num_seeds)
    # in a mean over settings, another run may be the best one in each
    best_of = plan.config.select.best_of if plan.config.select else ()
    free = {*plan.spec.mean_over, *best_of} if plan.spec.mean_over else ()
    today = functools.cache(lambda: tuple(planned()))
    found = runs_by_cell(plan, best)
    settled = {place: settle(runs, free, today) for place, runs in found.items()}
    stale: set[str] = set()
    for place, runs in found.items():
        kept = {run.run_id for run in settled[place]}
        for run in (run for run in runs if run.run_id not in kept):
            stale.add(run.run_id)
            apart |= _differing(run, settled[place][0])
    if stale:
        left_out.append(f"left out: {counted(len(stale))} with another setting than the runs that their cell shows")
    return Selection(compared, settled, tried, left_out, sorted(apart))


def runs_by_cell(plan: Plan, runs: Sequence[StoredRun]) -> dict[tuple[str, str], list[StoredRun]]:
    """The runs of every cell in `plan.places`.

    The runs of a row are found once for all its columns, because a table may have a thousand cells and runs.
    """
    spec = plan.spec
    found: dict[tuple[str, str], list[StoredRun]] = {}
    of_row: dict[tuple[str, frozenset[str]], list[StoredRun]] = {}
    for row, column in plan.places():
        if row not in spec.rows or plan.is_speedup(column):
            found[row, column] = []
            continue
        # a column may state another value for a key of the row
        wanted = spec.rows[row].keys() - spec.columns[column].keys()
        here = row, frozenset(wanted)
        if here not in of_row:
            selector = {key: spec.rows[row][key] for key in wanted}
            of_row[here] = [run for run in runs if matches(selector, run.config)]
        found[row, column] = [run for run in of_row[here] if matches(spec.columns[column], run.config)]
    return found


def keys_of(point: Mapping[str, Any]) -> Iterator[str]:
    """Dotted keys that a run must share with a point of the grid: all but the folder of the data."""
    return (key for key in point if key != "task.data")


class GridPoints:
    """Tells whether a resolved run is a point of a grid, for thousands of runs and points.

    A set of points is an integer with a bit for each. Every value that points state under a key is compared once with
    each value that runs have, however many points state it and runs have it.
    """

    def __init__(self, points: Sequence[Mapping[str, Any]]) -> None:
        self.all = (1 << len(points)) - 1
        self.stated: dict[str, dict[str, tuple[Any, int]]] = {}
        """Key to the text of each value, to the value and the points that state it."""
        for i, point in enumerate(points):
            for key in keys_of(point):
                values = self.stated.setdefault(key, {})
                value, found = values.get(repr(point[key]), (point[key], 0))
                values[repr(value)] = value, found | 1 << i
        self.fits: dict[tuple[str, str], int] = {}
        """Key and text of a run's value to the points that state none under the key or one that means it."""

    def __call__(self, config: Mapping[str, Any]) -> bool:
        return bool(self._matching(config))

    def place(self, config: Mapping[str, Any]) -> int:
        """Index of the first point that a resolved run is; -1 where it is none."""
        found = self._matching(config)
        return (found & -found).bit_length() - 1

    def _matching(self, config: Mapping[str, Any]) -> int:
        """The points that a resolved run is, a bit for each."""
        left = self.all
        for key, values in self.stated.items():
            found = lookup(config, key)
            seen = key, repr(found)
            if seen not in self.fits:
                others = (stating for value, stating in values.values() if not same(value, found))
                self.fits[seen] = self.all & ~sum(others)
            left &= self.fits[seen]
        return left


def _differing(first: StoredRun, second: StoredRun) -> set[str]:
    """The dotted keys under which two runs have other values, but for their seeds and the folder of their data."""
    both = [dict(iter_keys(run.config)) for run in (first, second)]
    hidden = ("seed", "data", "task.data")
    return {key for key in both[0].keys() | both[1].keys() if both[0].get(key) != both[1].get(key)} - {*hidden}


def on_grid(
    runs: Sequence[StoredRun], points: Sequence[Mapping[str, Any]]
) -> tuple[list[StoredRun], list[str], set[str]]:
    """The runs that are points of the grid, a note for each kind of the others, and the keys that these miss it by.

    Only values that the grid states are compared. A run whose setting was changed with `--set`, where the grid leaves
    that setting at its default, counts as a point of the grid here; `settle` separates it.
    """
    kept = []
    strange: dict[str, int] = {}
    keys: set[str] = set()
    is_point = GridPoints(points)
    for run in runs:
        if is_point(run.config):
            kept.append(run)
            continue
        missed = [[key for key in keys_of(point) if not same(point[key], lookup(run.config, key))] for point in points]
        keys |= set(least := min(missed, key=len))
        text = ", ".join(f"{key}: {lookup(run.config, key)}" for key in least)
        strange[text] = strange.get(text, 0) + 1
    notes = [
        f"left out: {counted(count)} with {text}, which no point of this grid has"
        for text, count in sorted(strange.items())
    ]
    return kept, notes, keys


def is_of_one_device(run: StoredRun) -> bool:
    """Whether a run trained for a time, so that its results hold for its device and are averaged with no other's."""
    return lookup(run.config, "train.budget.seconds") is not None


def training_times(runs: Sequence[StoredRun]) -> str:
    """The times that runs trained for, as in `180 s`; empty where they had other budgets."""
    found = {lookup(run.config, "train.budget.seconds") for run in runs} - {None}
    return " or ".join(f"{seconds:g} s" for seconds in sorted(found))


def one_device(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], int]:
    """The runs of the device that the newest run used, and how many runs are of others.

    Times of different devices are never compared.
    """
    if not runs:
        return [], 0
    return _of_device(runs, max(runs, key=lambda run: (run.started_at, run.run_id)).device)


def commonest_device(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], int]:
    """The runs of the device that most runs used, of two the newer one, and how many runs are of others."""
    if not runs:
        return [], 0
    times: dict[str, list[str]] = {}
    for run in runs:
        times.setdefault(run.device, []).append(run.started_at)
    return _of_device(runs, max(times, key=lambda device: (len(times[device]), max(times[device]), device)))


def _of_device(runs: Sequence[StoredRun], device: str) -> tuple[list[StoredRun], int]:
    kept = [run for run in runs if run.device == device]
    return kept, len(runs) - len(kept)


def score(run: StoredRun, select: Select) -> float | None:
    """The number that a run is selected by (`Select.score`); None for a run that failed."""
    chosen = _evaluation(run, select)
    return None if chosen is None else chosen[1]


def _evaluation(run: StoredRun, select: Select) -> tuple[int, float] | None:
    """Step and score of the evaluation that a run is selected by; None for a run that failed."""
    if run.status != "ok":
        return None
    return select.evaluation(_measured(run, select), lookup(run.config, "train.keep"))


def _measured(run: StoredRun, select: Select) -> list[tuple[int, float | None]]:
    """Step and value of every evaluation that a run could be selected by."""
    return run.values.points(select.by, select.split, "")


def select_best(
    runs: Sequence[StoredRun], select: Select | None, points: Sequence[Mapping[str, Any]], num_seeds: int
) -> tuple[list[StoredRun], dict[str, Tried]]:
    """The runs with the best value of `select.best_of`, among runs that differ only in it and in the seed.

    The best value has the largest mean score over seeds, and `Select` says which one of equal values is taken. A value
    with fewer failed runs is preferred, so that the surviving seeds of a setting that mostly diverges do not win. One
    that lacks seeds of the grid which another value has is not compared: it could win by one lucky seed.

    points: all points of the grid, in its order. num_seeds: seeds that the grid asks for.

    Returns the runs, and run id to the values that were compared. ValueError where values are to be compared and no run
    was ever measured by `select.by`.
    """
    if select is None:
        return list(runs), {}
    groups: dict[str, dict[str, list[StoredRun]]] = {}
    for run in runs:
        groups.setdefault(run.setting(without=select.best_of), {}).setdefault(run.setting(), []).append(run)
    grid = GridPoints(points)
    siblings = _siblings(points, select.best_of)
    kept: list[StoredRun] = []
    tried: dict[str, Tried] = {}
    for values in groups.values():
        places = {found[0].run_id: grid.place(found[0].config) for found in values.values()}
        candidates = sorted(values.values(), key=lambda found: places[found[0].run_id])
        most = min(num_seeds, max(map(len, candidates)))
        candidates = [found for found in candidates if len(found) >= most]
        ended = [run for found in candidates for run in found if run.status == "ok"]
        if len(candidates) > 1 and ended and not any(_measured(run, select) for run in ended):
            raise ValueError(
                f"select.by: no run has {select.by!r} on its rows of {select.split}, such as {ended[0].run_id[:6]} "
                "(`show` prints what it has), so no value can be chosen by it; name another metric or split"
            )
        best = _best(candidates, select)
        kept += best
        chosen = places[best[0].run_id]
        compared = {places[found[0].run_id] for found in candidates}
        earlier = {place for place in siblings[chosen] if place < chosen}
        found = Tried(
            len(candidates),
            lacks_earlier=not earlier <= compared,
            at_edge=len(siblings[chosen]) > 1
            and not all(select.suffices(score(run, select)) for run in best)
            and any(_is_edge(key, best, candidates) for key in select.best_of),
        )
        tried.update({run.run_id: found for run in best})
    return sorted(kept, key=lambda run: run.run_id), tried


def _is_edge(key: str, best: Sequence[StoredRun], candidates: Sequence[Sequence[StoredRun]]) -> bool:
    """Whether none of the compared values of a setting, which are numbers, is on one side of the chosen one."""
    chosen, *values = (lookup(found[0].config, key) for found in (best, *candidates))
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (chosen, *values)):
        return False
    alone = len(candidates) == 1
    return (alone or len(set(values)) > 1) and (chosen == max(values) or (chosen == min(values) and chosen != 0))


def _siblings(points: Sequence[Mapping[str, Any]], keys: Collection[str]) -> list[list[int]]:
    """For each point, the indices of the points that differ from it only in these keys, in order, its own included."""
    groups: dict[frozenset[tuple[str, str]], list[int]] = {}
    found = []
    for index, point in enumerate(points):
        rest = frozenset((key, repr(value)) for key, value in point.items() if key not in keys)
        found.append(groups.setdefault(rest, []))
        found[-1].append(index)
    return found


def _best(candidates: Sequence[list[StoredRun]], select: Select) -> list[StoredRun]:
    """The runs of the best value of `select.best_of`, from those of every value in the order of the grid."""
    for found in candidates:
        # `run` may have skipped the values after this one, so they must not count
        if all(select.suffices(score(run, select)) for run in found):
            return found
    merits = [_merit(found, select) for found in candidates]
    tied = [found for found, merit in zip(candidates, merits, strict=True) if merit == max(merits)]
    losses = [loss for found in tied if (loss := _loss(found, select)) is not None]
    return tied[losses.index(min(losses))] if len(losses) == len(tied) else tied[0]


def _merit(runs: Sequence[StoredRun], select: Select) -> tuple[int, float]:
    """Number of failures, negative, and mean score of the runs of one value; more is better."""
    scores = [score(run, select) for run in runs]
    good = [s for s in scores if s is not None]
    return len(good) - len(scores), statistics.fmean(good) if good else -math.inf


def _loss(runs: Sequence[StoredRun], select: Select) -> float | None:
    """Mean loss of the evaluations that runs are selected by; None where one of them has no loss."""
    steps = [(run, chosen[0]) for run in runs if (chosen := _evaluation(run, select)) is not None]
    found = [run.find("loss", select.split, step=step) for run, step in steps]
    losses = [value.value for value in found if value is not None and value.value is not None]
    return statistics.fmean(losses) if losses and len(losses) == len(steps) else None


def settle(runs: Sequence[StoredRun], without: Collection[str] = (), planned: Planned = tuple) -> list[StoredRun]:
    """The runs of the one setting that a cell shows, or of the settings that differ only in the dotted keys `without`.

    A setting with real data is preferred to one with stand-in data, then one that the grid has today (`planned`) to
    one that was made with `--set` or before a default changed, and then the setting with the newest run. Runs of
    different settings must not be averaged.
    """
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.setting(without), []).append(run)
    if len(groups) < 2:
        return list(runs)
    # the data are part of a setting, and need not be here
    hidden = ("data", *without)
    today = {setting_of(config, hidden) for config in planned()}
    chosen = max(
        groups,
        key=lambda s: (
            not groups[s][0].stand_in,
            groups[s][0].setting(hidden) in today,
            max(run.started_at for run in groups[s]),
            s,
        ),
    )
    return groups[chosen]
