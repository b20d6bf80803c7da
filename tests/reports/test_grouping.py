"""Stored runs by any of their settings."""

import itertools

import pandas as pd
import pytest

from subquad.reports.render import grouped, render
from subquad.suite.store.storage import SCHEMA
from tests.reports.made import grid, make_run


def frame(*runs):
    rows = pd.DataFrame(list(itertools.chain(*runs)))
    return rows.reindex(columns=SCHEMA.names).astype({"samples": object}).where(lambda f: f.notna(), None)


def at(lr, seed, test, **options):
    return make_run(seed=seed, test=test, train={"lr": lr}, **options)


RUNS = (at(1e-3, 0, 0.90), at(1e-3, 1, 0.80), at(5e-4, 0, 0.5), at(1e-2, 0, None, status="diverged"))


def lines(tmp_path, *keys, runs=RUNS):
    document = grouped(grid(), tmp_path, "demo/table2", frame(*runs), keys, None)
    return document, [list(line) for line in document.grids[0].lines]


def test_a_line_for_each_value_in_ascending_order_on_the_grid_or_not(tmp_path):
    document, found = lines(tmp_path, "train.lr")
    assert document.grids[0].header == ("train.lr", "IH", "AR", "runs", "failed")
    assert found == [
        ["0.0005", "—", "50.0", "1", "0"],
        ["0.001", "—", "85.0 ± 7.1", "2", "0"],
        ["0.01", "—", "—", "1", "1"],
    ]
    assert "train.lr" in render(document, "terminal")


def test_other_settings_that_differ_within_a_line_are_named(tmp_path):
    document, found = lines(tmp_path, "model.name")
    assert found == [["h3", "—", "73.3 ± 20.8", "4", "1"]]
    assert any("also differ in: train.lr;" in note for note in document.notes)
    assert not any("also differ" in note for note in lines(tmp_path, "model.name", "train.lr")[0].notes)


def test_a_key_that_no_run_has_is_an_error(tmp_path):
    with pytest.raises(
        ValueError, match=r"--by train\.l: no stored run of demo/table2 has it \(did you mean 'train\.lr'"
    ):
        lines(tmp_path, "train.l")
