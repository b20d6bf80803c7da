"""Shows the progress of a grid and its current runs on a terminal; elsewhere, prints one line per finished run."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from subquad.suite.options import shortened
from subquad.suite.registry import counted
from subquad.suite.runner import UNNEEDED, Finished
from subquad.suite.runs import Progress as RunProgress
from subquad.suite.runs import Run
from subquad.suite.settings.grid import iter_keys

MOST_SETTINGS = 4
"""A label with more settings than that would not fit on a line."""


class Labels:
    """Runs in a few words, with the settings that tell a run from those with the same title.

    `gsa on mqar, seed 0, d_model=16 [1f0c...]`, `attention torch, forward [9a70...]`. Settings are compared when
    a label is first asked for, because those of 10,000 runs take seconds.

    runs: all runs of a call.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.alike: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            self.alike.setdefault((run.experiment, run.title), []).append(run)
        self.settings: dict[str, str] = {}

    def __call__(self, run: Run) -> str:
        self.settings |= _differing(self.alike.pop((run.experiment, run.title), ()))
        return f"{run.title}{self.settings.get(run.run_id, '')} [{run.run_id[:6]}]"


def _differing(runs: Sequence[Run]) -> dict[str, str]:
    """Maps a run id to the settings in which the runs differ: `, d_model=16`. A single run has none."""
    if len(runs) < 2:
        return {}
    flat = [dict(iter_keys(run.resolved)) for run in runs]
    keys = [key for key in dict.fromkeys(key for values in flat for key in values) if _differ(flat, key)]
    # settings that tell more runs apart come first, since a label has room for few
    parts, telling = [0] * len(runs), list[str]()
    for key in keys:
        finer: dict[tuple[int, str], int] = {}
        after = [
            finer.setdefault((part, repr(values.get(key))), len(finer))
            for part, values in zip(parts, flat, strict=True)
        ]
        if max(after) > max(parts):
            parts, telling = after, [*telling, key]
    keys = sorted(keys, key=lambda key: key not in telling)
    found = {}
    for run, values in zip(runs, flat, strict=True):
        chosen = [key for key in keys if key in values][:MOST_SETTINGS]
        found[run.run_id] = "".join(f", {key.partition('.')[2]}={shortened(values[key])}" for key in chosen)
    return found


def _differ(flat: Sequence[dict[str, object]], key: str) -> bool:
    return any(values.get(key) != flat[0].get(key) for values in flat)


NARROW = 100
"""On a terminal of fewer characters, what a run measures gives way to its name, its bar and its time."""
ROOM = 52
"""Characters of a line that the bar, the count, the time and the spaces between them take."""
SHORTEST_NAME = 12


class _Name(TextColumn):
    """The name of a run, cut to what the other columns leave."""

    def __init__(self, console: Console) -> None:
        super().__init__("{task.description}", markup=False, table_column=Column(no_wrap=True))
        self.console = console

    def render(self, task: Task) -> Text:
        text = super().render(task)
        # half of the room that is left belongs to the note, where there is one
        room = self.console.width - ROOM
        room = room if self.console.width < NARROW else room - min(len(str(task.fields["note"])), room // 2)
        text.truncate(max(room, SHORTEST_NAME), overflow="ellipsis")
        return text


class _Note(TextColumn):
    """The progress that a run reports, such as its loss, where the terminal has room for it."""

    def __init__(self, console: Console) -> None:
        super().__init__("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True))
        self.console = console

    def render(self, task: Task) -> Text:
        if self.console.width < NARROW:
            return Text("")
        text = super().render(task)
        text.truncate((self.console.width - ROOM) // 2, overflow="ellipsis")
        return text


class GridDisplay:
    """Context manager that shows a bar for the grid and one for each current run.

    runs: all runs of the grid, by which labels tell those apart that differ only in a setting.
    """

    def __init__(self, console: Console, total: int, quiet: bool = False, runs: Sequence[Run] = ()) -> None:
        self.console = console
        self.label = Labels(runs)
        self.live = console.is_terminal and not quiet
        self.quiet = quiet
        self.bars = Progress(
            SpinnerColumn(),
            _Name(console),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Note(console),
            TimeRemainingColumn(),
            console=console,
            disable=not self.live,
        )
        self.grid = self.bars.add_task("grid", total=total, note="")
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> GridDisplay:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def started(self, run: Run) -> None:
        """A run has started."""
        self.tasks[run.run_id] = self.bars.add_task(self.label(run), total=None, note="preparing")

    def progressed(self, run: Run, progress: RunProgress) -> None:
        """A run reports how far it is."""
        if run.run_id not in self.tasks:
            self.started(run)
        task = self.tasks[run.run_id]
        self.bars.update(task, completed=progress.step, total=progress.total_steps, note=progress.note)

    def finished(self, finished: Finished) -> None:
        """A run ended; its line stays on the screen."""
        if finished.run.run_id in self.tasks:
            self.bars.remove_task(self.tasks.pop(finished.run.run_id))
        self.bars.advance(self.grid)
        if self.quiet:
            return
        found = f"{finished.found}  " if finished.found else ""
        reason = f"  {finished.error.splitlines()[0]}" if finished.error else ""
        line = f"{finished.status:9s}{self.label(finished.run)}  {found}{finished.seconds:.1f} s{reason}"
        style = {"ok": "", "n/a": "dim", UNNEEDED: "dim"}.get(finished.status, "red")
        self.bars.console.print(line, style=style, markup=False, highlight=False)

    def stopping(self) -> None:
        """The user asked for an end, or the time is up, and the current runs save what they have."""
        runs = "run" if len(self.tasks) == 1 else "runs"
        self.bars.console.print(f"saving {len(self.tasks)} {runs}, press again to end at once", highlight=False)

    def waiting(self, num_runs: int, holders: str) -> None:
        """Other processes carry out all runs that are left."""
        runs = counted(num_runs)
        line = f"waiting for {runs} of {holders}; Ctrl-C leaves {'it' if num_runs == 1 else 'them'} there"
        self.bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def repeated(self, run: Run, reason: str) -> None:
        """A run is tried once more, because its worker did not survive it."""
        if run.run_id in self.tasks:
            self.bars.remove_task(self.tasks.pop(run.run_id))
        line = f"again    {self.label(run)}  {reason}"
        self.bars.console.print(line, style="yellow", markup=False, highlight=False)

    def interrupted(self, reason: str = "interrupted", *, fresh: bool = False) -> None:
        """The grid ends before all its runs have ended. fresh: its command ignores what is stored."""
        continues = "the same command continues the grid, and each training run from its last checkpoint"
        anew = "--force would repeat all runs from their first step, also those that have ended now"
        self.bars.console.print(f"{reason}; {anew if fresh else continues}", soft_wrap=True, highlight=False)
