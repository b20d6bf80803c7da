"""`compare`: compares the rows of two folders or revisions."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.suite.commands.console import skipped, table_console
from subquad.suite.commands.repository import Repository, repository_of
from subquad.suite.options import located, visible
from subquad.suite.store.target import is_folder, target

if TYPE_CHECKING:
    from subquad.suite.store.comparison import Comparison, Line, Measure, Rows

LARGE = 1e5
"""From here on a number has a prefix."""
PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3))
MOST_DECIMALS = 12

COLUMNS = ("experiment", "run", "metric", "A", "B", "difference", "seeds", "p", "p (Holm)", "B is")


class Format(StrEnum):
    terminal = "terminal"
    md = "md"


def compare(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="Folder of results, or a revision: main, HEAD~5:results/mine.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The folder or revision that is compared with A.")],
    only: Annotated[
        list[str] | None,
        typer.Option(help="Compare rows with one of these values: experiment=h3/*, metric=accuracy; repeatable."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show identical values, too.")] = False,
    format: Annotated[Format, typer.Option(help="How to print.")] = Format.terminal,
) -> None:
    """Compare two folders of results, or results at two revisions: difference, seeds, p, and better or worse.

    Runs with the same settings belong together, whatever their versions. Qualities are compared on the test split over
    seeds, by a permutation test; speeds by their ratio, on one device only. `--only metric=...` compares other metrics.
    """
    from subquad.suite.store import storage
    from subquad.suite.store.comparison import collect
    from subquad.suite.store.comparison import compare as compared
    from subquad.suite.store.revisions import extract
    from subquad.suite.store.rows import MEASUREMENT

    repository = repository_of(context)
    only = only or []
    every_metric = any(text.startswith(MEASUREMENT) for text in only)

    # both sides are looked up before either is read, because reading takes long
    sources = {name: _find(name, repository) for name in (a, b)}

    def rows(name: str) -> Rows:
        side = sources[name]
        with tempfile.TemporaryDirectory() as temporary:
            if side.commit:
                extract(repository.reports.parent, side.commit, Path(temporary), side.folder)
            paths = side.files or storage.files_below(Path(temporary))
            with _progress(name, len(paths)) as watch:
                found = partial(collect, paths, only, every_metric=every_metric, watch=watch, skip=skipped)
                return located(f"compare: {name}", found)

    sides = rows(a), rows(b)
    comparison = compared(*sides)
    if not comparison.lines:
        raise ValueError(_nothing(a, b, comparison))
    lines = [line for line in comparison.lines if every or not line.is_identical]
    table = [tuple(map(visible, row)) for row in _table(lines, comparison.corrected)]
    if format is Format.md:
        for row in (COLUMNS, tuple("---" for _ in COLUMNS), *table):
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
        print()
    elif table:
        _print(table)
    for note in map(visible, _notes(a, b, sides, comparison, lines)):
        print(note if format is Format.terminal else f"- {note}")


@contextlib.contextmanager
def _progress(side: str, files: int) -> Iterator[Callable[[int], None]]:
    """Shows on a terminal how many files of a side have been read. Yields the function to call with that number."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        task = bars.add_task(f"reading the files of {side}", total=files)
        yield lambda done: bars.update(task, completed=done)


@dataclass(frozen=True)
class _Side:
    """One side of a comparison. It has either files, or a commit, from which `folder` has to be extracted."""

    files: Sequence[Path] = ()
    commit: str = ""
    folder: str = ""


def _find(side: str, repository: Repository) -> _Side:
    """Looks up a folder of results, or else a revision. Raises ValueError if it has no rows."""
    from subquad.suite.store import storage
    from subquad.suite.store.revisions import commit_of, git

    folder = target(side)
    if is_folder(folder):
        files = storage.files_below(folder)
        if not files:
            raise ValueError(f"compare: no rows below {side}; `run EXPERIMENT --results {side}` makes some")
        return _Side(files)
    if repository.pull is not None:
        from subquad.suite.environment import release

        if side != release():
            raise ValueError(
                f"{side!r} is neither a folder of results nor {release()}, the rows of the version that is installed"
            )
        repository.require_reference(f"compare {side}")
        return _Side(storage.files_below(repository.reference))
    revision, _, path = side.partition(":")
    home = repository.reports.parent
    path = path or repository.reference.relative_to(home).as_posix()
    commit = commit_of(home, revision)
    if commit is None:
        raise ValueError(f"{side!r} is neither a folder of results nor a revision of this checkout, such as main")
    listed = git(home, "ls-tree", "-r", "--name-only", commit, "--", path) or b""
    if not listed:
        raise ValueError(f"{side!r}: {commit[:10]} has no folder {path}; name one as {revision}:FOLDER")
    if b".parquet" not in listed:
        raise ValueError(f"{side!r}: {commit[:10]} has no rows below {path}; name their folder as {revision}:FOLDER")
    return _Side(commit=commit, folder=path)


def _nothing(a: str, b: str, comparison: Comparison) -> str:
    """Why nothing can be compared, and what to do."""
    if comparison.other_devices:
        devices = [" and ".join(sorted(found)) for found in comparison.other_devices[0]]
        return (
            f"compare: the speeds in {a} are those of {devices[0]}, in {b} of {devices[1]}; speeds of different "
            "devices are never compared. Measure both on one, or compare a quality with --only metric=accuracy"
        )
    return (
        f"compare: no measurement of {a} has the settings of one of {b} ({comparison.only_a} and {comparison.only_b} "
        "measurements); `export` shows their settings, and --only metric=... compares other metrics"
    )


def _table(lines: Sequence[Line], corrected: Mapping[Measure, float]) -> Iterator[tuple[str, ...]]:
    """The lines as text, worse and better ones first. corrected: p of the tested ones, corrected for their number."""
    from subquad.suite.store.comparison import labels

    order = ("worse", "better", "differs", "same", "seeds lost", "too few seeds", "identical")
    names = labels([line.measure for line in lines])
    devices = {line.measure.device for line in lines} - {""}
    for line in sorted(lines, key=lambda line: order.index(line.verdict)):
        one = line.measure
        mean_a, mean_b = line.means
        ratio = f"x {mean_b / mean_a:.3f}" if mean_a else ""
        p = "" if line.p is None or line.is_identical or line.lost else f"{line.p:.3f}"
        n, m = len(line.a), len(line.b)
        yield (
            f"{one.experiment} ({one.scale})",
            names[one] + f", {one.device}" * (len(devices) > 1 and line.is_speed),
            " ".join(filter(None, (one.metric, one.split if one.split != "test" else "", one.slice))),
            _side(line, 0),
            _side(line, 1) + f" {one.unit}".replace(" fraction", ""),
            ratio if line.is_speed else number(mean_b - mean_a, 4, sign=True),
            str(n) if n == m else f"{n}, {m}",
            p,
            f"{corrected[one]:.3f}" if one in corrected else "",
            line.verdict,
        )


def _side(line: Line, index: int) -> str:
    import statistics

    values = [value.value for value in (line.a, line.b)[index].values()]
    spread = f" ± {number(statistics.stdev(values), 2)}" if len(values) > 1 else ""
    return f"{number(line.means[index], 5)}{spread}"


def number(value: float, digits: int, *, sign: bool = False) -> str:
    """A number of so many digits without an exponent, large ones with a prefix: 0.00012, 38.27, 1.4713M."""
    if not math.isfinite(value):
        return f"{value:+}" if sign else f"{value}"
    # as it is printed: 999,999 in four digits is a million
    size = abs(float(f"{value:.{digits}g}"))
    prefix, factor = next(((p, f) for p, f in PREFIXES if size >= f), ("", 1.0)) if size >= LARGE else ("", 1.0)
    scaled = value / factor
    # decimals behind the point, so that so many digits stand in all
    decimals = 0 if scaled == 0 else max(0, digits - 1 - math.floor(math.log10(abs(scaled))))
    text = f"{scaled:{'+' if sign else ''}.{min(decimals, MOST_DECIMALS)}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + prefix


def _print(table: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table

    shown = Table(*COLUMNS, box=None)
    styles = {"worse": "red", "better": "green"}
    for row in table:
        shown.add_row(*row, style=styles.get(row[-1]))
    console = table_console()
    console.print(shown, highlight=False, markup=False)


def _notes(a: str, b: str, sides: tuple[Rows, Rows], comparison: Comparison, shown: Sequence[Line]) -> Iterator[str]:
    """Returns the remarks below the table."""
    from subquad.suite.store.comparison import ALPHA, FACTS

    counts = Counter(line.verdict for line in comparison.lines)
    yield f"A is {a}, B is {b}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    if len(shown) < len(comparison.lines):
        yield f"not shown: {len(comparison.lines) - len(shown)} identical values; --all shows them"
    if comparison.only_a or comparison.only_b:
        yield f"measured on one side only: {comparison.only_a} in A, {comparison.only_b} in B"
    if comparison.other_devices:
        yield f"not compared: {len(comparison.other_devices)} speeds and sizes of memory of different devices"
    for name, side in zip("AB", sides, strict=True):
        if side.failed:
            yield f"{side.failed} runs of {name} ended with an error"
    for fact in FACTS:
        old, new = (set(side.facts.get(fact, ())) for side in sides)
        if old != new:
            width = 12 if fact == "commit" else 80
            yield f"{fact}: {_few(old, width)} in A, {_few(new, width)} in B"
    if comparison.tested:
        tests, left = len(comparison.tested), sum(p <= ALPHA for p in comparison.corrected.values())
        yield (
            f"p: permutation test on the difference of the means over seeds; of {tests} tests, about "
            f"{ALPHA * tests:.2g} have p below {ALPHA} by chance; p (Holm): corrected for their number; {left} stay "
            "below"
        )
    if counts["seeds lost"]:
        yield "seeds lost: runs of a side ended with an error, so the seeds that are left are no fair choice"
    if counts["too few seeds"]:
        yield f"too few seeds: no outcome could have p below {ALPHA}, which takes 4 seeds on both sides"
    devices = {line.measure.device for line in shown} - {""}
    if devices:
        yield f"speeds are those of {_few(devices, 80)}"
        yield (
            "speeds differ from 3 % and three times their noise on; they were not measured by turns, as `bench "
            "--compare` does, so another temperature or load of the device counts as a difference"
        )


def _few(values: set[str], width: int) -> str:
    names = sorted(value[:width] or "none" for value in values)
    return "; ".join(names[:3]) + f" and {len(names) - 3} others" * (len(names) > 3)
