"""`run`: carries out the runs of a grid that are not stored yet."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.suite.commands.console import skipped
from subquad.suite.commands.planning import Data, Only, Scale, Seeds
from subquad.suite.commands.repository import (
    LOCAL,
    Device,
    Experiment,
    ExperimentNames,
    Plugins,
    Repository,
    Results,
    Sets,
    repository_of,
    shown,
)
from subquad.suite.environment import CALL
from subquad.suite.options import seconds, shortened
from subquad.suite.registry import counted
from subquad.suite.runs import Run

if TYPE_CHECKING:
    from rich.console import Console

    from subquad.suite.commands.carrying_out import Call
    from subquad.suite.runner import Planned


AUTO = "auto"
WIDTH = 118
"""Characters of a line of settings in a plan."""


def run(
    context: typer.Context,
    experiments: ExperimentNames,
    plugins: Plugins = None,
    scale: Scale = None,
    only: Only = None,
    overrides: Sets = None,
    seeds: Seeds = None,
    device: Device = None,
    data: Data = None,
    results: Results = LOCAL,
    jobs: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Runs at a time; auto: as many as share a GPU well, on a CPU one a core. Default: 1 on this machine, "
            "as many as fit on a cluster.",
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Processes that train each run together, on a GPU each (docs/grids.md)."),
    ] = None,
    executor: Annotated[
        str, typer.Option(help="What carries out the runs: local, or ray or slurm on a cluster (docs/grids.md).")
    ] = "local",
    executor_options: Annotated[
        list[str] | None, typer.Option("--executor-options", help="Options of the executor: address=auto,gpus=0.25.")
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            help="CPU threads of each training run; another number rounds differently, which training can amplify."
        ),
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and train nothing.")] = False,
    keep_weights: Annotated[
        bool, typer.Option("--keep-weights", help="Keep the weights of trained models, for `generate`.")
    ] = False,
    log: Annotated[
        list[str] | None,
        typer.Option(help="Show the metrics of training in tensorboard, trackio or wandb, too; repeatable."),
    ] = None,
    within: Annotated[
        str | None,
        typer.Option(help="Time after which current runs save and no other starts: 90s, 10m, 2h; then exit code 3."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Repeat stored runs, from their first step.")] = False,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Repeat the stored runs that ended with an error, from their checkpoints."),
    ] = False,
) -> None:
    """Carry out the runs of experiments. Stored runs are skipped, and interrupted ones continue."""
    from subquad.suite.commands.carrying_out import prepare
    from subquad.suite.commands.console import lasting_console, table_console
    from subquad.suite.executors.contract import LeftRunningError, Settings
    from subquad.suite.runner import FAILED, UNNEEDED

    repository = repository_of(context, plugins)
    processes = _processes(nproc, executor)
    call = prepare(
        repository,
        experiments,
        results,
        Settings(
            device=device,
            jobs=None if jobs in (None, AUTO) else _number(jobs),
            packed=jobs == AUTO,
            processes=processes,
            threads=threads,
            keep_weights=keep_weights,
            log=tuple(dict.fromkeys(log or ())),
            within_s=None if within is None else seconds(within, "--within"),
        ),
        choice={"scale": scale, "only": only, "overrides": overrides, "seeds": seeds, "data": data},
        executor=executor,
        executor_options=executor_options or (),
        force=force,
        retry_failed=retry_failed,
        without_data=dry_run,
    )
    if dry_run:
        # a dry run gives nothing but its plan, so it fails if the plan cannot be printed
        console = table_console()
    else:
        # torchrun starts several processes, and only the first of them prints
        console = lasting_console(quiet=processes > 1 and os.environ.get("RANK", "0") != "0")
    if (line := call.outdated) is not None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        # a cluster takes as many runs at a time as fit, unless it is told how many
        alone = None if jobs == AUTO or executor != "local" else 1
        changes = "".join(f" --set {shlex.quote(text)}" for text in overrides or ())
        changes += "" if data is None else f" --data {shlex.quote(str(data))}"
        options = f"{_plugin_options(plugins)}{changes}{_results_option(call.results)}"
        _print_dry_run(console, call, repository, scale, call.settings.jobs or alone, options)
        return
    _print_stored(console, call, retry_failed)

    from subquad.suite.display import GridDisplay
    from subquad.suite.executors.local import OutOfTimeError

    with GridDisplay(console, len(call.todo), runs=[item.run for item in call.planned]) as display:
        try:
            ended = call.carry_out(display)
        except OutOfTimeError:
            display.interrupted("the time is up", fresh=force)
            raise typer.Exit(3) from None
        except LeftRunningError as left:
            console.print(str(left), highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(left.exit_code) from None
        except KeyboardInterrupt:
            display.interrupted(fresh=force)
            raise typer.Exit(130) from None
    bad = [finished for finished in ended if finished.status in FAILED]
    if bad:
        unstored = sum(not finished.stored for finished in bad)
        show = f"show {bad[0].run.run_id[:6]}{_results_option(results)}"
        where = f"their rows say why (`{show}`)" if not unstored else f"the rows of {unstored} could not be written"
        line = f"{len(bad)} of {len(ended)} runs ended with an error; {where}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1)
    done = sum(finished.status != UNNEEDED for finished in ended)
    count = counted(done) + f", {len(ended) - done} not needed" * (done < len(ended))
    reports = _report_commands(call, repository.experiments(), plugins or (), scale, overrides or ())
    console.print(f"done: {count}; now: {reports}", highlight=False, markup=False, soft_wrap=True)


def _report_commands(
    call: Call, known: Container[str], plugins: Iterable[str], scale: str | None, overrides: Sequence[str]
) -> str:
    """Returns the commands that show the runs of a call, given its options and the names of all experiments."""
    # the next command must name again a folder that is not among ours, the plugins and the rows; a table of the grid
    # leaves out runs with changed settings, which --by shows
    options = _plugin_options(plugins)
    options += "" if scale is None else f" --scale {scale}"
    options += "".join(f" --by {key}" for key in _changed(overrides, call))
    options += _results_option(call.results)
    return "; ".join(f"{CALL} report {_place(one, known)}{options}" for one in call.experiments)


def _place(experiment: Experiment, known: Container[str]) -> str:
    """Returns the word by which another command finds an experiment: its name, or a folder elsewhere."""
    return shlex.quote(experiment.name if experiment.name in known else str(shown(experiment.path.parent)))


def _plugin_options(plugins: Iterable[str] | None) -> str:
    return "".join(f" --plugin {shlex.quote(name)}" for name in plugins or ())


def _results_option(results: Path) -> str:
    """Returns the option that names the folder of results in another command, or "" for the default folder."""
    return "" if results == LOCAL else f" --results {shlex.quote(str(results))}"


def _print_stored(console: Console, call: Call, retry_failed: bool) -> None:
    """Prints how many runs are carried out again, or how many are not because they are stored or not needed."""
    from subquad.suite.runner import UNNEEDED

    num_runs, num_todo = len(call.planned), len(call.todo)
    if retry_failed:
        console.print(f"{num_todo} of {call.num_asked} runs in {call.results} ended with an error", highlight=False)
        return
    if num_todo == num_runs:
        return
    num_unneeded = sum(item.stored == UNNEEDED for item in call.planned)
    spared = f", and {num_unneeded} are not needed" if num_unneeded else ""
    stored = f"{num_runs - num_todo - num_unneeded} of {num_runs} runs are already stored in {call.results}{spared}"
    console.print(stored, highlight=False)
    if call.settings.keep_weights and (bare := sum(_lacks_weights(item, call.results) for item in call.planned)):
        console.print(
            f"{bare} of these kept no weights; --force --keep-weights repeats all runs asked for", highlight=False
        )


def _lacks_weights(item: Planned, results: Path) -> bool:
    """Returns whether a training run is stored without weights, which only a repeated run would keep."""
    from subquad.suite.store import storage
    from subquad.suite.training.run import TrainingRun

    run = item.run
    is_stored = isinstance(run, TrainingRun) and item.stored == "ok"
    return is_stored and not storage.weights_path(results, run.experiment, run.scale, run.run_id).exists()


def _changed(overrides: Sequence[str], call: Call) -> list[str]:
    """Keys of `--set` by which `report --by` can show the runs, and before them the name of the model if it differs."""
    from subquad.suite.settings.grid import iter_keys

    settings = dict(iter_keys(call.planned[0].run.resolved)) if call.planned else {}
    changed = [key for key in dict.fromkeys(text.partition("=")[0].strip() for text in overrides) if key in settings]
    # a line would be the mean of several models
    several = "model.name" in settings and len({item.run.columns["model"] for item in call.planned}) > 1
    return list(dict.fromkeys(["model.name"] * several + changed)) if changed else []


def _print_dry_run(
    console: Console, call: Call, repository: Repository, scale: str | None, jobs: int | None, options: str
) -> None:
    """Prints the plan, the time that it will take, and why a part of it cannot run here.

    jobs: runs at a time; None where that is not known.
    options: what another command needs to know the same runs.
    """
    from subquad.suite.runner import UNNEEDED
    from subquad.suite.store import storage
    from subquad.suite.store.estimate import estimate
    from subquad.suite.store.status import unstored_states

    runs = [item.run for item in call.planned]
    unstored = ["to do"] * len(runs) if call.settings.fresh else unstored_states(runs, call.results)
    states = [item.stored or state for item, state in zip(call.planned, unstored, strict=True)]
    states = [
        f"in {call.elsewhere[item.run.run_id].name}" if item.todo and item.run.run_id in call.elsewhere else state
        for item, state in zip(call.planned, states, strict=True)
    ]
    print_plan(runs, states, console.width)
    counts = {
        "interrupted": sum(state == "interrupted" for state in states),
        "without data": sum(run.is_planned_only for run in call.todo),
        "stored elsewhere": len(call.elsewhere),
        "not needed": sum(state == UNNEEDED for state in states),
    }
    line = f"{counted(len(call.planned))}, {len(call.todo)} to do"
    # interrupted runs, those stored elsewhere and those without data are among the ones to do
    line += "".join(f", {count} {words}" for words, count in counts.items() if count)
    console.print(f"{line}, on {call.place}; results in {call.results}", highlight=False)
    roots = [call.results, repository.reference]
    stored = [file for experiment in call.experiments for file in storage.files(roots, experiment.name)]
    left = [run for run in call.todo if run.run_id not in call.elsewhere]
    lines = estimate(left, stored, skipped, jobs=jobs)
    if left and not lines:
        (experiment,) = (one for one in call.experiments if one.name == left[0].experiment)
        command = f"{CALL} run {_place(experiment, repository.experiments())}{options}"
        command += measuring([item.run for item in call.planned], left[0])
        lines = [f"no run like these is stored; one run shows how long they take: {command}{repository.unfetched}"]
    for line in lines:
        # a command is copied whole
        console.print(line, highlight=False, markup=False, soft_wrap=CALL in line)
    for experiment in call.experiments:
        config = experiment.config
        if reason := config.cannot_run.get(next(iter(config.scales)) if scale is None else scale):
            console.print(f"cannot run here: {reason}", highlight=False, markup=False)


def _number(jobs: str) -> int:
    try:
        return int(jobs)
    except ValueError:
        raise ValueError(f"--jobs {shortened(jobs)}: expected a whole number, or {AUTO}") from None


def _launched() -> bool:
    """Whether torchrun started this process as one of several."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        # the import takes seconds, since it loads torch
        return False
    from subquad.suite.training import parallel

    return parallel.launched()


def _processes(nproc: int | None, executor: str) -> int:
    """Returns the number of processes that train each run: those that torchrun has started, or else `--nproc`."""
    if _launched():
        if nproc is not None:
            raise ValueError(f"--nproc {nproc}: torchrun has started the processes; leave it out")
        processes = int(os.environ["WORLD_SIZE"])
    else:
        processes = nproc or 1
    if processes > 1 and executor != "local":
        raise ValueError(f"--executor {executor}: a run in {processes} processes is for the executor local")
    return processes


def print_plan(runs: Sequence[Run], stored: Sequence[str], width: int) -> None:
    """Prints what all runs share, what follows from one of their settings, and a table of what else differs.

    width: characters of a line, above which lines are broken between words.
    """
    if not runs:
        return
    flat = _flat(runs)
    keys = dict.fromkeys(key for values in flat for key in values)
    varying = [key for key in keys if len({values.get(key) for values in flat}) > 1]
    print("all runs have")
    _print_settings({key: flat[0][key] for key in keys if key not in varying}, width)
    columns, following = _told_apart(flat, varying)
    for column, followers in following.items():
        for value, values in {values.get(column): values for values in flat}.items():
            _print_broken(f"with {column} = {value}" if value else f"without {column}", width)
            _print_settings({key: values[key] for key in followers if key in values}, width)
    # the data are part of the identity
    states = ["no data" if item.is_planned_only else state for item, state in zip(runs, stored, strict=True)]
    ids = ["-" * 16 if item.is_planned_only else item.run_id for item in runs]
    table = [
        ("run", "state", *columns),
        *(
            (name, state, *(values.get(key, "") for key in columns))
            for name, state, values in zip(ids, states, flat, strict=True)
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for line in table:
        _print_broken("  ".join(text.ljust(size) for text, size in zip(line, widths, strict=True)).rstrip(), width)


def _flat(runs: Sequence[Run]) -> list[dict[str, str]]:
    """The resolved settings of every run as JSON texts by their dotted keys."""
    from subquad.suite.settings.grid import iter_keys

    resolved = [item.resolved for item in runs]
    # runs that differ in their seed alone share their sections, so each is written once
    sections = {id(value): value for settings in resolved for value in settings.values() if isinstance(value, dict)}
    written = {key: {name: json.dumps(value) for name, value in iter_keys(tree)} for key, tree in sections.items()}
    flat: list[dict[str, str]] = []
    for settings in resolved:
        values: dict[str, str] = {}
        for name, value in settings.items():
            if isinstance(value, dict):
                values |= {f"{name}.{key}": text for key, text in written[id(value)].items()}
            else:
                values[name] = json.dumps(value)
        flat.append(values)
    return flat


def _told_apart(flat: Sequence[dict[str, str]], varying: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The settings that tell runs apart, names first and seeds last, and those that follow from one of these."""
    columns: list[str] = []
    telling: list[str] = []
    following: dict[str, list[str]] = {}
    for key in sorted(varying, key=lambda key: (key == "seed", not key.endswith(".name"))):
        values = [values.get(key) for values in flat]
        for column in telling:
            first: dict[str | None, str | None] = {}
            if all(first.setdefault(v.get(column), value) == value for v, value in zip(flat, values, strict=True)):
                following.setdefault(column, []).append(key)
                break
        else:
            columns.append(key)
            # every other setting would seem to follow from one that differs in all runs
            if key.endswith(".name") or 2 * len(set(values)) <= len(flat):
                telling.append(key)
    return columns, following


def _print_broken(line: str, width: int, indent: str = "") -> None:
    """Prints a line, broken between words where it is longer than width; no word is cut."""
    parts = [indent + line]
    if len(parts[0]) > width:
        breaker = textwrap.TextWrapper(width, indent, indent + "  ", break_long_words=False, break_on_hyphens=False)
        parts = breaker.wrap(line)
    print("\n".join(parts))


def _print_settings(settings: Mapping[str, str], width: int) -> None:
    """Prints settings in lines of at most `width` and WIDTH characters, unless one setting is longer than WIDTH."""
    line = ""
    for text in [f"{key} = {value}" for key, value in settings.items()] or ["nothing else"]:
        if line and len(f"  {line}; {text}") > min(width, WIDTH):
            _print_broken(line, width, "  ")
            line = ""
        line += "; " * bool(line) + text
    _print_broken(line, width, "  ")


def measuring(runs: Sequence[Run], todo: Run) -> str:
    """The options of `run` that choose one of the runs."""
    flat = _flat(runs)
    values = flat[[item.run_id for item in runs].index(todo.run_id)]
    varying = [key for key in values if len({other.get(key) for other in flat}) > 1]
    chosen = [key for key in _told_apart(flat, varying)[0] if key not in ("seed", "data") and key in values]
    filters = "".join(f" --only {shlex.quote(f'{key}={values[key].strip(chr(34))}')}" for key in chosen)
    seed = f" --seeds {values['seed']}," if "seed" in values else ""
    return f" --scale {todo.scale}{seed}{filters}"
