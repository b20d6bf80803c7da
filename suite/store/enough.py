"""Runs of a grid that are not needed, because a value before theirs is good enough.

A table shows the best of several values, such as learning rates (`select.best_of`). Where one of them reaches
`select.enough` with all its seeds, the others could raise the cell by no more than what is left above that value. The
table shows the first such value in the order of the grid, so only the values after it are not needed: one before it
may be good enough too, and would then be shown, whichever was carried out first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from subquad.suite.identity import setting_of
from subquad.suite.runs import Run
from subquad.suite.settings.grid import lookup
from subquad.suite.settings.report_spec import Select
from subquad.suite.store import endings, storage
from subquad.suite.store.target import stamp

COLUMNS = ("metric", "split", "slice", "step", "value")


class Enough:
    """Tells which runs of a call are not needed, from the rows that are stored when it is asked.

    runs: all runs of the call. Those that it leaves out (`--only`) count for nothing.
    selects: experiment to the selection of its report.
    """

    def __init__(self, runs: Sequence[Run], root: Path, selects: Mapping[str, Select | None]) -> None:
        self._settings: dict[str, str] = {}
        self._values: dict[str, dict[str, list[Run]]] = {}
        """Setting to its values, in the order of the grid, and the runs of each, one a seed."""
        self._places: dict[str, int] = {}
        self._selects = selects
        self._root = root
        self._good: dict[str, tuple[tuple[str, ...], bool]] = {}
        self._published: dict[Path, dict[str, Path]] = {}
        """Folder to its runs that stand in parts."""
        for run in runs:
            select = selects.get(run.experiment)
            if select is None or select.enough is None or run.is_planned_only:
                continue
            config = run.resolved
            setting = f"{run.experiment}/{run.scale} {setting_of(config, select.best_of)}"
            values = self._values.setdefault(setting, {})
            values.setdefault(setting_of(config), []).append(run)
            self._settings[run.run_id] = setting
            self._places[run.run_id] = len(values)

    def in_order(self, runs: Sequence[Run]) -> list[Run]:
        """The runs in an order in which every setting tries its first value before another tries its second."""
        return sorted(runs, key=lambda run: self._places.get(run.run_id, 0))

    def setting(self, run_id: str) -> str | None:
        """Names what a run shares with those that may make it needless; None where nothing can."""
        return self._settings.get(run_id)

    def of(self, run: Run, root: Path) -> Enough | None:
        """Returns a copy that knows only the runs of this run's setting; None where no run can make it needless.

        root: the folder of results in the process that uses the copy.
        """
        if (setting := self.setting(run.run_id)) is None:
            return None
        runs = [other for value in self._values[setting].values() for other in value]
        return Enough(runs, root, {run.experiment: self._selects[run.experiment]})

    def why_not(self, run: Run) -> str:
        """Why a run is not needed, in a few words; empty where it is, and where its own rows are stored."""
        if (setting := self.setting(run.run_id)) is None or self._path(run) is not None:
            return ""
        for others in self._values[setting].values():
            if run in others:
                return ""
            if all(map(self._is_good, others)):
                select = self._selects[run.experiment]
                assert select is not None
                return f"run {others[0].run_id[:6]} of this setting reached {select.by} {select.enough:g}"
        return ""

    def _path(self, run: Run) -> Path | None:
        own = storage.result_path(self._root, run.experiment, run.scale, run.run_id)
        if own.exists():
            return own
        if own.parent not in self._published:
            # parts appear rarely, so it is enough to look once
            self._published[own.parent] = endings.published_in(own.parent, lambda reason: None)
        return self._published[own.parent].get(run.run_id)

    def _is_good(self, run: Run) -> bool:
        if (path := self._path(run)) is None or (now := stamp(path)) is None:
            return False
        known = self._good.get(run.run_id)
        if known is None or known[0] != now:
            known = self._good[run.run_id] = now, self._reaches(run, path)
        return known[1]

    def _reaches(self, run: Run, path: Path) -> bool:
        select = self._selects[run.experiment]
        try:
            ending = endings.endings_in(path)[run.run_id] if storage.is_part(path) else endings.ending(path)
            if select is None or ending is None or ending.status != "ok":
                return False
            rows = storage.load(path, COLUMNS, run_id=run.run_id).to_pylist()
        except storage.SchemaError:
            # rows that cannot be believed make no run needless
            return False
        wanted = (select.by, select.split, "")
        found = [
            (row["step"], row["value"]) for row in rows if (row["metric"], row["split"], row["slice"] or "") == wanted
        ]
        return select.suffices(select.score(found, lookup(run.resolved, "train.keep")))
