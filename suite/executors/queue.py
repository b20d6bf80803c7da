"""The runs of a grid that are left, shared with every other process that works on the same folder of results."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from subquad.suite.runner import ENDED, UNNEEDED, Finished
from subquad.suite.runs import Progress, Run
from subquad.suite.store import endings, storage
from subquad.suite.store.claims import Claims
from subquad.suite.store.enough import Enough
from subquad.suite.store.target import stamp

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the runs that other processes have."""


class Display(Protocol):
    """Interface through which an executor reports the progress of its runs."""

    def started(self, run: Run) -> None: ...

    def progressed(self, run: Run, progress: Progress) -> None: ...

    def finished(self, finished: Finished) -> None: ...

    def stopping(self) -> None: ...

    def repeated(self, run: Run, reason: str) -> None: ...

    def waiting(self, num_runs: int, holders: str) -> None: ...


def may_carry_out(run: Run, imported: Collection[str]) -> bool:
    """Whether a process that has imported these plugins may carry out a run: whether the run uses all of them.

    A plugin may have changed anything in its process, such as the default dtype or a metric.
    """
    return run.imports.issuperset(imported)


class RunQueue:
    """Hands out runs to this process, each to one process at a time, and keeps how they ended.

    A run that another process has claimed is left to it. Once no other run is left, the queue waits until that process
    has stored the run, which then counts as ended, or until its claim has expired.

    repeat: stored runs are repeated, except those that are stored by another process from now on.
    enough: tells which runs need not be carried out any more; they count as ended. None: all of them are needed.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        root: Path,
        claims: Claims,
        display: Display,
        *,
        repeat: bool,
        enough: Enough | None = None,
    ) -> None:
        self.ended: list[Finished] = []
        self.claims, self.display, self.repeats, self.enough = claims, display, repeat, enough
        self._paths = {run.run_id: storage.result_path(root, run.experiment, run.scale, run.run_id) for run in runs}
        self._before = {run_id: stamp(path) for run_id, path in self._paths.items()}
        self._waiting = deque(runs)
        self._again: deque[Run] = deque()
        self._elsewhere: dict[str, Run] = {}
        self._current: set[str] = set()
        self._look_at = 0.0
        self._said: Counter[str] = Counter()

    @property
    def left(self) -> bool:
        """Whether runs are left that are neither ended nor carried out here."""
        return bool(self._waiting or self._again or self._elsewhere)

    def next(self, place: str = "") -> Run | None:
        """A run for this process, which holds its claim; None where others have all that are left."""
        if self._again:
            return self._start(self._again.popleft())
        while self._waiting:
            run = self._take()
            if reason := self.enough.why_not(run) if self.enough else "":
                self._keep(Finished(run, UNNEEDED, reason, 0.0, "", stored=False))
            elif self._claimed(run, place) is None:
                return self._start(run)
        if self._elsewhere and time.monotonic() >= self._look_at:
            holders: Counter[str] = Counter()
            for run in list(self._elsewhere.values()):
                holder = self._claimed(run, place)
                if holder is None:
                    return self._start(run)
                if run.run_id in self._elsewhere:
                    holders[holder] += 1
            self._look_at = time.monotonic() + LOOK_EVERY_S
            if holders and not self._current and holders.keys() != self._said.keys():
                self._said = holders
                self.display.waiting(holders.total(), "; ".join(sorted(holders)))
        return None

    def _take(self) -> Run:
        """The next waiting run. One whose setting has a current run comes last, since that run may make it needless."""
        if self.enough is not None:
            busy = {self.enough.setting(run_id) for run_id in self._current} - {None}
            for index, run in enumerate(self._waiting):
                if self.enough.setting(run.run_id) not in busy:
                    del self._waiting[index]
                    return run
        return self._waiting.popleft()

    def _start(self, run: Run) -> Run:
        self._elsewhere.pop(run.run_id, None)
        self._current.add(run.run_id)
        self.display.started(run)
        return run

    def _claimed(self, run: Run, place: str) -> str | None:
        """None if this process has the run now, else who has it or had it.

        A run whose claim cannot be written counts as ended, with the reason.
        """
        path = self._paths[run.run_id]
        try:
            holder = self.claims.take(run, place)
            if holder is not None:
                self._elsewhere[run.run_id] = run
                return holder.holder
            now = stamp(path)
            ending = _ending(path) if now is not None else None
        except OSError as error:
            self._elsewhere.pop(run.run_id, None)
            reason = f"it was not carried out, because its claim could not be written ({error.strerror or error})"
            self._keep(Finished(run, "failed", f"{reason}; give the command again", 0.0, "", stored=False))
            return "nobody"
        changed = now != self._before[run.run_id]
        if ending is None or not (changed or (not self.repeats and ending.status in ENDED)):
            return None
        self.claims.release(run)
        self._elsewhere.pop(run.run_id, None)
        self._keep(Finished(run, ending.status, "", 0.0, "stored by another process"))
        return "another process"

    def end(self, finished: Finished) -> None:
        """Takes a run that was carried out here and whose rows are written."""
        self._current.discard(finished.run.run_id)
        self.claims.release(finished.run)
        self._keep(finished)

    def _keep(self, finished: Finished) -> None:
        self.ended.append(finished)
        self.display.finished(finished)

    def repeat(self, run: Run, reason: str) -> None:
        """Takes back a run that is to be tried once more; this process keeps its claim."""
        self._current.discard(run.run_id)
        self._again.append(run)
        self.display.repeated(run, reason)

    def leave(self, run: Run) -> None:
        """Takes back a run that was interrupted, which any process may continue."""
        self._current.discard(run.run_id)
        self.claims.release(run)


def _ending(path: Path) -> endings.Ending | None:
    """The ending of a stored run; None where its file cannot be believed, so that the run is repeated (`--force`)."""
    try:
        return endings.ending(path)
    except storage.SchemaError:
        return None
