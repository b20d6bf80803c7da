"""Rows of others are checked when they are read: what cannot be believed is named, left out, and never fatal."""

import json
import math
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from subquad.reports import render
from subquad.run_suite import HOME
from subquad.suite.commands.evaluate import _measured
from subquad.suite.identity import identity
from subquad.suite.metrics import METRICS, domain_of
from subquad.suite.runs import Outcome
from subquad.suite.settings.config import load_experiment
from subquad.suite.store import documents, endings, storage
from subquad.suite.store.comparison import collect, compare
from subquad.suite.store.rows import Selection, write_json
from subquad.suite.store.verify import quarantine, verify
from tests.stored import made, store
from tests.suite.test_fuzz import cases, fuzz

SETTINGS = {
    "task": {"name": "mqar", "version": 1, "length": 64},
    "model": {"name": "gla", "version": 2, "d_model": 8},
    "train": {"lr": 0.1, "keep": "last"},
    "seed": 3,
    "data": "generated",
}
PLACE = ("quickstart", "paper")
USED = json.dumps({"gated_linear_attention": {"version": 1, "backend": "torch"}})


def good_rows(settings=SETTINGS, **columns):
    """The rows of one run: a loss, an accuracy, a speed, and how it ended."""
    rows = [
        {"metric": "loss", "split": "valid", "step": 10, "value": 0.5},
        {"metric": "accuracy", "split": "test", "step": 10, "value": 0.25},
        {"metric": "train_throughput", "value": 1000.0, "samples": [900.0, 1000.0, 1100.0]},
        {"metric": "run"},
    ]
    shared = {"experiment": PLACE[0], "scale": PLACE[1], "operators": USED, "device": "CPU", "threads": 1}
    shared |= {"slice": "", "error": "", "started_at": "2026-01-01T00:00:00+00:00", "duration_s": 2.0, **columns}
    return made([{"split": "", **row} for row in rows], settings, **shared)


def write(root, rows, name=None, place=PLACE):
    """Writes rows without a check, as whoever damages a file."""
    path = storage.result_path(root, *place, name or identity(SETTINGS))
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([{"schema": storage.SCHEMA_VERSION, **row} for row in rows], storage.SCHEMA)
    table = table.replace_schema_metadata({documents.ENDING: documents.footer_of(rows)})
    pq.write_table(table, path, write_page_checksum=True)
    return path


def cell(row, **columns):
    """A damage: other values in one row, or in all rows where it is None."""

    def change(rows):
        return [{**old, **columns} if row in (None, place) else old for place, old in enumerate(rows)]

    return change


def settings(**sections):
    """A damage: other settings, of which the id and the other columns are those."""
    return lambda rows: [row | {"config": json.dumps({**SETTINGS, **sections})} for row in rows]


DEEP = '{"a":' * 200 + "1" + "}" * 200
DAMAGES = {
    "loss is nan": cell(0, value=math.nan),
    "loss is -inf": cell(0, value=-math.inf),
    "loss is 1e+308": cell(0, value=1e308),
    "accuracy is 7.5, which must be from 0 to 1": cell(1, value=7.5),
    "accuracy is -1": cell(1, value=-1.0),
    "accuracy has no value": cell(1, value=None),
    "train_throughput is 0, which must be above 0": cell(2, value=0.0),
    "a sample of train_throughput is -1": cell(2, samples=[-1.0]),
    "a sample of train_throughput is nan": cell(2, samples=[1.0, None]),
    "accuracy has the unit '%', not 'fraction'": cell(1, unit="%"),
    "run is 1, which must be no number": cell(3, value=1.0),
    "the status 'fine' is unknown": cell(3, status="fine"),
    "a row has no metric": cell(0, metric=None),
    "step is -1": cell(0, step=-1),
    "threads is 0": cell(None, threads=0),
    "duration_s is inf": cell(0, duration_s=math.inf),
    "several values of seed": cell(1, seed=4),
    "several values of config": cell(3, config="{}"),
    "several values of operators": cell(3, operators=None),
    "seed is 4 in its rows and 3 in its settings": cell(None, seed=4),
    "model is 'gsa' in its rows and 'gla' in its settings": cell(None, model="gsa"),
    "task_version is 9": cell(None, task_version=9),
    "its rows are of h3/table2, scale paper, which is not its folder": cell(None, experiment="h3/table2"),
    "its rows are of quickstart, scale small": cell(None, scale="small"),
    "its rows do not say which run they are of": cell(None, experiment=None),
    "its rows are those of the run ab": cell(None, run_id="ab"),
    "its rows are those of the run abc": cell(0, run_id="abc"),
    "its settings are those of the run": settings(train={"lr": 0.2, "keep": "last"}),
    "config: a JSON object was expected, not '[]'": cell(None, config="[]"),
    "config: a JSON object was expected, not 'null'": cell(None, config="null"),
    "config: no JSON": cell(None, config="{"),
    "config: deeper than 32": cell(None, config=DEEP),
    "config: deeper than 32 objects": cell(None, config="[" * 100_000),
    "config: the key 'seed' twice": cell(None, config='{"seed": 3, "seed": 3}'),
    "config: NaN, which is no JSON": cell(None, config='{"seed": NaN}'),
    "config: the number 1e999": cell(None, config='{"train": {"lr": 1e999}}'),
    "config: a number of 400 digits": cell(None, config=f'{{"seed": {"9" * 400}}}'),
    "config: half of a character": cell(None, config='{"model": {"name": "\\ud800"}}'),
    "config: train: input should be a valid dictionary": settings(train=[]),
    "config: task: input should be": settings(task=None),
    "config: model.name: field required": settings(model={}),
    "config: seed: input should be a valid integer": settings(seed="3"),
    "operators: a JSON object was expected": cell(None, operators="[]"),
    "operators: gla: input should be": cell(None, operators='{"gla": null}'),
    "operators: gla.backend: field required": cell(None, operators='{"gla": {"version": 1}}'),
    "operators: gla.version: input should be": cell(None, operators='{"gla": {"version": "1", "backend": "torch"}}'),
}


@pytest.mark.parametrize(("words", "damage"), DAMAGES.items(), ids=DAMAGES)
def test_a_run_that_cannot_be_believed_is_left_out_and_named_with_the_reason(tmp_path, words, damage):
    path, said = write(tmp_path, damage(good_rows())), []
    other = store(tmp_path, good_rows(other := {**SETTINGS, "seed": 4}), other, experiment=PLACE[0])
    found = storage.read([path, other], skip=said.append)
    assert set(found["run_id"]) == {other.stem}
    (sentence,) = said
    assert sentence.startswith(f"{path}: ")
    assert words in sentence
    with pytest.raises(storage.SchemaError, match=f"^{path}: "):
        storage.load(path)
    assert [sentence for _, sentence in verify(tmp_path).problems] == said


def test_of_a_part_the_other_runs_are_read(tmp_path):
    """A part has many runs, so one of them that was made up does not take the others away."""
    bad = [{**row, "value": 7.5} if row["metric"] == "accuracy" else row for row in good_rows()]
    other = good_rows({**SETTINGS, "seed": 4})
    rows = sorted([*bad, *other], key=lambda row: row["run_id"])
    path, said = write(tmp_path, rows, "part-x"), []
    path = path.rename(path.with_name(storage.part_name(path.read_bytes())))
    assert set(storage.read([path], skip=said.append)["run_id"]) == {other[0]["run_id"]}
    assert said == [f"{path}: run {bad[0]['run_id']}: accuracy is 7.5, which must be from 0 to 1"]
    runs = [(*PLACE, rows[0]["run_id"]) for rows in (bad, other)]
    assert [ended.status for ended in endings.endings_of(tmp_path, runs, said.append)] == ["damaged", "ok"]
    with pytest.raises(storage.SchemaError, match=r"accuracy is 7\.5"):
        endings.endings_of(tmp_path, runs)
    # readers take the rows of a run from one row group
    pq.write_table(pq.read_table(path), path, row_group_size=3)
    path = path.rename(path.with_name(storage.part_name(path.read_bytes())))
    with pytest.raises(storage.SchemaError, match="its runs are not sorted"):
        storage.load(path)


def test_a_file_in_the_place_of_another_run_does_not_stand_for_it(tmp_path):
    """`run` and `status` read the footer alone, which says whose ending it is."""
    path = store(tmp_path, good_rows(), SETTINGS, experiment=PLACE[0])
    for other, words in (
        (path.with_stem("0" * 16), f"its rows are those of the run {path.stem}"),
        (tmp_path / "h3" / "table2" / "paper" / path.name, "its rows are of quickstart, scale paper"),
    ):
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, other)
        with pytest.raises(storage.SchemaError, match=words):
            endings.ending(other)
        with pytest.raises(storage.SchemaError, match=words):
            storage.load(other)
    # runs of a probe are below a folder of this name, whatever their experiment
    probe = tmp_path / "probes" / "mine" / path.name
    probe.parent.mkdir(parents=True)
    shutil.copy(path, probe)
    assert endings.ending(probe).status == "ok"
    assert storage.load(probe).num_rows == 4


def test_verify_compares_files_of_one_run_and_footers_with_rows(tmp_path):
    path = write(tmp_path, good_rows())
    part = write(tmp_path, good_rows(), "part-x")
    part = part.rename(part.with_name(storage.part_name(part.read_bytes())))
    found = verify(tmp_path)
    assert (found.num_files, found.num_runs, found.num_rows, found.num_again, found.problems) == (2, 2, 8, 1, [])
    rows = cell(1, value=0.5)(good_rows())
    write(tmp_path, rows)
    assert [sentence for _, sentence in verify(tmp_path).problems] == [
        f"{part}: run {path.stem}: its rows are not those in {path}, which count"
    ]
    part.unlink()
    table = pa.Table.from_pylist([{"schema": 2, **row} for row in rows], storage.SCHEMA)
    footer = documents.footer_of(cell(3, status="failed", error="why")(rows))
    pq.write_table(table.replace_schema_metadata({documents.ENDING: footer}), path)
    assert [sentence for _, sentence in verify(tmp_path).problems] == [
        f"{path}: status is 'failed' in its footer and 'ok' in its rows",
        f"{path}: error is 'why' in its footer and '' in its rows",
    ]


def test_bad_files_are_moved_to_where_nothing_reads_and_parts_stay(command_line, tmp_path):
    root = tmp_path / "mine"
    good = store(root, good_rows(other := {**SETTINGS, "seed": 4}), other, experiment=PLACE[0])
    bad = write(root, cell(1, value=7.5)(good_rows()))
    part = bad.with_name("part-0000000000000000.parquet")
    part.write_text("nothing")
    done = command_line("results", "verify", root)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        f"{bad}: accuracy is 7.5, which must be from 0 to 1",
        f"{part}: damaged or not a parquet file (its name is not that of its content); remove it",
        f"{root}: 3 files, 2 runs and 8 rows checked, 2 problems",
    ]
    done = command_line("results", "verify", root, "--quarantine")
    moved = tmp_path / "mine.quarantine" / "quickstart" / "paper" / f"{bad.name}.bad"
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        f"moved {bad} to {moved}",
        f"not moved, because a part may have good runs, too: {part}",
    ]
    assert moved.is_file()
    assert storage.files_below(tmp_path) == [good, part]
    # a second file of the name takes nothing away from the first
    again = write(root, cell(1, value=8.5)(good_rows()))
    assert [place.name for _, place in quarantine(root, [again, again])] == [f"{bad.name}.1.bad"]
    part.unlink()
    assert command_line("results", "verify", root).returncode == 0


def test_what_may_not_be_read_is_neither_damaged_nor_missing(command_line, tmp_path, monkeypatch):
    """Tests may have the rights of root, to whom a system refuses nothing, so its refusals are planted."""
    path = write(tmp_path, good_rows())

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert verify(tmp_path).problems == [(path, f"{path}: cannot be read (Permission denied); change its permissions")]
    assert list(quarantine(tmp_path, [path])) == []
    monkeypatch.setattr(os, "scandir", refuse)
    done = command_line("results", "verify", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(": Permission denied; change its permissions, or name another place\n")


@pytest.mark.parametrize("words", ["loss is -inf", "config: a JSON object was expected, not '[]'", "its settings are"])
def test_no_command_ends_with_a_damaged_file(command_line, tmp_path, words):
    damage = next(damage for key, damage in DAMAGES.items() if key.startswith(words))
    theirs, good = tmp_path / "theirs", tmp_path / "good"
    for root in (theirs, good):
        store(root, good_rows(other := {**SETTINGS, "seed": 4}), other, experiment=PLACE[0])
    path = write(theirs, damage(good_rows()))
    for arguments, code in (
        (("report", "quickstart", "--results", theirs), 0),
        (("compare", theirs, good, "--all"), 0),
        (("export", theirs), 0),
        (("export", "quickstart", "--results", theirs, "--format", "json"), 0),
        (("status", "quickstart", "--results", theirs), 0),
        (("show", path.stem, "--results", theirs), 2),
        (("publish", theirs, "--results", tmp_path / "there"), 2),
        (("results", "verify", theirs), 1),
    ):
        done = command_line(*arguments)
        assert done.returncode == code, done.stderr
        # `status` reads only what the footer says, if that is whole
        assert str(path) in done.stdout + done.stderr or arguments[0] == "status"


TEXT = st.one_of(st.none(), st.text(max_size=5))
CELLS = {
    **{name: TEXT for name in storage.TEXTS if name != "config"},
    "value": st.one_of(st.none(), st.floats(), st.sampled_from([0.5, 7.5, 1e308, -1.0])),
    "samples": st.one_of(st.none(), st.lists(st.floats(), max_size=3)),
    "seed": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    "step": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    "threads": st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
    "duration_s": st.one_of(st.none(), st.floats()),
    "status": st.sampled_from([None, "ok", "failed", "diverged", "n/a", "fine"]),
    "metric": st.sampled_from([None, "", "run", "accuracy", "loss", "kernel", "time", "mine"]),
    "operators": st.sampled_from([None, "", "[]", "null", "3", '{"a": []}', '{"a": {"version": 1, "backend": "b"}}']),
}
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)
CHANGES = st.one_of(
    st.tuples(st.sampled_from([None, 0, 1, 2, 3]), st.sampled_from([*CELLS])).flatmap(
        lambda where: st.tuples(st.just("cell"), st.just(where), CELLS[where[1]])
    ),
    # whoever makes up settings can make up an id that is theirs
    st.tuples(
        st.just("settings"),
        st.sampled_from([(part,) for part in SETTINGS] + [("train", "lr"), ("task", "length"), ("model", "d_model")]),
        VALUES,
    ),
)


@cases(4, 100)
def test_any_damage_is_named_or_harmless(tmp_path, examples):
    """Every reader gives the same answer, and none ends with another error than that of a file that it names."""
    config, folder = load_experiment(HOME / "reports/quickstart/grid.yaml"), HOME / "reports/quickstart"
    good = store(tmp_path / "good", good_rows(other := {**SETTINGS, "seed": 4}), other, experiment=PLACE[0])

    def check(change):
        kind, where, value = change
        rows = good_rows()
        if kind == "cell":
            rows = cell(where[0], **{where[1]: value})(rows)
        else:
            changed = json.loads(json.dumps(SETTINGS))
            (changed[where[0]] if len(where) > 1 else changed)[where[-1]] = value
            try:
                rows = good_rows(changed)
            except (ValueError, TypeError, AttributeError, KeyError):
                # such settings have no id, or no name of a model
                rows = settings(**changed)(rows)
        root = tmp_path / "theirs"
        shutil.rmtree(root, ignore_errors=True)
        try:
            path = write(root, rows, rows[0]["run_id"] if kind == "settings" else None)
        except (pa.ArrowException, OverflowError):
            return
        said = []
        found = render.rows_of([path, good], said.append)
        report = render.build(config, folder, found)
        assert render.render(report, "md")
        assert (path.stem in found["run_id"].to_pylist()) == (not said)
        assert [sentence for _, sentence in verify(root).problems] == said
        compare(*(collect([side], every_metric=True, skip=lambda reason: None) for side in (path, good)))
        with (tmp_path / "out.json").open("w") as file:
            write_json(Selection([path, good], skip=lambda reason: None), file)
        json.loads((tmp_path / "out.json").read_text())
        assert endings.endings_of(root, [(*PLACE, path.stem)], lambda reason: None)[0] is not None

    fuzz(examples, check, CHANGES)


@pytest.mark.parametrize("metric", ["mine", *METRICS])
def test_a_number_outside_of_its_domain_is_not_written_and_stored_where_a_run_diverged(tmp_path, metric):
    domain = domain_of(metric)
    for value in (math.nan, math.inf, -math.inf, 1e308, domain.least - 0.5, domain.most + 0.5):
        if domain.has(value):
            # beside the largest number, a half is nothing
            continue
        with pytest.raises(ValueError, match=rf"^{metric} is .*, which must be "):
            store(tmp_path, [{"metric": metric, "value": value}, {"metric": "run"}])
        assert not list(tmp_path.iterdir())
    path = store(tmp_path, [{"metric": metric, "value": math.nan}, {"metric": "run", "status": "diverged"}])
    assert storage.load(path)["value"].to_pylist() == [None, None]


def test_a_mean_that_is_not_finite_becomes_a_row_that_says_so():
    """A run whose loss overflows on one slice of the test split keeps its other rows."""
    outcome = Outcome()
    outcome.add("loss", "nats", math.inf, slice="length=512")
    outcome.add("accuracy", "fraction", 1 + 1e-9)
    assert [(row["value"], row["status"], row["error"]) for row in outcome.rows] == [
        (None, "diverged", "loss is inf"),
        (1 + 1e-9, "ok", ""),
    ]
    with pytest.raises(ValueError, match=r"^accuracy is 7\.5, which must be from 0 to 1$"):
        outcome.add("accuracy", "fraction", 7.5)
    assert len(outcome.rows) == 2


def test_a_score_of_an_evaluation_that_is_not_finite_is_stored_without_a_value(tmp_path):
    """The answers may have taken hours, and metrics of the harness have the names and units that they have."""
    scores = {"word_perplexity": math.inf, "acc (standard error)": math.nan, "accuracy": 75.0}
    rows = [{"metric": metric, "unit": "", **_measured(metric, value)} for metric, value in scores.items()]
    path = store(tmp_path, [*rows, {"metric": "run"}], experiment="evaluate")
    table = storage.load(path)
    assert table["value"].to_pylist() == [None, None, 75.0, None]
    assert table["error"].to_pylist() == ["word_perplexity is inf", "acc (standard error) is nan", None, None]
