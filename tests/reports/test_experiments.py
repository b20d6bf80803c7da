"""Every experiment's folder is complete: its grid resolves and fills its table, and its labels are the paper's."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from subquad.models import MODELS
from subquad.reports.render import build, render
from subquad.reports.render.claims import check_claims, read_claims
from subquad.reports.render.judge import Cell
from subquad.reports.render.plan import make_plan, matches, read_expected
from subquad.reports.render.selection import GridPoints
from subquad.run_suite import WORKLOADS
from subquad.suite.settings.grid import expand, lookup, points, same, seeds_of
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store.storage import SCHEMA
from subquad.tasks import TASKS
from subquad.tasks.lra.image import CLASSES
from subquad.tasks.lra.pathfinder import LEVEL
from subquad.tasks.sc09 import DIGITS
from tests.reports.committed import CONFIGS, EXPERIMENTS

COLUMNS = ["row", "column", "value", "unit", "better", "seeds", "hardware", "note", "source"]

RESOLVER = Resolver(TASKS, MODELS, WORKLOADS, without_data=True)

every = pytest.mark.parametrize("name", EXPERIMENTS)


@pytest.fixture(scope="module", autouse=True)
def cache_of_its_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


def record(path: Path, samples: int = 16000) -> None:
    """Writes a recording of silence, at 16 kHz."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        pytest.importorskip("soundfile").write(path, [0.0] * samples, 16000)


def runs_of(name: str, scale: str, data: Path):
    """The runs with the first seed; made-up recordings, reviews and pictures below `data` stand for data on disk."""
    config = CONFIGS[name]
    overrides = []
    tasks = {point.get("task.name") for point in points(config, scale)}
    drawn = any(point.get("task.paper_split") == "source" for point in points(config, scale))
    # tasks that lie in one folder in one experiment and not in another one see no files of each other
    tmp_path = data / "-".join(sorted({*map(str, tasks), *["source"] * drawn}))
    tmp_path.mkdir(exist_ok=True)
    made_up = {"lra-text": ("aclImdb", ("pos", "neg"), "0_7.txt"), "lra-image": ("cifar10", CLASSES, "0001.png")}
    for task in tasks & set(made_up):
        above, classes, file = made_up[task]
        for folder in (tmp_path / above / split / each for split in ("train", "test") for each in classes):
            folder.mkdir(parents=True, exist_ok=True)
            if file.endswith(".png"):
                pytest.importorskip("PIL.Image").new("RGB", (32, 32)).save(folder / file)
            else:
                (folder / file).write_text("made up")
        overrides = [f"task.data={tmp_path}"]
    for task, size in (("lra-pathfinder", 32), ("lra-pathx", 128)):
        if task in tasks:
            level = tmp_path / f"pathfinder{size}" / LEVEL
            for folder in (level / "metadata", level / "imgs"):
                folder.mkdir(parents=True, exist_ok=True)
            # the splits are tenths of the pictures
            (level / "metadata" / "1.npy").write_text("imgs sample_0.png 0 1\n" * 10)
            pytest.importorskip("PIL.Image").new("L", (size, size)).save(level / "imgs" / "sample_0.png")
            overrides = [f"task.data={tmp_path}"]
    if "lra-retrieval" in tasks:
        for part in ("train", "eval", "test"):
            (tmp_path / f"new_aan_pairs.{part}.tsv").write_text("1.0\t1\t2\tmade up\tmade up\n")
        overrides = [f"task.data={tmp_path}"]
    if "speech-commands" in tasks:
        for word in ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"):
            # the source's split needs a clip of every word in each part
            for speaker in range(8):
                record(tmp_path / word / f"{speaker:08x}_nohash_0.wav")
        (tmp_path / "split_test.txt").write_text("".join(f"{w}/00000000_nohash_0.wav\n" for w in ("yes", "no")))
        overrides = [f"task.data={tmp_path}"]
    if "youtubemix" in tasks and max(point["task.length"] for point in points(config, scale)) > 2**15:
        # a grid of longer pieces is planned without them
        tasks -= {"youtubemix"}
    if tasks & {"sc09", "youtubemix"}:
        for word in DIGITS if "sc09" in tasks else ():
            for speaker in range(9):
                record(tmp_path / word / f"{speaker:08x}_nohash_0.wav")
        (tmp_path / "testing_list.txt").write_text("".join(f"{word}/00000000_nohash_0.wav\n" for word in DIGITS))
        if "youtubemix" in tasks:
            record(tmp_path / "piece.wav", 16000 * 40)
        overrides = [f"task.data={tmp_path}"]
    if "species" in tasks and not any(point.get("task.group") == "great-apes" for point in points(config, scale)):
        for species in ("human", "galago", "mouse", "cow", "dog"):
            (tmp_path / f"{species}.region.fa").write_text(">region\n" + "ACGT" * 50_000 + "\n")
        overrides = [f"task.data={tmp_path}"]
    # runs of other seeds differ in nothing else
    seeds = seeds_of(config, scale)[:1]
    return config, expand(name, config, RESOLVER, scale=scale, overrides=overrides, seeds=seeds)


@pytest.fixture(scope="module")
def resolved_runs(tmp_path_factory):
    """Gives the configuration of an experiment and the resolved runs of one scale as {run id: resolved}."""
    data = tmp_path_factory.mktemp("data")

    def get(name: str, scale: str) -> tuple[Any, dict[str, dict[str, Any]]]:
        config, runs = runs_of(name, scale, data)
        resolved = {run.run_id: run.resolved for run in runs}
        # a run that is trained first for others need not be in the table
        grid = points(config, scale)
        for base in {run.base.run_id for run in runs if getattr(run, "base", None)}:
            if not any(all(same(v, lookup(resolved[base], key)) for key, v in point.items()) for point in grid):
                del resolved[base]
        return config, resolved

    return get


def setting(resolved, free):
    """Settings that the runs of a cell must share, as text: all but the seed and the keys `free`."""
    chosen = {section: dict(values) for section, values in resolved.items() if isinstance(values, dict)}
    if start := chosen.get("train", {}).get("init_from"):
        # the id of the run that is trained first depends on its seed
        chosen["train"]["init_from"] = {key: value for key, value in start.items() if key != "base"}
    for section, _, key in (dotted.partition(".") for dotted in free):
        chosen[section].pop(key, None)
    return json.dumps(chosen, sort_keys=True)


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.baseline])
def test_every_run_stands_in_the_table_and_every_cell_has_runs_of_one_setting(name, resolved_runs):
    filled, table = {}, table_of(name)
    for scale in config_scales(name):
        config, runs = resolved_runs(name, scale)
        is_point = GridPoints(points(config, scale))
        for run_id, settings in runs.items():
            assert is_point(settings), f"{scale}: {run_id}: a report would leave this run out"
        filled[scale] = assert_every_run_has_a_cell(scale, table, config, runs)
    if "paper" in filled:
        # a column may belong to a reduced scale alone, where the sizes of a figure are smaller there
        scales = {next(iter(filled)), *(CONFIGS[name].cannot_run and CONFIGS[name].runnable)}
        cells = {(row, column) for row in table.rows for column in table.columns}
        assert cells == set().union(*(filled[scale] for scale in scales)), "cells that select nothing"


def assert_every_run_has_a_cell(scale, table, config, runs):
    """Returns the cells, as (row, column), that have runs."""
    placed, filled = set(), set()
    free = (*(config.select.best_of if config.select else ()), *table.mean_over)
    texts = {run_id: setting(resolved, free) for run_id, resolved in runs.items()}
    column_keys = {key for selector in table.columns.values() for key in selector}
    for row, row_selector in table.rows.items():
        # a column may state another value for a key of the row; the rest of the row holds in all its cells
        in_all_cells = {key: value for key, value in row_selector.items() if key not in column_keys}
        candidates = {run_id: run for run_id, run in runs.items() if matches(in_all_cells, run)}
        for column, column_selector in table.columns.items():
            selector = {**row_selector, **column_selector}
            found = {run_id for run_id, resolved in candidates.items() if matches(selector, resolved)}
            filled |= {(row, column)} if found else set()
            if "speedup_over" in column_selector:
                continue
            placed |= found
            settings = {texts[run_id] for run_id in found}
            assert len(settings) <= 1, f"{scale}: {row} / {column} would average different settings"
    assert placed == set(runs), f"{scale}: runs that no cell of the table shows"
    return filled


def config_scales(name: str):
    return CONFIGS[name].scales


def table_of(name: str):
    """The table of an experiment; that of expected.csv where no scale can run."""
    return make_plan(CONFIGS[name], EXPERIMENTS[name].parent, next(iter(config_scales(name)))).spec


@every
def test_published_numbers_are_tidy_have_the_labels_of_the_table_and_name_their_source(name):
    config, table, path = CONFIGS[name], table_of(name), EXPERIMENTS[name].parent / "expected.csv"
    published = read_expected(path)
    assert published or config.baseline, "an experiment without runs lists what the paper prints"
    if published and config.baseline:
        cells = {(row, column) for row in table.rows for column in table.columns}
        assert cells <= set(published)
        units = {column: {p.unit for (_, c), p in published.items() if c == column} for column in table.columns}
        assert all(found == {"%"} if table.percent else len(found) == 1 for found in units.values())
    if not path.exists():
        return
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        lines = list(reader)
    assert reader.fieldnames in (COLUMNS, [*COLUMNS, "follows"])
    assert len({(line["row"], line["column"]) for line in lines}) == len(lines)
    for line in lines:
        assert line["source"]
        assert line["value"] or line["note"], f"{line['row']} / {line['column']}: no number and no reason"
        assert not line["value"] or float(line["value"]) >= 0
        assert line["unit"] != "%" or not line["value"] or float(line["value"]) <= 100


@pytest.mark.parametrize("name", [name for name, path in EXPERIMENTS.items() if (path.parent / "claims.csv").exists()])
def test_claims_refer_to_cells_name_their_source_and_hold_for_the_papers_own_numbers(name):
    lines, table = read_claims(EXPERIMENTS[name].parent / "claims.csv"), table_of(name)
    assert lines
    assert all(line["claim"] and line["source"] for line in lines)
    published = read_expected(EXPERIMENTS[name].parent / "expected.csv")
    empty = [Cell(row, column, value) for (row, column), value in published.items()]
    assert {claim.verdict for claim in check_claims(lines, empty, table)} == {"not run"}
    # a claim that the paper's own table refutes was copied wrongly
    cells = [Cell(row, column, mean=value.value) for (row, column), value in published.items()]
    claims = check_claims(lines, cells, table)
    assert [claim.text for claim in claims if claim.verdict == "fails"] == []
    # a claim of the text may be about something that the paper shows and does not put in numbers
    silent = any(value.note.startswith("not_reported") for value in published.values())
    if published and claims and not silent:
        assert {claim.verdict for claim in claims} == {"holds"}


@every
def test_a_report_of_nothing_says_so_in_every_format(name):
    config = CONFIGS[name]
    report = build(config, EXPERIMENTS[name].parent, pd.DataFrame(columns=SCHEMA.names))
    assert report.experiment == name
    asked = sum(cell.planned > 0 for cell in report.cells)
    assert any(line.startswith(f"— not run: {asked} of {asked} cells") for line in report.notes)
    for format in ("terminal", "md", "latex", "html"):
        assert config.title.split(",")[0] in str(render(report, format))


@every
def test_the_readme_says_what_was_chosen_how_to_run_it_and_what_it_costs(name):
    text = (EXPERIMENTS[name].parent / "README.md").read_text()
    assert f"run_suite.py run {name}" in text
    assert f"run_suite.py report {name}" in text
    for heading in ("## What", "## Choices", "## Cost"):
        assert heading in text
    for scale in config_scales(name):
        assert f"`{scale}`" in text
    # a path of a machine means nothing to a reader
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp)/", text)
