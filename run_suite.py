"""Subquad's command line and composition root: the only file that knows every folder.

Every fault of the caller's is one line on standard error and exit code 2, before anything is trained. A grid with runs
that failed exits with 1, an interrupted one with 130.
"""

from __future__ import annotations

import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

# torch, pandas and matplotlib take seconds to import: they are imported where they are first needed
from kernels import OPERATORS
from models import MODELS
from suite.config import ExperimentConfig, find_experiments, load_experiment
from suite.grid import expand
from suite.registry import Entry, Registry, nearest
from suite.resolver import Resolver
from suite.runs import Run
from tasks import TASKS

WORKLOADS = Registry("operator", {name: Entry(*where) for name, where in OPERATORS.items()})
HOME = Path(__file__).resolve().parent
REPORTS = HOME / "reports"
LOCAL = Path("results/local")
REFERENCE = HOME / "results" / "reference"
KERNELS = "kernels"
"""Where `bench` keeps its rows, and what `report` calls them."""

app = typer.Typer(
    name="run_suite.py",
    help="Benchmark and reproduction suite for sub-quadratic sequence models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


data_app = typer.Typer(
    help="Real data: what there is, bringing it into the cache, checking it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")


class Kind(StrEnum):
    tasks = "tasks"
    models = "models"
    experiments = "experiments"


class Shapes(StrEnum):
    quick = "quick"
    paper = "paper"
    all = "all"
    short = "short"


class Format(StrEnum):
    terminal = "terminal"
    md = "md"
    latex = "latex"
    png = "png"
    html = "html"


ExperimentName = Annotated[
    str, typer.Argument(help="Experiment, e.g. quickstart or h3/table2; see `list experiments`.")
]
ScaleName = Annotated[
    str | None, typer.Option("--scale", help="Protocol size declared by the grid; default: its first.")
]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="Keep runs with this value: model.name=gsa; repeatable.")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a value: train.lr=1e-3; repeatable.")]
Results = Annotated[Path, typer.Option("--results", help="Folder of results.")]


def _fail(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2)


def _experiment(name: str) -> tuple[ExperimentConfig, Path]:
    grids = find_experiments(REPORTS)
    if name not in grids:
        raise ValueError(f"unknown experiment {name!r}{nearest(name, grids)}; there are: {', '.join(grids)}")
    return load_experiment(grids[name]), grids[name]


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@app.command("list")
def list_names(kind: Annotated[Kind | None, typer.Argument(help="What to list; default: all.")] = None) -> None:
    """List tasks, models and experiments."""
    from rich.console import Console
    from rich.table import Table

    table = Table("kind", "name", "summary", box=None)
    for registry in (TASKS, MODELS):
        if kind in (None, f"{registry.kind}s"):
            for name, entry in registry.entries.items():
                table.add_row(registry.kind, name, entry.summary)
    if kind in (None, Kind.experiments):
        for name, path in find_experiments(REPORTS).items():
            config = load_experiment(path)
            table.add_row("experiment", name, f"{config.title} (scales: {', '.join(config.scales)})")
    console = Console()
    if console.is_terminal:
        console.print(table)
    else:
        for row in zip(*(column.cells for column in table.columns), strict=True):
            print("\t".join(str(cell) for cell in row))


@app.command()
def run(
    experiment: ExperimentName,
    scale: ScaleName = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Keep runs with this value: model.name=gsa; repeatable.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value: train.lr=1e-3; repeatable.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Use seeds 0 to N-1 instead of the grid's.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of data, for tasks that read one; default: the cache.")
    ] = None,
    results: Results = LOCAL,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; with cuda, spread over the visible GPUs.")] = 1,
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads of each training run; another number gives other last digits.")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and train nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Repeat runs that are already stored.")] = False,
) -> None:
    """Run a named grid, task x model or operators; what is stored is skipped, what was interrupted continues."""
    from rich.console import Console

    config, path = _experiment(experiment)
    if jobs > 1 and config.timed:
        raise ValueError(
            f"--jobs {jobs}: {experiment} times operators, and runs side by side would disturb each other; leave it out"
        )
    resolver = Resolver(TASKS, MODELS, WORKLOADS, None if data is None else str(data))
    runs = expand(
        experiment,
        config,
        resolver,
        scale=scale,
        only=only or (),
        overrides=overrides or (),
        num_seeds=seeds,
        where=_shown(path),
    )
    from kernels.backend import record_operators
    from kernels.versions import VERSIONS
    from suite.environment import device_name, pick_device
    from suite.runner import outdated, plan

    target = pick_device(device)
    planned = plan(runs, [results], force=force, versions=VERSIONS)
    todo = [item.run for item in planned if item.todo]
    console = Console()
    if (line := outdated(planned)) is not None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        _print_plan(runs, {item.run.run_id: item.stored or "to do" for item in planned})
        console.print(
            f"{len(runs)} runs, {len(todo)} to do, on {device_name(target)}; results in {results}", highlight=False
        )
        return
    if len(todo) < len(runs):
        console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are already stored in {results}", highlight=False)

    from suite.display import GridDisplay
    from suite.executors.local import run_all

    with GridDisplay(console, len(todo)) as display:
        try:
            ended = run_all(
                todo, results, target, display, jobs=jobs, fresh=force, threads=threads, record=record_operators
            )
        except KeyboardInterrupt:
            display.interrupted()
            raise typer.Exit(130) from None
    bad = [finished for finished in ended if finished.status not in ("ok", "n/a")]
    if bad:
        console.print(f"{len(bad)} of {len(ended)} runs did not end well; their rows say why (`show RUN_ID`)")
        raise typer.Exit(1)
    console.print(f"done: {len(ended)} runs; now: python run_suite.py report {experiment}", highlight=False)


def _print_plan(runs: list[Run], stored: dict[str, str]) -> None:
    """Every run on one line: what differs between the runs in dotted keys, then what they share."""
    import json

    from suite.grid import iter_keys

    flat = [{key: json.dumps(value) for key, value in iter_keys(item.resolved)} for item in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    varying = [key for key in keys if len({values.get(key, "") for values in flat}) > 1]
    for item, values in zip(runs, flat, strict=True):
        changes = "  ".join(f"{key}={values[key]}" for key in varying if key in values)
        print(f"{item.run_id}  {stored[item.run_id]}  {changes}")
    print("\nshared by all runs:")
    for key in keys:
        if key not in varying:
            print(f"  {key} = {flat[0].get(key)}")


def _roots(results: Path | None) -> list[Path]:
    return [results] if results is not None else [LOCAL, REFERENCE]


Where = Annotated[
    Path | None, typer.Option("--results", help="Folder of results; default: yours, else the reference's.")
]


@app.command()
def report(
    experiment: ExperimentName,
    format: Annotated[
        Format, typer.Option(help="terminal, md and latex print; png and html write a file.")
    ] = Format.terminal,
    scale: Annotated[str | None, typer.Option(help="Show this scale; default: paper if it has rows.")] = None,
    results: Where = None,
    out: Annotated[Path | None, typer.Option(help="File to write; png also writes an SVG beside it.")] = None,
) -> None:
    """Render an experiment (paper's number, ours, difference, seeds, verdict, figure), or the history of `kernels`."""
    from suite import storage

    # never a mixture: your own rows, or else those that were committed
    paths = next((found for root in _roots(results) if (found := storage.files([root], experiment))), [])
    rendered: Report | Document
    if experiment == KERNELS:
        from reports.render import Document, history, render

        kept = [path for path in paths if scale in (None, path.parent.name)]
        rendered = history(storage.read(kept))
    else:
        config, path = _experiment(experiment)
        if scale is not None and scale not in config.scales:
            raise ValueError(
                f"unknown scale {scale!r}{nearest(scale, config.scales)}; there are: {', '.join(config.scales)}"
            )
        from reports.render import Report, build, render

        rendered = build(config, path.parent, storage.read(paths), scale=scale)
    if out is None and format in (Format.png, Format.html):
        out = (results or LOCAL) / experiment / f"{'figure' if format is Format.png else 'report'}.{format}"
    shown = render(rendered, format.value, out)
    print(f"wrote {_shown(shown)}" if isinstance(shown, Path) else shown)


@app.command()
def show(
    run_id: Annotated[str, typer.Argument(help="A run id or the beginning of one.")],
    results: Where = None,
) -> None:
    """Show everything that is stored about one run."""
    import json

    from rich.console import Console
    from rich.table import Table

    from suite import storage
    from suite.grid import iter_keys

    if not run_id or set(run_id) - set("0123456789abcdef"):
        raise ValueError(f"{run_id!r} is no run id: those are hexadecimal, as in the plan and the file names")
    paths = [path for root in _roots(results) for path in sorted(root.rglob(f"{run_id}*.parquet"))]
    if not paths:
        raise ValueError(f"no stored run begins with {run_id!r} below {', '.join(map(str, _roots(results)))}")
    if len({path.stem for path in paths}) > 1:
        raise ValueError(f"{run_id!r} is ambiguous: {', '.join(path.stem for path in paths)}")
    frame = storage.read(paths[:1])
    first = frame.iloc[0]
    console = Console()
    facts = Table("", "", box=None, show_header=False)
    for column in ("run_id", "experiment", "scale", "seed", "device", "threads", "torch", "triton", "cuda"):
        facts.add_row(column, str(first[column]))
    for column in (
        "operators",
        "python",
        "commit",
        "dirty",
        "stand_in",
        "split_policy",
        "data_digest",
        "started_at",
        "duration_s",
    ):
        facts.add_row(column, str(first[column]))
    for key, value in iter_keys(json.loads(first["config"])):
        facts.add_row(key, json.dumps(value))
    console.print(facts, markup=False, highlight=False)
    rows = Table("metric", "split", "slice", "step", "value", "unit", "status", box=None)
    for row in frame.to_dict("records"):
        value = "" if row["value"] is None or row["value"] != row["value"] else f"{row['value']:.6g}"
        rows.add_row(row["metric"], row["split"], row["slice"], str(row["step"]), value, row["unit"], row["status"])
    console.print(rows, markup=False, highlight=False)
    for error in dict.fromkeys(error for error in frame["error"] if error):
        console.print(error, style="red", markup=False, highlight=False)


@app.command()
def bench(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Operators; default: all.")] = None,
    shapes: Annotated[Shapes | None, typer.Option(help="Default: quick on a GPU, short on a CPU.")] = None,
    against: Annotated[
        str, typer.Option(help="torch or peers (timed beside ours), or a revision or checkout to compare with.")
    ] = "torch",
    compare: Annotated[
        str | None, typer.Option(metavar="REV", help="As --against REV, and exit with 1 where this tree is slower.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")] = None,
    results: Results = LOCAL,
    update_budgets: Annotated[
        bool, typer.Option("--update-budgets", help="Compile every kernel and rewrite the file of budgets; no timing.")
    ] = False,
) -> None:
    """Time the operators, compare two revisions, or rewrite the budgets of the compiled kernels."""
    from rich.console import Console

    from suite.bench.cases import KINDS, SETS, cases, check_names

    targets = {name: entry.target for name, entry in WORKLOADS.entries.items()}
    names = check_names(ops or (), WORKLOADS)
    # a file or a pipe has no width of its own, and a cut number is worse than a long line
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if update_budgets:
        if ops or compare or shapes or against != "torch":
            raise ValueError("--update-budgets compiles everything and takes no other option")
        _update_budgets(targets)
        return

    import torch

    from suite.bench import show
    from suite.bench.measure import ceilings
    from suite.bench.run import Rows, compare_trees, time_cases
    from suite.bench.worker import tree_of
    from suite.environment import device_name, pick_device

    target = pick_device(device)
    base = compare or (None if against in KINDS else against)
    if compare and against != "torch":
        raise ValueError(f"--compare {compare} and --against {against}: give one of them")
    chosen = shapes or (Shapes.quick if target.type == "cuda" else Shapes.short)
    kinds = ("ours",) if base else KINDS[against]
    workloads = {name: WORKLOADS.load(name) for name in names}
    wanted = [case for work in workloads.values() for case in cases(work, SETS[chosen.value], kinds)]
    rows = Rows(results, chosen.value, target, [*names, against, compare or ""])
    console.print(f"{len(wanted)} cases on {device_name(target)}, torch {torch.__version__}", highlight=False)
    failed = False
    try:
        if base:
            with tempfile.TemporaryDirectory() as folder:
                tree, commit = tree_of(base, Path(folder))
                with show.Verdicts(console, wanted) as display:
                    for verdict in compare_trees(wanted, targets, target, tree):
                        rows.add_verdict(verdict, commit, workloads[verdict.case.op].version)
                        display.add(verdict)
                        failed |= verdict.fails
        else:
            limits = ceilings(target)
            rows.add_ceilings(limits)
            with show.Timings(console, wanted, limits) as timings:
                for timing in time_cases(wanted, WORKLOADS.load, targets, target, limits):
                    rows.add_timing(timing, workloads[timing.case.op].version)
                    timings.add(timing)
                    failed |= timing.status == "failed"
    except KeyboardInterrupt:
        what = f"what was measured is in {_shown(rows.path)}" if rows.path.exists() else "nothing was measured"
        console.print(f"interrupted; {what}", highlight=False)
        raise typer.Exit(130) from None
    console.print(f"\nrows in {_shown(rows.path)}", highlight=False)
    if failed and (compare or not base):
        raise typer.Exit(1)


def _update_budgets(targets: dict[str, str]) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from suite.bench import budgets

    if budgets.triton_version() is None:
        raise ValueError("--update-budgets needs Triton, which compiles here without a GPU; pip install -e '.[triton]'")
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("compiling")
        collection = budgets.collect(
            targets, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    print(budgets.update(collection))


TaskName = Annotated[str, typer.Argument(metavar="TASK", help="A task that reads data, e.g. lra-text.")]
DataFolder = Annotated[Path | None, typer.Option("--data", help="A folder you have, in the official layout.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes that generate; default: one a core.")]


def _data_task(name: str, data: Path | None, overrides: list[str] | None) -> Any:
    """The configured task; ValueError for a name, an option or a task without data."""
    from suite.parsing import assignment, parse

    cls = TASKS.load(name)
    if "data" not in cls.model_fields:
        raise ValueError(f"{name} makes its data as it runs; there is nothing to prepare or verify")
    values = dict(assignment(text.removeprefix("task."), "--set") for text in overrides or ())
    if data is not None:
        values["data"] = data
    return parse(cls, values, name)


@data_app.command("list")
def data_list() -> None:
    """List every source: tasks, size, hash, state in the cache, licence."""
    from rich.console import Console
    from rich.table import Table

    from tasks.data import sources, state, taken_from

    columns = ("source", "tasks", "bytes", "sha256", "cache", "licence")
    rows = []
    for name, source in sources().items():
        tasks = ", ".join(task if task in TASKS else f"{task} (planned)" for task in source.used_by)
        for files in (source.files, source.hub):
            if not files:
                continue
            at = files[0].place.partition("@") if files is source.hub else None
            edition = f"{name} --from hub ({at[0]}@{at[2][:12]})" if at else name
            kept = state(name) if taken_from(name, state(name)) == files else {}
            known = {file.url: file.sha256 for file in files} | {
                record["url"]: record["sha256"] for record in kept.get("files", ()) if record.get("url")
            }
            hashes = [digest[:12] if digest else "unknown, recorded on first download" for digest in known.values()]
            sizes = [f"{file.bytes:,}" if file.bytes else "unknown" for file in files]
            own = any(not record.get("url") for record in kept.get("files", ()))
            there = "no" if not kept else "from a copy" if own else "yes"
            rows.append((edition, tasks, " + ".join(sizes), " + ".join(dict.fromkeys(hashes)), there, source.licence))
    console = Console()
    if not console.is_terminal:
        for row in (columns, *rows):
            print("\t".join(row))
        return
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)


@data_app.command("prepare")
def data_prepare(
    task: TaskName,
    data: DataFolder = None,
    archives: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="An archive you have, instead of a download; one a file. `hub`: the hub's edition."
        ),
    ] = None,
    overrides: Set = None,
    force: Annotated[bool, typer.Option("--force", help="Download and unpack again.")] = False,
    workers: Workers = None,
) -> None:
    """Download (or take), check and unpack what a task reads, and make its arrays, so that runs start at once."""
    import os
    import time

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from tasks.data import obtain, source, sources, taken_from

    config = _data_task(task, data, overrides)
    stored = hasattr(config, "arrays")
    names = config.sources if stored else tuple(name for name, s in sources().items() if task in s.used_by)
    names = () if data is not None else names
    if archives and len(names) != 1:
        raise ValueError(f"--from: {task} reads {', '.join(names) or 'no source'} here; it is for one source at a time")
    console = Console(stderr=True)
    bars = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    for name in names:
        print(f"{name}: {source(name).about}. Licence: {source(name).licence}. {source(name).note}".strip())
        with Progress(*bars, console=console, disable=not console.is_terminal, transient=True) as progress:
            shown: dict[str, Any] = {}

            def watch(what: str, done: int, total: int | None, bar: Progress = progress, ids: Any = shown) -> None:
                ids[what] = ids.get(what) or bar.add_task(what)
                bar.update(ids[what], completed=done, total=total)

            folder, kept = obtain(name, archives or (), force=force, watch=watch)
        for file, record in zip(taken_from(name, kept), kept["files"], strict=True):
            known = "as in the manifest" if file.sha256 == record["sha256"] else "recorded; the manifest has none"
            if file.sha256 not in (None, record["sha256"]):
                known = "another edition than the manifest's, taken because you gave it"
            print(f"{record.get('name', file.place)}: {record['bytes']:,} bytes, sha256 {record['sha256']} ({known})")
        if not stored:
            print(f"unpacked; now: python run_suite.py run EXPERIMENT --data {folder}")
    if not stored:
        return
    began = time.perf_counter()
    with console.status(f"{task}: reading or drawing rows"):
        config.arrays(workers or os.cpu_count() or 1)
    print(f"{task}: ready in {time.perf_counter() - began:.1f} s; {_counts(config)}")
    if config.stand_in:
        print(f"stand-in data, marked in every row: {config.stand_in}")


def _counts(config: Any) -> str:
    return ", ".join(f"{split} {count:,}" for split, count in config.counts().items())


@data_app.command("verify")
def data_verify(task: TaskName, data: DataFolder = None, overrides: Set = None, workers: Workers = None) -> None:
    """Hold downloads against their hashes and the cache against its source, and count rows that two splits share."""
    import os

    from tasks.data import verify_source
    from tasks.data.stored import leakage

    config = _data_task(task, data, overrides)
    if not hasattr(config, "verify"):
        raise ValueError(f"{task} keeps nothing in the cache; its files are checked whenever a run is planned")
    for name in config.sources:
        for line in verify_source(name):
            print(line)
    config.verify(workers or os.cpu_count() or 1)
    print(f"{task}: the arrays are those of the source; content {config.fingerprint()[:16]}; {_counts(config)}")
    for pair, count in leakage(config).items():
        print(f"identical inputs, {pair}: {count:,}")
    print(f"stand-in data: {config.stand_in}" if config.stand_in else "not stand-in data")


@data_app.command("rate")
def data_rate(
    task: TaskName,
    data: DataFolder = None,
    overrides: Set = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a batch.")] = 32,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads that draw; repeatable; default: 1, 2, 4, ... all cores.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="For each number of workers.")] = 2.0,
    results: Where = None,
) -> None:
    """Measure how fast rows come on the host, without a model, against the fastest model among the stored rows."""
    import os

    from suite.parsing import assignment, parse
    from tasks.data.rate import feed, measure

    values = dict(assignment(text.removeprefix("task."), "--set") for text in overrides or ())
    cls = TASKS.load(task)
    if data is not None and "data" in cls.model_fields:
        values["data"] = data
    config = parse(cls, values, task)
    source = feed(config, batch_size)
    held = f"{source.resident_bytes / 1e6:,.0f} MB stay on the device" if source.resident_bytes else "a stream"
    print(f"{task}: first batch after {source.startup_s:.1f} s; training rows: {held}")
    cores = os.cpu_count() or 1
    fastest, who = _fastest(task, _roots(results))
    print("workers\trows/s\ttokens/s\tMB/s\ttimes the fastest model")
    for count in workers or sorted({*(1 << i for i in range(cores.bit_length()) if 1 << i <= cores), cores}):
        rate = measure(source, count, seconds)
        times = f"{rate.tokens_per_s / fastest:.1f}" if fastest else "-"
        print(f"{count}\t{rate.rows_per_s:,.0f}\t{rate.tokens_per_s:,.0f}\t{rate.bytes_per_s / 1e6:,.0f}\t{times}")
    print(f"fastest model: {fastest:,.0f} tokens/s, {who}" if fastest else "no stored row says how fast a model trains")


def _fastest(task: str, roots: list[Path]) -> tuple[float, str]:
    """The highest training throughput on a task among stored rows, or on any task where it has none."""
    from suite import storage

    frame = storage.read([path for root in roots for path in sorted(root.rglob("*.parquet"))])
    rows = [row for row in frame.to_dict("records") if row["metric"] == "train_throughput" and row["value"] > 0]
    rows = [row for row in rows if row["task"] == task] or rows
    if not rows:
        return 0.0, ""
    best = max(rows, key=lambda row: row["value"])
    return float(best["value"]), f"{best['model']} on {best['task']}, {best['device']}"


@data_app.command("where")
def data_where() -> None:
    """Print the folder of the cache (SUBQUAD_DATA) and what is in it."""
    from tasks.data import cache

    print(cache.root())
    for folder in sorted(path for path in cache.place().glob("*/*") if path.is_dir()):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder.relative_to(cache.root())}\t{size:,} bytes")
    if cache.offline():
        print("SUBQUAD_OFFLINE is set: nothing is downloaded")


@app.command()
def doctor() -> None:
    """Say what works on this machine, and why the rest does not."""
    from rich.console import Console
    from rich.table import Table

    from suite.environment import capabilities

    table = Table("part", "for", "state", box=None)
    for part in capabilities():
        table.add_row(part.name, part.purpose, f"n/a ({part.missing})" if part.missing else f"ok  {part.found}")
    Console().print(table, highlight=False, markup=False)


def main() -> None:
    """Entry point: a fault of the caller's is one line and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
