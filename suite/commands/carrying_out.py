"""A call of `run`, from the command line or from Python: checked and planned, and then carried out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.suite.commands.planning import resolved_experiments
from subquad.suite.commands.repository import Experiment, Repository
from subquad.suite.executors.contract import Executor, Settings, check_name, choose
from subquad.suite.options import located
from subquad.suite.plugins import only_on_this_machine
from subquad.suite.runner import FAILED, UNNEEDED, Finished, Planned, missing_bases, outdated, plan
from subquad.suite.runs import Run
from subquad.suite.store import elsewhere
from subquad.suite.store.enough import Enough
from subquad.suite.training.live import check_sinks

if TYPE_CHECKING:
    from subquad.suite.executors.queue import Display


@dataclass(frozen=True)
class Call:
    """A call whose arguments have been checked."""

    experiments: list[Experiment]
    planned: list[Planned]
    """The runs in grid order, with what is stored of them; with `retry_failed`, only those that ended with an error."""
    todo: list[Run]
    num_asked: int
    """Runs of the grids, whether they are planned or not."""
    place: str
    """Names the place where the runs are carried out, in a few words."""
    results: Path
    executor: Executor
    settings: Settings
    elsewhere: Mapping[str, elsewhere.Elsewhere] = field(default_factory=dict)
    """Run id to the rows that another experiment has stored of a run that is to do, which are taken."""

    @property
    def outdated(self) -> str | None:
        """One line on the stored runs that are kept although their operators have changed."""
        return outdated(self.planned)

    def require_room(self) -> None:
        """Raises ValueError where the folder of results cannot be written, unless nothing is to do."""
        from subquad.suite.store.claims import sweep
        from subquad.suite.store.target import probe

        try:
            for folder in {self.results / run.experiment / run.scale for run in self.todo}:
                probe(folder)
            sweep(self.results, [experiment.name for experiment in self.experiments])
        except OSError as error:
            if self.todo:
                reason = f"nothing can be written there ({error.strerror or error}); name another folder or free space."
                raise ValueError(f"--results {self.results}: {reason}") from None

    def carry_out(self, display: Display) -> list[Finished]:
        """Carries out what is to do and returns how it ended. Raises what `suite.executors.contract.Executor` raises.

        ValueError where the folder of results cannot be written, before anything is trained.
        """
        self.require_room()
        began, settings = time.monotonic(), self.settings
        bases = missing_bases(self.todo, self.results)
        ended: list[Finished] = []
        found = [run for run in self.todo if run.run_id in self.elsewhere and run.run_id not in bases]
        for run in elsewhere.take(found, self.elsewhere, self.results) if found else ():
            ended.append(Finished(run, "ok", "", 0.0, f"taken from {self.elsewhere[run.run_id].name}"))
            display.finished(ended[-1])
        taken = {finished.run.run_id for finished in ended}
        if bases:
            # a stored run without its weights is repeated
            repeat = settings.repeat or not bases.keys() <= {run.run_id for run in self.todo}
            first = replace(settings, repeat=repeat, keep_weights=True)
            ended += self.executor(list(bases.values()), self.results, display, first)
            if settings.within_s is not None:
                settings = replace(settings, within_s=max(0.0, settings.within_s - (time.monotonic() - began)))
        rest = [run for run in self.todo if run.run_id not in (bases.keys() | taken)]
        return ended + self.executor(rest, self.results, display, settings)


def prepare(
    repository: Repository,
    experiments: Iterable[str],
    results: Path,
    settings: Settings,
    *,
    choice: Mapping[str, Any],
    executor: str = "local",
    executor_options: Iterable[str] = (),
    force: bool = False,
    retry_failed: bool = False,
    without_data: bool = False,
) -> Call:
    """Checks and plans a call. Arguments are those of the command; every fault is a ValueError.

    choice: arguments that narrow or change a grid (`resolved_runs`).
    without_data: plan also what cannot run here.
    """
    if force and retry_failed:
        raise ValueError("--force --retry-failed: the first repeats all runs, the second some of them; give one")
    # faults that are known without torch, which takes seconds to import, come first
    check_name(executor)
    check_sinks(settings.log, results)
    if executor != "local":
        entries = [entry for registry in (repository.tasks, repository.models) for entry in registry.entries.values()]
        if files := only_on_this_machine(entries):
            raise ValueError(
                f"--executor {executor}: the nodes cannot import the plugin {files[0]}; install it as a package "
                "there and name its module, or put the file into the repository and name it as a module"
            )
    found = resolved_experiments(repository, experiments, **choice, results=results, without_data=without_data)
    carry_out = choose(executor, executor_options)
    runs = [run for _, part in found for run in part]
    if (processes := settings.processes) > 1:
        runs = located(f"--nproc {processes}", lambda: [run.in_processes(processes) for run in runs])
    timed = [experiment.name for experiment, _ in found if experiment.config.timed]
    if (settings.packed or (settings.jobs or 1) > 1) and timed:
        raise ValueError(
            f"--jobs {settings.jobs or 'auto'}: {timed[0]} times operators, and runs side by side would disturb each "
            "other; leave it out"
        )
    if len(timed) == len(found) and (settings.keep_weights or settings.log):
        option = "--keep-weights" if settings.keep_weights else f"--log {settings.log[0]}"
        raise ValueError(f"{option}: {timed[0]} measures times and trains nothing; leave it out")
    settings = replace(
        settings,
        jobs=1 if timed else settings.jobs,
        repeat=force or retry_failed,
        fresh=force,
        record=repository.recorder(),
    )
    place = carry_out.check(settings)
    planned = plan(runs, [results], force=force, versions=repository.versions())
    if retry_failed:
        planned = [item for item in planned if item.stored in FAILED]
    todo = [item.run for item in planned if item.todo or retry_failed]
    selects = {experiment.name: experiment.config.select for experiment, _ in found}
    if not (force or retry_failed) and any(select and select.enough is not None for select in selects.values()):
        enough = Enough(runs, results, selects)
        planned = [
            replace(item, stored=UNNEEDED) if item.todo and enough.why_not(item.run) else item for item in planned
        ]
        todo = enough.in_order([item.run for item in planned if item.todo])
        settings = replace(settings, enough=enough)
    # a run that is to keep its weights needs more than its rows
    takes = not (force or retry_failed or settings.keep_weights)
    stored = elsewhere.find(todo, results, repository.versions) if takes else {}
    listed = [experiment for experiment, _ in found]
    return Call(listed, planned, todo, len(runs), place, results, carry_out, settings, stored)
