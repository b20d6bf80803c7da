"""A grid that chooses the best of several values does not try those after the first one that is good enough."""

import pytest
import torch

from subquad.suite.executors.contract import Settings
from subquad.suite.executors.local import run_all
from subquad.suite.settings.report_spec import Select
from subquad.suite.store.enough import Enough
from subquad.suite.store.status import standings, summary
from tests.stored import store
from tests.suite.test_workers import Recording
from tests.suite.toy import make_run

CPU = torch.device("cpu")
RATES = (0.01, 0.003, 0.001)
DROPOUTS = (0.1, 0.2)


def select(enough, **options):
    return Select(best_of=("train.lr",), enough=enough, **options)


def runs_of(seeds=(0,)):
    """Two settings, each at three rates, in the order of a grid."""
    return [
        make_run(model={"dropout": dropout}, train={"lr": lr}, seed=seed)
        for dropout in DROPOUTS
        for lr in RATES
        for seed in seeds
    ]


def keep(run, root, value, metric="accuracy", status="ok"):
    """The rows of a run with one number of the validation split, after another one that was lower."""
    rows = [
        {"metric": metric, "split": "valid", "slice": "", "step": 1, "value": 0.0},
        {"metric": metric, "split": "valid", "slice": "", "step": 2, "value": value},
        {"metric": metric, "split": "valid", "slice": "length=6", "step": 3, "value": 0.0},
        {"metric": "run", "status": status},
    ]
    store(root, rows, run.resolved, experiment=run.experiment, scale=run.scale)


def enough_of(runs, root, chosen):
    return Enough(runs, root, {runs[0].experiment: chosen})


def test_the_other_values_of_a_good_setting_are_not_run(tmp_path):
    runs, display = runs_of(), Recording()
    enough = enough_of(runs, tmp_path, select(0.0))
    ended = run_all(enough.in_order(runs), tmp_path, CPU, display, Settings(enough=enough))
    assert len(ended) == len(display.ended) == 6
    done = {finished.run.run_id for finished in ended if finished.status == "ok"}
    # the first rate of each setting
    assert done == {runs[0].run_id, runs[3].run_id}
    assert {finished.status for finished in ended if finished.run.run_id not in done} == {"unneeded"}
    assert len(list(tmp_path.rglob("*.parquet"))) == 2
    assert summary(standings(runs, tmp_path, select(0.0))) == "2 ok, 4 unneeded"
    assert summary(standings(runs, tmp_path, select(1.0))) == "2 ok, 4 to do"
    assert summary(standings(runs, tmp_path)) == "2 ok, 4 to do"


def test_workers_side_by_side_spare_the_other_values_too(tmp_path):
    runs = runs_of()
    enough = enough_of(runs, tmp_path, select(0.0))
    ended = run_all(enough.in_order(runs), tmp_path, CPU, Recording(), Settings(enough=enough), jobs=2)
    done = {finished.run.run_id for finished in ended if finished.status == "ok"}
    assert {runs[0].run_id, runs[3].run_id} <= done
    # a worker without another run takes the second value of a setting whose first one still runs, and no third
    assert [finished.status for finished in ended].count("unneeded") == 6 - len(done) >= 3


def test_all_values_are_run_where_none_is_good_enough(tmp_path):
    runs = runs_of()
    enough = enough_of(runs, tmp_path, select(1.0))
    ended = run_all(enough.in_order(runs), tmp_path, CPU, Recording(), Settings(enough=enough))
    assert [finished.status for finished in ended] == ["ok"] * 6


def test_every_setting_tries_its_first_value_first(tmp_path):
    runs = runs_of(seeds=(0, 1))
    ordered = enough_of(runs, tmp_path, select(0.9)).in_order(runs)
    assert [run.resolved["train"]["lr"] for run in ordered] == [rate for rate in RATES for _ in range(4)]
    assert enough_of(runs, tmp_path, None).in_order(runs) == runs


def test_a_value_is_good_enough_with_all_its_seeds_only(tmp_path):
    runs = runs_of(seeds=(0, 1))
    enough = enough_of(runs, tmp_path, select(0.9))
    keep(runs[0], tmp_path, 0.95)
    assert not enough.why_not(runs[2])
    keep(runs[1], tmp_path, 0.85)
    assert not enough.why_not(runs[2])
    keep(runs[1], tmp_path, 0.9)
    assert enough.why_not(runs[2]) == f"run {runs[0].run_id[:6]} of this setting reached accuracy 0.9"
    assert not enough.why_not(runs[0]), "its own rows are there"
    assert not enough.why_not(runs[-1]), "another setting"


def test_a_later_value_does_not_spare_an_earlier_one(tmp_path):
    runs = runs_of()
    enough = enough_of(runs, tmp_path, select(0.9))
    # the second rate, carried out first (`--only`, or by another worker)
    keep(runs[1], tmp_path, 0.95)
    assert not enough.why_not(runs[0])
    assert enough.why_not(runs[2]) == f"run {runs[1].run_id[:6]} of this setting reached accuracy 0.9"
    alone = enough.of(runs[0], tmp_path)
    assert alone is not None
    assert not alone.why_not(runs[0])
    assert summary(standings(runs, tmp_path, select(0.9))) == "1 ok, 4 to do, 1 unneeded"


def test_a_run_that_ended_with_an_error_is_not_good_enough(tmp_path):
    runs = runs_of()
    keep(runs[0], tmp_path, 1.0, status="diverged")
    assert not enough_of(runs, tmp_path, select(0.9)).why_not(runs[1])


def test_of_a_loss_the_smaller_value_is_good_enough(tmp_path):
    runs = runs_of()
    keep(runs[0], tmp_path, 0.3, metric="loss")
    assert enough_of(runs, tmp_path, select(0.3, by="loss")).why_not(runs[1])
    assert not enough_of(runs, tmp_path, select(0.2, by="loss")).why_not(runs[1])


GRID = """
title: rates
baseline:
  task: {name: induction-heads, length: 16, vocab_size: 8, num_train: 64, num_test: 32}
  model: {name: linear-attention, d_model: 8, num_layers: 1, num_heads: 1}
  train: {steps: 4, batch_size: 16, eval_every: 2}
sweep: {train.lr: [1.0e-2, 1.0e-3, 1.0e-4]}
seeds: [0, 1]
scales: {small: {}}
select: {best_of: [train.lr], enough: 0.0}
table: {rows: {ours: {}}, columns: {accuracy: {}}}
"""


def test_the_command_line_says_what_is_not_needed(command_line, tmp_path):
    (tmp_path / "grid.yaml").write_text(GRID)
    asked = (tmp_path, "--results", tmp_path / "results")
    done = command_line("run", *asked, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "done: 2 runs, 4 not needed" in done.stdout
    assert "6 runs, 0 to do, 4 not needed" in command_line("run", *asked, "--dry-run", "--device", "cpu").stdout
    assert "6 runs, 2 ok, 4 unneeded" in command_line("status", *asked).stdout
    again = command_line("run", *asked, "--device", "cpu")
    assert "2 of 6 runs are already stored" in again.stdout
    assert "and 4 are not needed" in again.stdout
    assert "train.lr=0.01 (best of 1)" in command_line("report", *asked, "--full").stdout
    # `--only` carries out a value that the grid would skip
    assert "done: 2 runs;" in command_line("run", *asked, "--only", "train.lr=1e-3", "--device", "cpu").stdout
    assert "6 runs, 6 to do" in command_line("run", *asked, "--force", "--dry-run", "--device", "cpu").stdout


@pytest.mark.slow
def test_the_shown_value_does_not_depend_on_which_ran_first(command_line, tmp_path):
    (tmp_path / "grid.yaml").write_text(GRID)
    asked = (tmp_path, "--results", tmp_path / "results")
    run = ("run", *asked, "--device", "cpu")
    assert "done: 2 runs;" in command_line(*run, "--only", "train.lr=1e-3").stdout
    # until the first value has run, the cell says that values are missing
    assert "train.lr=0.001 (best of 1 of 3)" in command_line("report", *asked, "--full").stdout
    assert "6 runs, 2 to do, 2 not needed" in command_line(*run, "--dry-run").stdout
    assert "done: 2 runs;" in command_line(*run).stdout
    assert "train.lr=0.01 (best of 2)" in command_line("report", *asked, "--full").stdout
