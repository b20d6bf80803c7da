"""`submit`: checks a mixer, carries out its runs, and makes the folder with which it is submitted to a board."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.suite.commands.console import skipped, table_console
from subquad.suite.commands.planning import resolved_runs
from subquad.suite.commands.repository import LOCAL, Device, Repository, Results, Sets, repository_of, shown
from subquad.suite.environment import CALL
from subquad.suite.identity import file_digest
from subquad.suite.options import options_in
from subquad.suite.registry import counted, few, nearest
from subquad.suite.settings.config import ExperimentConfig

if TYPE_CHECKING:
    from subquad.suite.commands.carrying_out import Call
    from subquad.suite.runs import Run
    from subquad.suite.submissions.budget import Size

OUT = Path("submissions")


@dataclass(frozen=True)
class Offer:
    """A mixer and the board to which it is submitted, as the arguments say and as far as they can be checked."""

    plugin: Path
    name: str
    board: str
    config: ExperimentConfig
    scale: str
    options: Mapping[str, Any]
    """Dotted keys of the model to values that are not those of the board."""

    @property
    def choice(self) -> dict[str, Any]:
        """The arguments with which `run` would carry out the same runs."""
        only = [f"model.name={self.name}"]
        return {"scale": self.scale, "only": only, "overrides": _texts(self.options), "seeds": None, "data": None}


def _texts(options: Mapping[str, Any]) -> list[str]:
    """Options as `--set` takes them, each with its one value."""
    return [f"{key}={json.dumps(value)}" for key, value in options.items()]


def submit(
    context: typer.Context,
    plugin: Annotated[Path, typer.Argument(metavar="FILE", help="The one Python file of your mixer, with MODELS.")],
    board: Annotated[str, typer.Option(help="Board: parameters or state (leaderboard/parameters).")],
    scale: Annotated[str | None, typer.Option("--scale", help="Scale of the board; default: its first, paper.")] = None,
    model: Annotated[str | None, typer.Option(help="Name in MODELS, where there are several.")] = None,
    overrides: Sets = None,
    device: Device = None,
    jobs: Annotated[int | None, typer.Option(min=1, max=4096, help="Runs at a time; default: 1.")] = None,
    results: Results = LOCAL,
    out: Annotated[Path, typer.Option(help="Folder that gets the folder of the submission.")] = OUT,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check what can be checked, print the runs and what they cost, and end.")
    ] = False,
) -> None:
    """Check your mixer, carry out the runs of a board with it, and write the folder to send as a pull request.

    Runs that are stored already are not repeated, so an interrupted call continues. docs/submit.md shows the whole way.
    """
    from subquad.suite.environment import commit
    from subquad.suite.submissions.budget import size_of

    repository = repository_of(context)
    offer, repository = _offer(repository, plugin, board, scale, model, overrides or ())
    _check_place(offer, out)
    if commit()[1] and not dry_run:
        raise ValueError(
            "submit: files of Subquad differ from its commit, so nobody could repeat the runs; commit or stash them"
        )
    # imported behind the checks that need no torch
    from subquad.suite.commands.carrying_out import prepare
    from subquad.suite.executors.contract import Settings

    settings = Settings(device=device, jobs=jobs)
    call = prepare(repository, [offer.board], results, settings, choice=offer.choice, without_data=dry_run)
    run = check_budget(repository, offer, [item.run for item in call.planned])
    size = size_of(run)
    print(
        f"{offer.name}: {size.num_parameters:,} parameters, a state of {size.state_size:,} numbers: within the budget"
    )
    if dry_run:
        _print_plan(repository, offer, call)
        return
    from subquad.suite.commands.check import check_model
    from subquad.suite.store.target import probe, writable

    # the laws take a minute
    call.require_room()
    with writable("--out", out):
        probe(out)
    if check_model(repository, offer.name, own_options(offer)):
        raise typer.Exit(1)
    carry_out(call)
    folder = _write(offer, call, size, out)
    print(f"wrote {shown(folder)}; now: {CALL} submissions check {shown(folder)}")


def boards(repository: Repository) -> dict[str, ExperimentConfig]:
    """The experiments that take submissions."""
    # a grid that reads the rows of another one has the budget of that one
    found = repository.every_experiment(words=("budget", "reads"))
    return {one.name: one.config for one in found if one.config.budget is not None}


def _offer(
    repository: Repository, plugin: Path, board: str, scale: str | None, model: str | None, overrides: Sequence[str]
) -> tuple[Offer, Repository]:
    """The offer, and the repository with its plugin. Every fault is a ValueError."""
    from subquad.suite.settings.grid import refuse
    from subquad.suite.submissions.folder import NAME, import_faults

    known = boards(repository)
    name = next((key for key in known if board in (key, key.rpartition("/")[2])), None)
    if name is None:
        raise ValueError(f"--board {board}: no such board{nearest(board, known)}; there are: {', '.join(known)}")
    scale = scale or next(iter(known[name].scales))
    if scale not in known[name].scales:
        raise ValueError(f"--scale {scale}: {name} has the scales {', '.join(known[name].scales)}")
    refuse(known[name], scale, name)
    if plugin.suffix != ".py" or not plugin.is_file():
        raise ValueError(f"submit {plugin}: no such file of Python; a submission is one file, e.g. my_mixer.py")
    if faults := list(import_faults(plugin)):
        raise ValueError(f"submit {plugin}: {faults[0]}")
    repository = repository.with_plugins([str(plugin)])
    chosen = model_of(repository, plugin, model)
    if not re.fullmatch(NAME, chosen):
        raise ValueError(
            f"submit {plugin}: the name {chosen!r} in MODELS is to be a folder's; write small letters, digits and "
            "hyphens, 2 to 40 of them"
        )
    options = options_in(overrides, "--set", "model.option=value, e.g. model.d_model=80")
    config = repository.experiment(name).config
    check_options(name, config, options)
    return Offer(plugin, chosen, name, config, scale, options), repository


def model_of(repository: Repository, plugin: Path, model: str | None = None) -> str:
    """The name of the mixer that a loaded plugin defines. ValueError where there are several, or other parts, too."""
    own = {
        registry.kind: [name for name, entry in registry.entries.items() if entry.plugin.startswith(f"{plugin.stem} ")]
        for registry in (repository.models, repository.tasks, repository.operators)
    }
    if others := [*own["task"], *own["operator"]]:
        raise ValueError(
            f"submit {plugin}: it defines {few(others)} in TASKS or OPERATORS, and a submission has MODELS only"
        )
    names = own["model"]
    if model is None and len(names) != 1:
        raise ValueError(f"submit {plugin}: MODELS has {len(names)} names ({few(names)}); choose one with --model")
    if model is not None and model not in names:
        raise ValueError(f"--model {model}: MODELS has no such name{nearest(model, names)}; it has: {few(names)}")
    return model or names[0]


def check_options(board: str, config: ExperimentConfig, options: Mapping[str, Any]) -> None:
    """Raises ValueError for an option that is none of the mixer's own, or that all mixers of a board share."""
    varied = varied_options(config)
    fixed = [f"model.{key}" for key in config.baseline["model"] if f"model.{key}" not in varied]
    for key in options:
        if not key.startswith("model.") or key in ("model.name", *fixed):
            all_have = ", ".join(fixed)
            raise ValueError(
                f"--set {key}: {board} compares mixers under one protocol; only options of the model can be changed, "
                f"and not {all_have}"
            )


def varied_options(config: ExperimentConfig) -> set[str]:
    """Dotted keys of the model in which the mixers of a board differ."""
    from subquad.suite.submissions.standing import model_axis

    return {key for point in config.sweep[model_axis(config)] for key in point}


def own_options(offer: Offer) -> list[str]:
    """The options for the laws, whose networks have a width of their own."""
    return [text.removeprefix("model.") for text in _texts(offer.options) if not text.startswith("model.d_model=")]


def _check_place(offer: Offer, out: Path) -> None:
    """Raises ValueError where another mixer has the folder."""
    from subquad.suite.submissions.folder import MANIFEST, read_manifest

    folder = out / offer.name
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: there already, and no submission; remove it, or name another place with --out")
    if folder.exists() and read_manifest(folder).plugin_sha256 != file_digest(offer.plugin):
        raise ValueError(
            f"{folder}: has another {offer.name} than {offer.plugin}; remove the folder if it is an earlier revision "
            "of yours, or else choose another name in MODELS"
        )


def check_budget(repository: Repository, offer: Offer, runs: Sequence[Run]) -> Any:
    """The run on which the budget is measured. ValueError, with a width that fits, where the network misses it."""
    from subquad.suite.submissions.budget import fault_of, fitting_width, size_of

    budget = offer.config.budget
    assert budget is not None
    run: Any = next(run for run in runs if run.columns["task"] == budget.task)
    free = "model.d_model" in varied_options(offer.config)

    def sized(width: int) -> Size:
        # only the width differs, and a run that is resolved checks it
        choice = {**offer.choice, "seeds": "1", "overrides": _texts({**offer.options, "model.d_model": width})}
        choice["only"] = [*offer.choice["only"], f"task.name={budget.task}"]
        _, found = resolved_runs(repository, offer.board, **choice)
        return size_of(found[0])  # type: ignore[arg-type]

    fault = fault_of(offer.board, budget, size_of(run), lambda: fitting_width(budget, sized) if free else None)
    if fault:
        raise ValueError(f"{offer.name}: {fault}")
    return run


def _print_plan(repository: Repository, offer: Offer, call: Call) -> None:
    """Prints the runs, and how long they will take as far as stored runs tell."""
    from subquad.suite.commands.run import print_plan
    from subquad.suite.store import storage
    from subquad.suite.store.estimate import estimate

    states = [item.stored or "to do" for item in call.planned]
    print_plan([item.run for item in call.planned], states, table_console().width)
    runs = f"{counted(len(call.planned))}, {len(call.todo)} to do"
    print(f"{runs}, on {call.place}; results in {call.results}")
    own = estimate(call.todo, storage.files([call.results], offer.board), skipped)
    for line in own or ([_of_others(repository, offer)] if call.todo else []):
        print(line)


def _of_others(repository: Repository, offer: Offer) -> str:
    """Says how long the runs of our own mixers took on this board, since nobody has yet run this one."""
    from subquad.suite.store import endings, storage

    files = [path for path in storage.files([repository.reference], offer.board) if path.parent.name == offer.scale]
    ended = [one for one in endings.every_ending(files, skipped) if one.status == "ok" and one.duration_s is not None]
    if not ended:
        return f"no run of {offer.name} is stored yet, so it is not known how long one takes"
    seconds = sorted(one.duration_s or 0.0 for one in ended)
    low, high = seconds[len(seconds) // 10], seconds[-1 - len(seconds) // 10]
    device, _, shared = ended[0].device.partition(", ")
    where = f"{device} with {shared}" if shared else device
    return f"a run of our own mixers took {low:.0f} to {high:.0f} seconds on one {where} (the middle 80 % of them)"


def carry_out(call: Call) -> None:
    """Carries out what is to do. Ends the command where a run failed or the call was interrupted."""
    from subquad.suite.commands.console import lasting_console
    from subquad.suite.display import GridDisplay
    from subquad.suite.runner import ENDED, UNNEEDED

    console = lasting_console()
    stored = len(call.planned) - len(call.todo)
    if stored:
        console.print(f"{stored} of {counted(len(call.planned))} are stored or not needed", highlight=False)
    with GridDisplay(console, len(call.todo), runs=[item.run for item in call.planned]) as display:
        try:
            ended = call.carry_out(display)
        except KeyboardInterrupt:
            display.interrupted()
            raise typer.Exit(130) from None
    bad = [one for one in ended if one.status not in (*ENDED, UNNEEDED)]
    if bad:
        where = f"`show {bad[0].run.run_id[:6]} --results {call.results}` says why"
        print(f"{len(bad)} of {counted(len(ended))} failed; {where}; nothing was written")
        raise typer.Exit(1)


def _write(offer: Offer, call: Call, size: Size, out: Path) -> Path:
    """Writes the folder of the submission."""
    from subquad.suite.store.target import writable
    from subquad.suite.submissions import folder as place
    from subquad.suite.submissions.rerun import processor
    from subquad.suite.submissions.rows import packed, said_by

    folder = out / offer.name
    runs = [item.run for item in call.planned]
    if any(run.plugins["model"] != place.plugin_identity(offer.plugin) for run in runs):
        raise ValueError(f"submit {offer.plugin}: the file has changed since the call began; give the command again")
    part = packed(call.results, runs, folder / place.ROWS / offer.board / offer.scale)
    said = said_by(part.table)
    if said.dirty:
        raise ValueError(
            f"{counted(len(said.dirty))} were made while files of Subquad differed from its commit "
            f"({few(said.dirty, 3)}); remove their rows below {call.results} and give the command again"
        )
    with writable("--out", out):
        for old in part.folder.glob("part-*.parquet"):
            old.unlink()
        entry = place.Entry(
            scale=offer.scale,
            options=dict(offer.options),
            num_parameters=size.num_parameters,
            state_size=size.state_size,
            num_runs=len(part.run_ids),
            processor=processor(),
            **said.facts,
            **_written(part),
        )
        if offer.plugin.resolve() != (folder / offer.plugin.name).resolve():
            shutil.copyfile(offer.plugin, folder / offer.plugin.name)
        manifest = place.Manifest(
            name=offer.name,
            plugin=offer.plugin.name,
            plugin_sha256=file_digest(folder / offer.plugin.name),
            boards={offer.board: entry},
        )
        if (folder / place.MANIFEST).is_file():
            boards_before = place.read_manifest(folder).boards
            manifest = manifest.model_copy(update={"boards": {**boards_before, offer.board: entry}})
        place.write_manifest(folder, manifest)
    return folder


def _written(part: Any) -> dict[str, Any]:
    """Writes a part, and gives its name and digest."""
    from subquad.suite.store import parts

    path = parts.write(part)
    return {"part": path.name, "part_sha256": file_digest(path)}
