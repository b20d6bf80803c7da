"""Runs that are published stand in parts that nobody edits; every reader takes these as it takes files of one run."""

import functools
import hashlib
import itertools
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from subquad.reports.render import load_runs, rows_of
from subquad.run_suite import HOME
from subquad.suite.identity import identity as hash_of
from subquad.suite.runner import plan
from subquad.suite.store import endings, parts, storage
from subquad.suite.store.comparison import collect
from subquad.suite.store.rows import Selection
from tests.processes import with_subquad
from tests.stored import made
from tests.suite.toy import make_run

PLACE = ("toy", "test")
COLUMNS = {"experiment": PLACE[0], "scale": PLACE[1], "device": "CPU", "threads": 1}


@functools.cache
def settings_like(number, seed=None):
    """Settings whose hash begins with the number, so that the runs have an order."""
    models = ({"name": "m", "size": number % 2, "tries": tries} for tries in itertools.count())
    found = ({"task": {"name": "t"}, "model": model, "seed": number if seed is None else seed} for model in models)
    return next(settings for settings in found if hash_of(settings).startswith(f"{number:x}"))


def identity(number):
    return hash_of(settings_like(number))


def rows_like(number, settings=None, **changes):
    """The rows of one run: two losses, an accuracy, and how it ended."""
    row = {"split": "test", "started_at": f"2026-01-0{1 + number % 9}", "slice": "", "error": ""}
    losses = [{**row, "metric": "loss", "step": step, "value": 1 / (step + 1)} for step in (0, 10)]
    accuracy = {**row, "metric": "accuracy", "step": 10, "value": number / 10}
    curve = {**row, "metric": "kernel", "samples": [0.5, 0.25], "value": None, "split": None}
    rows = [*losses, accuracy, curve, {**row, "metric": "run", "duration_s": 2.0, "split": ""}]
    return made([{**row, **changes} for row in rows], settings or settings_like(number), **COLUMNS)


def store(root, *numbers, **changes):
    for number in numbers:
        rows = rows_like(number, **changes)
        storage.write(storage.result_path(root, *PLACE, rows[0]["run_id"]), rows)
    return root


def published(source, root):
    found, _ = parts.unpublished(source, root)
    return [parts.write(part) for part in found]


def everything(root):
    """All rows below a folder as text, in which NaN equals NaN."""
    return repr(pa.concat_tables(storage.tables(storage.files([root], PLACE[0]))).to_pylist())


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def local(tmp_path):
    return store(tmp_path / "local", 1, 2, 3, 4)


@pytest.fixture
def reference(local, tmp_path):
    """The same rows in one part."""
    (path,) = published(local, tmp_path / "reference")
    assert path.parent == tmp_path / "reference" / "toy" / "test"
    return tmp_path / "reference"


@pytest.fixture
def mixed(tmp_path):
    """The same rows in two parts and in files of one run."""
    root = tmp_path / "mixed"
    published(store(tmp_path / "first", 1, 3), root)
    published(store(tmp_path / "second", 2), root)
    return store(root, 4)


def test_rows_stand_in_a_part_as_they_were_written(local, reference):
    assert everything(reference) == everything(local)
    least = settings_like(5, -(2**62))
    published(store(local, 5, settings=least, duration_s=float("nan"), device=None), reference)
    assert everything(reference) == everything(local)
    assert parts.unpublished(local, reference) == ([], 5)


def test_the_same_runs_make_the_same_part_whatever_their_order(local, reference, tmp_path):
    store(tmp_path / "again", 4, 2, 1, 3)
    (path,) = published(tmp_path / "again", tmp_path / "there")
    assert [path.read_bytes()] == list(contents(reference).values())
    assert path.name == f"part-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.parquet"
    # a part is a source as well
    assert published(reference, tmp_path / "third")[0].name == path.name


def test_what_is_published_again_adds_the_new_runs_alone_and_edits_nothing(local, reference):
    before = contents(reference)
    assert parts.unpublished(local, reference) == ([], 4)
    store(local, 5)
    (path,) = published(local, reference)
    assert endings.endings_in(path).keys() == {identity(5)}
    assert before.items() <= contents(reference).items()
    assert everything(reference).count("'accuracy'") == 5


@pytest.mark.parametrize("where", ["reference", "mixed"])
def test_every_reader_takes_parts_and_a_mixture(local, where, request):
    root = request.getfixturevalue(where)
    files, paths = storage.files([local], "toy"), storage.files([root], "toy")
    assert [path.name.startswith("part-") for path in files] == [False] * 4
    runs = [(*PLACE, identity(number)) for number in (1, 2, 3, 4, 5)]
    assert endings.endings_of(root, runs) == endings.endings_of(local, runs)
    assert endings.endings_of(root, runs)[-1] is None
    for compared in (collect, lambda paths, **options: collect(paths, ["model.size=1"], **options)):
        assert compared(paths, every_metric=True) == compared(files, every_metric=True)
    for only in ((), ("metric=loss", "model.size=1")):
        left, right = (Selection(found, only) for found in (files, paths))
        assert len(left) == len(right) > 0
        frames = [one.frame().sort_values(["run_id", "metric", "step"], ignore_index=True) for one in (left, right)]
        assert frames[0].equals(frames[1])
    shown = [
        [(run.run_id, run.status, run.config, repr(list(run.values))) for run in load_runs(rows_of(found))]
        for found in (files, paths)
    ]
    assert shown[0] == shown[1]
    assert len(shown[0]) == 4
    assert len(endings.find([root], "")) == 4
    assert [run_id for run_id, _ in endings.find([root], identity(3))] == [identity(3)]
    wanted = Selection(paths, runs=[identity(2), identity(4)]).frame()
    assert set(wanted["run_id"]) == {identity(2), identity(4)}


def test_one_run_is_read_without_the_row_groups_of_others(local, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "ROWS_A_GROUP", 6)
    (path,) = published(local, tmp_path / "reference")
    read, as_today = [], storage._as_today
    monkeypatch.setattr(
        storage, "_as_today", lambda path, table, *rest: read.append(table.num_rows) or as_today(path, table, *rest)
    )
    for number in (1, 2, 3, 4):
        found = storage.load(path, run_id=identity(number))
        assert repr(found.to_pylist()) == repr(
            storage.load(storage.result_path(local, *PLACE, identity(number))).to_pylist()
        )
    assert read == [10, 5] * 4
    assert storage.load(path, run_id="ffff").num_rows == 0


def test_of_a_run_stored_twice_its_own_file_counts_and_then_the_first_part(local, tmp_path):
    root = tmp_path / "twice"
    (one,) = published(local, root)
    (other,) = published(store(tmp_path / "later", 3, 5, status="diverged"), root / "aside")
    other = other.rename(one.with_name(other.name))
    store(root, 1, status="oom")
    runs = [(*PLACE, identity(number)) for number in (1, 2, 3, 5)]
    expected = ["oom", "ok", "ok" if one.name < other.name else "diverged", "diverged"]
    assert [ended.status for ended in endings.endings_of(root, runs)] == expected
    every = [ended.status for ended in endings.every_ending(storage.files([root], "toy"))]
    assert (len(every), every.count("oom")) == (5, 1)
    found = storage.read(storage.files([root], "toy"), ["run_id", "metric", "status"])
    found = found[found["metric"] == "run"].set_index("run_id")["status"]
    assert [found[identity(number)] for number in (1, 2, 3, 5)] == expected
    assert len(found) == 5


def test_rows_of_the_first_schema_beside_others_stay_as_they_are(tmp_path):
    root = store(tmp_path / "local", 1, 2)
    path = storage.result_path(root, *PLACE, identity(1))
    table = storage.load(path).drop_columns(["threads", "operators"])
    pa.parquet.write_table(table.set_column(0, "schema", pa.array([1] * table.num_rows, pa.int32())), path)
    published(root, tmp_path / "reference")
    assert everything(tmp_path / "reference") == everything(root)
    whole = pa.concat_tables(storage.tables(storage.files([tmp_path / "reference"], "toy")))
    assert whole["schema"].to_pylist() == [1] * 5 + [2] * 5
    assert whole.filter(pc.equal(whole["schema"], 1))["threads"].null_count == 5


def test_damaged_and_unfinished_files_are_refused_by_name_and_nothing_is_written(command_line, local, tmp_path):
    there = tmp_path / "reference"
    store(local, 7, status="failed", error="why")
    done = command_line("publish", local, "--results", there)
    own = storage.result_path(local, *PLACE, identity(7))
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {own}: 1 runs failed or have not ended; repeat them with `run`, or move their files away\n"
    )
    storage.write(own, rows_like(7)[:-1])
    assert str(own) in command_line("publish", local, "--results", there).stderr
    own.write_bytes(b"half of a file")
    done = command_line("publish", local, "--results", there)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{own}: damaged or not a parquet file" in done.stderr
    assert not there.exists()


def test_a_run_that_is_there_with_other_rows_is_refused_with_both_names(command_line, local, reference):
    before = contents(reference)
    store(local, 2, torch="another")
    store(local, 6)
    done = command_line("publish", local, "--results", reference)
    (part,) = storage.files([reference], "toy")
    own = storage.result_path(local, *PLACE, identity(2))
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {own} has other rows of the run {identity(2)} than {part}, which is never edited; "
        "remove the first, or publish to another folder (--results)\n",
    )
    assert contents(reference) == before


def test_what_publish_says(command_line, local, tmp_path, monkeypatch):
    there = tmp_path / "reference"
    done = command_line("publish", local, "--results", there)
    (path,) = storage.files([there], "toy")
    assert (done.returncode, done.stdout) == (0, f"4 runs, 20 rows: {path}\n")
    assert command_line("publish", local, "--results", there).stdout == "4 runs were there already\n"
    for words, sentence in {
        (tmp_path / "none",): "there is no such folder",
        (there, "--results", there): "cannot be published into itself",
        (tmp_path / "empty", "--results", there): "it has no runs",
        (local / "toy",): "rows of toy/test would be in",
    }.items():
        (tmp_path / "empty").mkdir(exist_ok=True)
        done = command_line("publish", *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert sentence in done.stderr


def test_a_publish_that_is_killed_leaves_whole_parts_and_is_completed_by_the_next(tmp_path):
    source, there = tmp_path / "local", tmp_path / "reference"
    for scale in range(6):
        for number in range(3):
            rows = [{**row, "scale": f"s{scale}"} for row in rows_like(number)]
            storage.write(storage.result_path(source, "toy", f"s{scale}", identity(number)), rows)
    expected = {path.name for path in published(source, tmp_path / "whole")}
    # every part asks twice for its bytes to be on the disk; the fifth time, the process waits to be killed
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from subquad.suite.store import parts\n"
        "fsync, calls = os.fsync, []\n"
        "def slow(file):\n"
        "    fsync(file), calls.append(file), print(flush=True)\n"
        "    time.sleep(60 * (len(calls) > 4))\n"
        "os.fsync = slow\n"
        "[parts.write(part) for part in parts.unpublished(Path(sys.argv[1]), Path(sys.argv[2]))[0]]"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, source, there], cwd=HOME, env=with_subquad(), stdout=subprocess.PIPE
    )
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found = storage.files_below(there)
    assert len(found) == 2
    assert len([path for path in there.rglob("*") if path.is_file()]) == 3
    assert {storage.part_name(path.read_bytes()) for path in found} == {path.name for path in found} < expected
    published(source, there)
    assert {path.name for path in storage.files_below(there)} == expected


def test_a_grid_goes_on_from_the_runs_of_parts(tmp_path):
    runs = [make_run(seed=seed) for seed in range(3)]
    for run in runs[:2]:
        rows = rows_like(run.seed, run.resolved, experiment=run.experiment, scale=run.scale)
        storage.write(storage.result_path(tmp_path / "local", run.experiment, run.scale, run.run_id), rows)
    found, _ = parts.unpublished(tmp_path / "local", tmp_path / "reference")
    parts.write(*found)
    assert [item.todo for item in plan(runs, [tmp_path / "reference"])] == [False, False, True]
    assert [item.todo for item in plan(runs, [tmp_path / "none", tmp_path / "reference"])] == [False, False, True]


def test_an_edited_part_is_refused_by_name_and_left_out_where_others_are_shown(reference, mixed):
    (path,) = storage.files([reference], "toy")
    content = path.read_bytes()
    for edited in (content[:-20], content.replace(b"arrow", b"Arrow"), b""):
        path.write_bytes(edited)
        endings.endings_in.cache_clear()
        for reader in (lambda: storage.read([path]), lambda: endings.endings_in(path), lambda: storage.load(path)):
            with pytest.raises(storage.SchemaError, match=rf"{path.name}: .*\(its name is not that of its content\)"):
                reader()
    said: list[str] = []
    paths = storage.files([mixed], "toy")
    assert len(load_runs(rows_of([*paths, path], said.append))) == 4
    (mixed / "toy" / "test" / f"{identity(9)}.parquet").write_text("nothing")
    assert len(storage.read(storage.files([mixed], "toy"), skip=said.append)["run_id"].unique()) == 4
    assert [sentence.partition(": ")[0] for sentence in said] == [str(path), f"{mixed}/toy/test/{identity(9)}.parquet"]
