"""`data`: lists the sources of real data, prepares them in the cache, checks them, and times how fast they are read."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.suite.commands.console import skipped, table_console
from subquad.suite.commands.repository import Repository, Set, StoredResults, repository_of
from subquad.suite.contracts import PreparedTask
from subquad.suite.environment import CALL

data_app = typer.Typer(
    help="List, prepare and check the data that tasks read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

TaskName = Annotated[str, typer.Argument(metavar="TASK", help="A task that reads data, e.g. lra-text.")]
DataFolder = Annotated[Path | None, typer.Option("--data", help="A folder you have, in the official layout.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Number of processes that generate data; default: one a core.")
]


def _configured(repository: Repository, name: str, data: Path | None, overrides: list[str] | None) -> Any:
    """The task with the options that were given. ValueError for an unknown name or option."""
    from subquad.suite.options import options_in, parse

    cls = repository.tasks.load(name)
    texts = [text.removeprefix("task.") for text in overrides or ()]
    values = options_in(texts, "--set", "option=value, e.g. length=2048")
    if data is not None:
        if "data" not in cls.model_fields:
            raise ValueError(f"--data {data}: {name} makes its data as it runs; leave --data out")
        values["data"] = data
    return parse(cls, values, name)


def _with_data(repository: Repository, name: str, data: Path | None, overrides: list[str] | None) -> Any:
    """The same, of a task that reads data. ValueError for any other."""
    if "data" not in repository.tasks.load(name).model_fields:
        raise ValueError(f"{name} makes its data as it runs; there is nothing to prepare or verify")
    return _configured(repository, name, data, overrides)


@data_app.command("list")
def list_sources(context: typer.Context) -> None:
    """List every source: tasks, size, hash, state in the cache, licence."""
    from rich.table import Table

    repository = repository_of(context)
    store = repository.data()
    columns = ("source", "tasks", "bytes", "sha256", "cache", "licence")
    rows = []
    for name, source in store.sources().items():
        tasks = ", ".join(task if task in repository.tasks else f"{task} (planned)" for task in source.used_by)
        for files in (source.files, source.hub):
            if not files:
                continue
            at = files[0].place.partition("@") if files is source.hub else None
            edition = f"{name} --from hub ({at[0]}@{at[2][:12]})" if at else name
            kept = store.state(name) if store.taken_from(name, store.state(name)) == files else {}
            known = {file.url: file.sha256 for file in files} | {
                record["url"]: record["sha256"] for record in kept.get("files", ()) if record.get("url")
            }
            hashes = [digest[:12] if digest else "unknown, recorded on first download" for digest in known.values()]
            sizes = [f"{file.bytes:,}" if file.bytes else "unknown" for file in files]
            own = any(not record.get("url") for record in kept.get("files", ()))
            there = "no" if not kept else "from a copy" if own else "yes"
            rows.append((edition, tasks, " + ".join(sizes), " + ".join(dict.fromkeys(hashes)), there, source.licence))
    console = table_console()
    if not console.is_terminal:
        for row in (columns, *rows):
            print("\t".join(row))
        return
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)


@data_app.command("prepare")
def prepare(
    context: typer.Context,
    task: TaskName,
    data: DataFolder = None,
    archives: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="An archive you have, instead of a download; repeatable. `hub`: the hub's edition."
        ),
    ] = None,
    overrides: Set = None,
    force: Annotated[bool, typer.Option("--force", help="Download, unpack and make the arrays again.")] = False,
    workers: Workers = None,
) -> None:
    """Download (or take), check and unpack what a task reads, and make its arrays, so that runs start at once."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    repository = repository_of(context)
    store = repository.data()
    config = _with_data(repository, task, data, overrides)
    stored = isinstance(config, PreparedTask)
    names = config.sources if stored else tuple(name for name, s in store.sources().items() if task in s.used_by)
    names = () if data is not None else names
    if archives and len(names) != 1:
        raise ValueError(f"--from: {task} reads {', '.join(names) or 'no source'} here; it is for one source at a time")
    console = Console(stderr=True)
    bars = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    for name in names:
        source = store.source(name)
        print(f"{name}: {source.about}. Licence: {source.licence}. {source.note}".strip())
        with Progress(*bars, console=console, disable=not console.is_terminal, transient=True) as progress:
            shown: dict[str, Any] = {}

            def watch(what: str, done: int, total: int | None, bar: Progress = progress, ids: Any = shown) -> None:
                ids[what] = ids.get(what) or bar.add_task(what)
                bar.update(ids[what], completed=done, total=total)

            folder, kept = store.obtain(name, archives or (), force=force, watch=watch)
        for file, record in zip(store.taken_from(name, kept), kept["files"], strict=True):
            known = "as in the manifest" if file.sha256 == record["sha256"] else "recorded; the manifest has none"
            if file.sha256 not in (None, record["sha256"]):
                known = "another edition than the manifest's, taken because you gave it"
            print(f"{record.get('name', file.place)}: {record['bytes']:,} bytes, sha256 {record['sha256']} ({known})")
        if not stored:
            print(f"unpacked; now: {CALL} run EXPERIMENT --data {folder}")
    if not stored:
        return
    began = time.perf_counter()
    with console.status(f"{task}: reading or drawing rows"):
        config.arrays(workers or os.cpu_count() or 1, force=force)
    print(f"{task}: ready in {time.perf_counter() - began:.1f} s; {_counts(config)}")
    if config.stand_in:
        print(f"stand-in data, marked in every row: {config.stand_in}")


def _counts(config: PreparedTask) -> str:
    return ", ".join(f"{split} {count:,}" for split, count in config.counts().items())


@data_app.command("verify")
def verify(
    context: typer.Context,
    task: TaskName,
    data: DataFolder = None,
    overrides: Set = None,
    workers: Workers = None,
) -> None:
    """Check downloads by their hashes and the cache by its source, and count rows that two splits share."""
    repository = repository_of(context)
    config = _with_data(repository, task, data, overrides)
    stored = isinstance(config, PreparedTask)
    if not stored:
        raise ValueError(f"{task} keeps nothing in the cache; its files are checked whenever a run is planned")
    for name in config.sources:
        for line in repository.data().verify_source(name):
            print(line)
    config.verify(workers or os.cpu_count() or 1)
    print(f"{task}: the arrays are those of the source; content {config.fingerprint()[:16]}; {_counts(config)}")
    for pair, count in repository.leakage(config).items():
        print(f"identical inputs, {pair}: {count:,}")
    print(f"stand-in data: {config.stand_in}" if config.stand_in else "not stand-in data")


@data_app.command("rate")
def rate(
    context: typer.Context,
    task: TaskName,
    data: DataFolder = None,
    overrides: Set = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a batch.")] = 32,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads that draw; repeatable; default: 1, 2, 4, ... all cores.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.01, max=3600, help="Seconds to measure for each number of threads.")
    ] = 2.0,
    results: StoredResults = None,
) -> None:
    """Measure how many tokens a second a task delivers without a model, beside the fastest stored training run."""
    repository = repository_of(context)
    rates = repository.data_rate()
    config = _configured(repository, task, data, overrides)
    source = rates.feed(config, batch_size)
    held = f"{source.resident_bytes / 1e6:,.0f} MB stay on the device" if source.resident_bytes else "a stream"
    print(f"{task}: first batch after {source.startup_s:.1f} s; training rows: {held}")
    cores = os.cpu_count() or 1
    fastest, who = _fastest(task, repository.roots(results))
    unknown = f"no stored row says how fast a model trains{repository.unfetched}"
    print("workers\trows/s\ttokens/s\tMB/s\ttimes the fastest model")
    for count in workers or sorted({*(1 << i for i in range(cores.bit_length()) if 1 << i <= cores), cores}):
        found = rates.measure(source, count, seconds)
        times = f"{found.tokens_per_s / fastest:.1f}" if fastest else "-"
        print(f"{count}\t{found.rows_per_s:,.0f}\t{found.tokens_per_s:,.0f}\t{found.bytes_per_s / 1e6:,.0f}\t{times}")
    print(f"fastest model: {fastest:,.0f} tokens/s, {who}" if fastest else unknown)


def _fastest(task: str, roots: list[Path]) -> tuple[float, str]:
    """The highest training throughput on a task among stored rows, or on any task where it has none."""
    import pyarrow.compute as pc

    from subquad.suite.store import storage

    columns = ("metric", "value", "task", "model", "device")
    rows: list[dict[str, Any]] = []
    paths = [path for root in roots for path in storage.files_below(root)]
    for table in storage.tables(paths, columns, skip=skipped):
        rows += table.filter(pc.equal(table["metric"], "train_throughput")).to_pylist()
    rows = [row for row in rows if row["value"] is not None and row["value"] > 0]
    rows = [row for row in rows if row["task"] == task] or rows
    if not rows:
        return 0.0, ""
    best = max(rows, key=lambda row: row["value"])
    return float(best["value"]), f"{best['model']} on {best['task']}, {best['device']}"


@data_app.command("where")
def where(context: typer.Context) -> None:
    """Print the folder of the cache (SUBQUAD_DATA) and what is in it."""
    cache = repository_of(context).data().cache
    print(cache.root())
    for folder in sorted(path for path in cache.place().glob("*/*") if path.is_dir()):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder.relative_to(cache.root())}\t{size:,} bytes")
    if cache.offline():
        print("SUBQUAD_OFFLINE is set: nothing is downloaded")
