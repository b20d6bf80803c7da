"""`submissions`: checks the mixers that others have submitted, and repeats their runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.suite.commands.planning import resolved_runs
from subquad.suite.commands.repository import Device, Repository, Results, existing, repository_of, shown
from subquad.suite.options import visible
from subquad.suite.runs import Run
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.submissions.folder import part_of

if TYPE_CHECKING:
    from subquad.suite.commands.submit import Offer
    from subquad.suite.submissions.folder import Entry, Manifest
    from subquad.suite.submissions.rows import Stored

REPEATS = Path("results/repeated")
"""Folder of the rows of runs that `submissions repeat` carries out, until it packs them."""

MOST_FAULTS = 5
"""Faults that are printed of each thing that is checked."""

submissions_app = typer.Typer(
    help="Check the mixers that others have submitted, and repeat their runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@submissions_app.command("check")
def check(
    context: typer.Context,
    folder: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="Folder of one submission.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="Check the submission that this revision adds to HEAD, and that it adds no more.")
    ] = None,
) -> None:
    """Check a submission: files, rows, budget, laws, and its shortest run up to the first evaluation, on the CPU.

    It executes the code of the submission. Exits with 1 where something is wrong.
    """
    from subquad.suite.submissions.change import taken_from

    repository = repository_of(context)
    if (folder is None) == (revision is None):
        raise ValueError("submissions check: name the folder of a submission, or give --revision")
    with tempfile.TemporaryDirectory() as temporary:
        if revision is not None:
            checkout = repository.submissions.parent
            try:
                folder = taken_from(checkout, repository.submissions.name, revision, Path(temporary))
            except ValueError as error:
                print(f"broken  {visible(str(error))}")
                raise typer.Exit(1) from None
        assert folder is not None
        if not _is_good(repository, existing(folder, f"submissions check {folder}")):
            raise typer.Exit(1)


@submissions_app.command("repeat")
def repeat(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of one submission.")],
    board: Annotated[str | None, typer.Option(help="Board, where the submission has several.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed whose runs are repeated.")] = 0,
    device: Device = None,
    results: Results = REPEATS,
) -> None:
    """Repeat the runs of one seed that the board shows of a submission, and put the rows beside those of its author.

    It executes the code of the submission: read it first. Exits with 1 where ours and theirs do not agree.
    """
    from subquad.suite.environment import commit
    from subquad.suite.submissions.folder import read_manifest
    from subquad.suite.submissions.standing import BY_US, standings

    repository = repository_of(context)
    folder = existing(folder, f"submissions repeat {folder}").resolve()
    manifest = read_manifest(folder)
    names = [name for name in manifest.boards if board in (None, name, name.rpartition("/")[2])]
    if len(names) != 1:
        raise ValueError(f"--board {board}: {manifest.name} is on {', '.join(manifest.boards)}; name one of them")
    if commit()[1]:
        raise ValueError("submissions repeat: files of Subquad differ from its commit; commit or stash them first")
    _carry_out(repository, folder, manifest, names[0], seed, device, results)
    config = repository.experiment(names[0]).config
    found = standings(folder.parent, names[0], config, manifest.boards[names[0]].scale)
    one = next(one for one in found if one.folder == folder)
    print(visible(one.note(config.table is not None and config.table.percent)))
    print(f"the board says: {one.label}")
    if one.state != BY_US:
        raise typer.Exit(1)


def _carry_out(
    repository: Repository,
    folder: Path,
    manifest: Manifest,
    board: str,
    seed: int,
    device: str | None,
    results: Path,
) -> None:
    """Carries out the runs of a seed and writes their rows into the folder of the submission."""
    from subquad.suite.commands.carrying_out import prepare
    from subquad.suite.commands.submit import carry_out
    from subquad.suite.executors.contract import Settings
    from subquad.suite.store import endings, parts
    from subquad.suite.submissions.folder import REPEATED, file_faults
    from subquad.suite.submissions.rows import packed

    if faults := list(file_faults(folder, manifest)):
        raise ValueError(f"{shown(folder)}: {faults[0]}")
    entry = manifest.boards[board]
    repository = repository.with_plugins([str(folder / manifest.plugin)])
    call = prepare(repository, [board], results, Settings(device=device), choice=_choice(manifest, entry))
    place = folder / REPEATED / board / entry.scale
    chosen = _shown_runs(repository, folder, manifest, board)
    wanted = [item for item in call.planned if item.run.run_id in chosen and item.run.seed == seed]
    there = endings.published_in(place)
    wanted = [item for item in wanted if item.run.run_id not in there]
    if not wanted:
        print(f"no run of seed {seed} is left to repeat" if there else f"the board shows no run of seed {seed}")
        return
    todo = [item.run for item in wanted if item.stored != "ok"]
    carry_out(replace(call, planned=wanted, todo=todo, settings=replace(call.settings, enough=None)))
    parts.write(packed(results, [item.run for item in wanted], place))


def _choice(manifest: Manifest, entry: Entry) -> dict[str, Any]:
    """The arguments with which `run` would carry out the runs of a submission."""
    only = [f"model.name={manifest.name}"]
    return {"scale": entry.scale, "only": only, "overrides": entry.options, "seeds": None, "data": None}


def _shown_runs(repository: Repository, folder: Path, manifest: Manifest, board: str) -> set[str]:
    """The runs of a submission that its board shows: those at the best rate of every task."""
    from subquad.suite.submissions.standing import Standing, with_standings

    entry = manifest.boards[board]
    _, config, path = repository.experiment(board)
    part = part_of(folder, board, entry)
    standing = Standing(folder, manifest, entry, part, ())
    rendering = repository.rendering()
    built = rendering.build(
        with_standings(config, [standing]), path.parent, rendering.rows_of([part]), scale=entry.scale
    )
    return {run.run_id for run in built.runs}


def _is_good(repository: Repository, folder: Path) -> bool:
    """Checks a submission, and prints a line for each thing that is checked. Nothing is imported from bad files."""
    from subquad.suite.submissions.folder import file_faults, import_faults, plugin_identity, read_manifest

    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return _say("a manifest that can be read", [str(error)])
    plugin = folder / manifest.plugin
    if not _say("files: those of the manifest, with its digests", file_faults(folder, manifest)):
        return False
    if not _say("rows: each can be believed", _row_faults(folder)):
        return False
    if not _say("imports: torch, numpy and Python's own modules", import_faults(plugin)):
        return False
    try:
        loaded = _loaded(repository, plugin, manifest)
    except ValueError as error:
        return _say("plugin: can be imported, under a name that is free", [str(error)])
    _say("plugin: can be imported, under a name that is free", ())
    identity = plugin_identity(plugin)
    good = [_board_is_good(loaded, folder, manifest, board, identity) for board in manifest.boards]
    return all(good)


def _say(what: str, faults: Iterable[str]) -> bool:
    """Prints whether something is as it must be, and its faults. Returns whether there are none."""
    found = list(faults)
    print(f"{'broken' if found else 'ok':<8}{visible(what)}", flush=True)
    for fault in found[:MOST_FAULTS]:
        print(f"        {visible(fault)}", flush=True)
    if len(found) > MOST_FAULTS:
        print(f"        and {len(found) - MOST_FAULTS} more")
    return not found


def _row_faults(folder: Path) -> Iterator[str]:
    from subquad.suite.store.verify import verify
    from subquad.suite.submissions.folder import REPEATED, ROWS

    for name in (ROWS, REPEATED):
        yield from (sentence for _, sentence in verify(folder / name).problems)


def _loaded(repository: Repository, plugin: Path, manifest: Manifest) -> Repository:
    """The repository with the plugin. ValueError where it cannot be imported or defines something else."""
    from subquad.suite.commands.submit import model_of

    loaded = repository.with_plugins([str(plugin)])
    model_of(loaded, plugin, manifest.name)
    return loaded


def _board_is_good(repository: Repository, folder: Path, manifest: Manifest, board: str, identity: str) -> bool:
    """Checks what a submission claims on one board."""
    from subquad.suite.commands.check import check_model
    from subquad.suite.commands.submit import Offer, boards, own_options
    from subquad.suite.submissions.rows import fact_faults, faults_of, stored_in

    entry, known = manifest.boards[board], boards(repository)
    if board not in known or entry.scale not in known[board].scales:
        there = ", ".join(f"{name} ({', '.join(config.scales)})" for name, config in known.items())
        return _say(f"{board}, scale {entry.scale}", [f"no such board or scale; there are: {there}"])
    config = known[board]
    offer = Offer(folder / manifest.plugin, manifest.name, board, config, entry.scale, entry.options)
    try:
        planned = _planned(repository, offer)
    except ValueError as error:
        return _say(f"{board}: its grid takes the mixer", [str(error)])
    part = part_of(folder, board, entry)
    stored = stored_in(part)
    needed = _needed(planned, folder, board, config)
    good = _say(f"{board}: rows of the devices, versions and commits that the manifest names", fact_faults(part, entry))
    good &= _say(
        f"{board}: the {entry.num_runs} runs are those of scale {entry.scale}, and none is missing",
        faults_of(stored, planned, needed, identity),
    )
    good &= _say(f"{board}: its budget", _size_faults(repository, offer, entry, planned, part, stored))
    if check_model(repository, manifest.name, own_options(offer)):
        return False
    return good and _say(*_again(repository, entry, planned, part, stored))


def _planned(repository: Repository, offer: Offer) -> list[Run]:
    """The runs that a board asks for, needed or not. ValueError where the options are not for a mixer to choose."""
    from subquad.suite.commands.submit import check_options

    check_options(offer.board, offer.config, offer.options)
    return resolved_runs(repository, offer.board, **offer.choice)[1]


def _needed(planned: Sequence[Run], folder: Path, board: str, config: ExperimentConfig) -> list[Run]:
    """The runs without which the board would have a gap."""
    from subquad.suite.store.enough import Enough
    from subquad.suite.submissions.folder import ROWS

    enough = Enough(planned, folder / ROWS, {board: config.select})
    return [run for run in planned if not enough.why_not(run)]


def _size_faults(
    repository: Repository, offer: Offer, entry: Entry, planned: Sequence[Run], part: Path, stored: Sequence[Stored]
) -> Iterator[str]:
    """A sentence where the network misses the budget, or has another size than the manifest or the rows say."""
    from subquad.suite.commands.submit import check_budget
    from subquad.suite.submissions.budget import Size, size_of
    from subquad.suite.submissions.rows import numbers_of

    try:
        run = check_budget(repository, offer, planned)
    except ValueError as error:
        yield str(error)
        return
    size = size_of(run)
    said = Size(entry.num_parameters, entry.state_size)
    if said != size:
        yield f"the manifest says {said}, the network has {size}"
    if any(one.run_id == run.run_id and one.row["status"] == "ok" for one in stored):
        rows = numbers_of(part, run.run_id, size._fields)
        if rows != size._asdict():
            yield f"the rows of run {run.run_id} say {rows}, the network has {size}"


def _again(
    repository: Repository, entry: Entry, planned: Sequence[Run], part: Path, stored: Sequence[Stored]
) -> tuple[str, list[str]]:
    """Repeats the shortest run up to its first evaluation. Returns what was done, and the faults."""
    from subquad.suite.runs import RunEnded
    from subquad.suite.store import storage
    from subquad.suite.submissions.rerun import TOLERANCE, faults, first_evaluation, is_exact

    good = [one for one in stored if one.row["status"] == "ok"]
    if not good:
        return "no run ended well, so none can be repeated", ["every run ended with an error"]
    shortest = min(good, key=lambda one: (one.row["duration_s"] or 0.0, one.run_id))
    run: Any = next(run for run in planned if run.run_id == shortest.run_id)
    rows = storage.load(part, run_id=run.run_id).to_pylist()
    what = f"{run.title} [{run.run_id[:6]}], again up to its first evaluation"
    try:
        again = first_evaluation(run, rows[0]["threads"] or 1, repository.recorder())
    except RunEnded as ended:
        return what, [f"it ended: {ended}"]
    exact = is_exact(rows[0], again[0], entry.processor)
    how = "to the last digit, on an equal machine" if exact else f"training loss to {TOLERANCE:.0%}, on another machine"
    return f"{what}: {how}", list(faults(rows, again, exact=exact))
