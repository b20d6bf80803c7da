"""A report selects the stored runs that it shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from subquad.reports.render import build, render
from subquad.reports.render.finding import words_of
from subquad.reports.render.plan import matches, slice_part
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import same
from subquad.suite.settings.report_spec import Select
from tests.reports.made import (
    CLAIMS,
    EXPECTED,
    GRID,
    SELECT,
    cell,
    grid,
    make_run,
    note,
    swept,
    three,
)
from tests.stored import frame_of


def test_a_run_cut_off_before_its_last_row_counts_as_failed(make):
    rows = [row for row in make_run() if row["metric"] != "run"]
    assert cell(make(rows), "H3", "AR").failures == (("failed", 1),)


def test_paper_scale_is_preferred_and_another_shown_on_demand(make):
    runs = [*three(scale="small", values=(0.5, 0.5, 0.5)), *three()]
    assert cell(make(*runs), "H3", "AR").mean == pytest.approx(99.8)
    assert cell(make(*runs, scale="small"), "H3", "AR").mean == pytest.approx(50.0)
    with pytest.raises(ValueError, match=r"unknown scale 'smal'.*small"):
        make(*runs, scale="smal")


def test_real_data_go_before_stand_ins(make):
    later = {"started_at": "2027-01-01T00:00:00+00:00"}
    sample = three(stand_in="sample", values=(0.1, 0.1, 0.1), columns=later, train={"batch_size": 7})
    found = cell(make(*sample, *three()), "H3", "AR")
    assert found.mean == pytest.approx(99.8)
    assert found.marks == ()


def test_runs_that_are_no_point_of_the_grid_are_left_out_and_named(make):
    report = make(*three(), make_run(seed=3, test=0.1, train={"epochs": 1}))
    assert cell(report, "H3", "AR").num_seeds == 3
    assert note(report, "left out") == ("left out: 1 run with train.epochs: 1, which no point of this grid has")
    command = "the same command with --scale paper --by model.name --by train.epochs"
    assert note(report, "all of these runs") == f"all of these runs: {command}"


def test_settings_are_never_averaged_the_newest_is_shown(make):
    later = {"started_at": "2027-01-01T00:00:00+00:00"}
    report = make(*three(values=(0.2, 0.2, 0.2)), *three(columns=later, train={"clip": 1.0}))
    assert cell(report, "H3", "AR").mean == pytest.approx(99.8)
    assert note(report, "left out") == "left out: 3 runs with another setting than the runs that their cell shows"
    assert note(report, "all of these runs").endswith("--by model.name --by train.clip")


def test_runs_that_trained_for_a_time_are_never_averaged_over_devices(make):
    """Nor chosen from two devices; those of the newest run's device are shown."""
    train = {"budget": {"seconds": 180.0}}
    later = {"started_at": "2027-01-01T00:00:00+00:00", "device": "NVIDIA H200"}
    ours = three(values=(0.998, 0.998, 0.998), columns=later, train=train)
    others = [make_run(seed=seed, test=0.2, train=train, columns={"device": "CPU"}) for seed in (3, 4)]
    report = make(*ours, *others)
    assert cell(report, "H3", "AR").mean == pytest.approx(99.8)
    assert cell(report, "H3", "AR").num_seeds == 3
    assert note(report, "left out") == "left out: 2 runs on another device than that of the newest run"
    assert note(report, "each run") == "each run trained for 180 s, so the values hold for NVIDIA H200 alone"
    assert words_of(report).note.startswith(
        "3 seeds in each cell. Each run trained for 180 s. Not run: S4D. Measured on NVIDIA H200."
    )


def test_the_newest_setting_is_that_of_the_newest_run(make):
    """Its other runs may be older than those of the setting that is left out."""

    def run(seed, year, test, **train):
        return make_run(seed=seed, test=test, columns={"started_at": f"{year}-01-01T00:00:00+00:00"}, train=train)

    old, newest = run(0, 2026, 0.9), run(1, 2028, 0.9)
    between = run(0, 2027, 0.2, clip=1.0), run(1, 2027, 0.2, clip=1.0)
    assert cell(make(old, *between, newest), "H3", "AR").values == pytest.approx((90.0, 90.0))


def test_runs_that_the_grid_has_go_before_newer_ones_with_another_setting(make, tmp_path):
    later = {"started_at": "2027-01-01T00:00:00+00:00"}
    frame = frame_of(*three(), *three(values=(0.2, 0.2, 0.2), columns=later, train={"clip": 1.0}))
    make()
    ours = json.loads(frame[frame["started_at"] < "2027"]["config"].iloc[0])
    asked = []

    def planned(scale):
        asked.append(scale)
        # the data need not be here, and any seed stands for all
        return [{**ours, "data": "missing", "seed": 7}]

    report = build(grid(), tmp_path / "reports" / "demo" / "table2", frame, planned=planned)
    assert cell(report, "H3", "AR").mean == pytest.approx(99.8)
    assert asked == ["paper"]


def test_the_best_value_is_chosen_on_validation_and_not_on_test(make):
    report = make(
        *three(values=(0.90, 0.90, 0.90), valid={50: 0.2, 100: 0.8}, train={"lr": 1e-3}),
        *three(values=(0.99, 0.99, 0.99), valid={50: 0.9, 100: 0.7}, train={"lr": 1e-4}),
        config=swept(),
    )
    found = cell(report, "H3", "AR")
    assert found.mean == pytest.approx(90.0)
    assert found.chosen == "train.lr=0.001 (best of 2)"
    assert (
        note(report, "*")
        == "* best by accuracy on valid, mean over seeds, ties by loss: train.lr=0.001 (best of 2): H3 / AR"
    )


def test_a_cell_says_of_how_many_values_it_is_the_best(make):
    report = make(*three(values=(0.9, 0.9, 0.9), valid={100: 0.8}, train={"lr": 1e-3}), config=swept())
    assert cell(report, "H3", "AR").chosen == "train.lr=0.001 (best of 1 of 2)"
    # a caption that calls it the best of up to one value would praise no choice
    assert "Best" not in words_of(report).note


def test_where_the_grid_has_one_value_no_mark_says_that_a_cell_is_the_best_of_several(make):
    report = make(*three(valid={100: 0.8}), config=grid(select=SELECT))
    found = cell(report, "H3", "AR")
    assert (found.mean, found.chosen) == (pytest.approx(99.8), "")
    assert "*" not in found.marks
    assert note(report, "*") == ""


@pytest.mark.parametrize(("enough", "compared"), [(None, "1 of 2"), (0.9, "1")])
def test_a_value_with_fewer_seeds_is_not_chosen(make, enough, compared):
    whole = three(values=(0.8, 0.8, 0.8), valid={100: 0.9}, train={"lr": 1e-3})
    given_up = make_run(seed=0, test=0.99, valid={100: 0.99}, train={"lr": 1e-4})
    config = swept().model_copy(update={"select": Select(best_of=("train.lr",), enough=enough)})
    found = cell(make(*whole, given_up, config=config), "H3", "AR")
    assert (found.mean, found.chosen) == (pytest.approx(80.0), f"train.lr=0.001 (best of {compared})")


def test_seeds_beyond_those_of_the_grid_make_no_other_value_incomplete(make):
    more = [make_run(seed=seed, test=0.8, valid={100: 0.8}, train={"lr": 1e-3}) for seed in range(5)]
    better = three(values=(0.9, 0.9, 0.9), valid={100: 0.9}, train={"lr": 1e-4})
    assert cell(make(*more, *better, config=swept()), "H3", "AR").chosen == "train.lr=0.0001 (best of 2)"


RATES = ([1e-3, 1e-4], [1e-4, 1e-3])


def swept_in(rates: list[float], **select: Any) -> ExperimentConfig:
    values = yaml.safe_load(GRID)
    return grid(sweep={**values["sweep"], "train.lr": rates}, select={**SELECT, **select})


@pytest.mark.parametrize("better", [1e-3, 1e-4])
def test_of_equal_values_the_one_with_the_smaller_validation_loss_is_chosen(make, better):
    # equal means of other seeds, whose plain sums differ in the last bit
    accuracies = {1e-3: (0.1, 0.2, 0.3), 1e-4: (0.3, 0.2, 0.1)}
    runs = [
        make_run(
            seed=seed,
            test=0.9 if lr == better else 0.5,
            valid={50: 1.0, 100: accuracy},
            loss={50: 0.0 if lr != better else 9.0, 100: (0.2 if lr == better else 0.3) - 0.1 * seed},
            train={"lr": lr},
        )
        for lr in RATES[0]
        for seed, accuracy in enumerate(accuracies[lr])
    ]
    found = cell(make(*runs, config=swept()), "H3", "AR")
    assert found.mean == pytest.approx(90.0)
    assert found.chosen == f"train.lr={better} (best of 2)"


def test_the_loss_of_a_tie_is_that_of_the_weights_the_run_kept(make):
    runs = [
        make_run(test=0.9, valid={50: 0.8, 75: 0.8, 100: 0.7}, loss={50: 0.1, 75: 9, 100: 9}, train={"lr": 1e-4}),
        make_run(test=0.5, valid={50: 0.7, 100: 0.8}, loss={50: 0.0, 100: 0.2}, train={"lr": 1e-3}),
    ]
    kept = [[{**row, "config": row["config"].replace('"last"', '"best"')} for row in rows] for rows in runs]
    assert cell(make(*kept, config=swept()), "H3", "AR").mean == pytest.approx(90.0)


def test_a_smaller_loss_does_not_outweigh_a_better_value(make):
    runs = [
        make_run(test=0.9, valid={100: 0.81}, loss={100: 0.3}, train={"lr": 1e-4}),
        make_run(test=0.5, valid={100: 0.80}, loss={100: 0.2}, train={"lr": 1e-3}),
    ]
    assert cell(make(*runs, config=swept()), "H3", "AR").mean == pytest.approx(90.0)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_without_a_loss_the_first_of_equal_values_in_the_grid_is_chosen(make, rates, names):
    # a loss that only the second value has decides nothing
    runs = [
        make_run(
            test=test,
            valid={100: 1.0},
            loss=loss,
            train={"lr": lr},
            columns={"run_id": f"h3-associative-recall-{name}"},
        )
        for lr, test, loss, name in zip(rates, (0.9, 0.5), (None, {100: 0.1}), names, strict=True)
    ]
    found = cell(make(*runs, config=swept_in(rates)), "H3", "AR")
    assert found.mean == pytest.approx(90.0)
    assert found.chosen == f"train.lr={rates[0]} (best of 2)"


@pytest.mark.parametrize("rates", RATES)
def test_a_value_that_run_may_skip_changes_no_choice(make, rates):
    config = swept_in(rates, enough=0.9)
    good = make_run(test=0.9, valid={100: 0.95}, loss={100: 0.2}, train={"lr": rates[0]})
    better = make_run(test=0.5, valid={100: 1.0}, loss={100: 0.1}, train={"lr": rates[1]})
    assert cell(make(good, config=config), "H3", "AR").mean == pytest.approx(90.0)
    report = make(better, config=config)
    assert cell(report, "H3", "AR").mean == pytest.approx(90.0)
    assert note(report, "*").startswith(
        "* first with 0.9 in every seed, else best by accuracy on valid, mean over seeds, ties by loss: "
    )


@pytest.mark.parametrize("rates", RATES)
def test_a_good_value_is_not_called_the_first_while_runs_of_an_earlier_one_are_missing(make, rates):
    config = swept_in(rates, enough=0.9)
    first, later = (three(values=(0.9, 0.9, 0.9), valid={100: 0.95}, train={"lr": lr}) for lr in rates)
    for found in (later, first[:2]):
        # two seeds of three are not all of them
        assert cell(make(*found, config=config), "H3", "AR").chosen == f"train.lr={rates[1]} (best of 1 of 2)"
    assert cell(make(*first, config=config), "H3", "AR").chosen == f"train.lr={rates[0]} (best of 2)"


def test_a_good_value_after_one_that_is_not_is_the_first(make):
    config = swept_in([1e-3, 1e-4, 1e-5], enough=0.9)
    bad, good = (make_run(valid={100: valid}, train={"lr": lr}) for lr, valid in ((1e-3, 0.8), (1e-4, 0.95)))
    assert cell(make(bad, good, config=config), "H3", "AR").chosen == "train.lr=0.0001 (best of 2)"


ON_TEST = {"task_options": {"split_policy": "paper"}}


@pytest.mark.parametrize(
    ("split", "options", "mark"),
    [("valid", {}, "*"), ("valid", ON_TEST, "‖"), ("test", {}, "‖"), ("train", ON_TEST, "*")],
)
def test_a_setting_that_was_chosen_on_the_test_rows_is_marked(make, split, options, mark):
    by = "loss" if split == "train" else "accuracy"
    config = grid(sweep={**grid().sweep, "train.lr": [1e-3, 1e-4]}, select={**SELECT, "by": by, "split": split})
    runs = [run for lr in (1e-3, 1e-4) for run in three(valid={100: 0.9}, train={"lr": lr}, **options)]
    runs = [[{**run[0], "metric": "loss", "unit": "nats", "split": "train"}, *run] for run in runs]
    marks = cell(make(*runs, config=config), "H3", "AR").marks
    assert [found for found in marks if found in "*‖"] == [mark]


@pytest.mark.parametrize(
    ("keep", "options", "marks", "last"),
    [("best", ON_TEST, ("◊",), 50.0), ("best", {}, (), None), ("last", ON_TEST, (), None)],
)
def test_the_best_epoch_of_the_test_rows_is_marked_and_the_last_one_stands_beside_it(make, keep, options, marks, last):
    report = make(*three(valid={50: 0.998, 100: 0.5}, train={"keep": keep}, **options))
    found = cell(report, "H3", "AR")
    assert (found.marks, found.last) == (marks, last)
    lines = [line for line in render(report, "md").splitlines() if line.startswith("| H3 ")]
    assert any("last epoch" in line and "50.0" in line for line in lines) == bool(marks)


def test_a_column_of_the_last_evaluation_has_no_best_epoch(make):
    columns = {"AR": {"task.name": "associative-recall", "split": "valid"}}
    config = grid(table={**yaml.safe_load(GRID)["table"], "columns": columns})
    runs = three(valid={50: 0.998, 100: 0.5}, train={"keep": "best"}, **ON_TEST)
    claims = "claim,left,comparison,right,source\n"
    assert cell(make(*runs, config=config, claims=claims), "H3", "AR").marks == ()


@pytest.mark.parametrize(
    ("rates", "scores", "at_edge"),
    [
        ([1e-4, 1e-3, 1e-2], (0.5, 0.9, 0.5), False),
        ([1e-4, 1e-3, 1e-2], (0.9, 0.5, 0.5), True),
        ([1e-4, 1e-3, 1e-2], (0.5, 0.5, 0.9), True),
        ([1e-2, 1e-4, 1e-3], (0.5, 0.5, 0.9), False),  # the order of the grid says nothing
        ([0.0, 0.1, 0.2], (0.9, 0.5, 0.5), False),  # nothing lies below zero
        ([1e-4, 1e-3, 1e-2], (0.5, 0.9, None), True),  # the larger one has not been tried
        ([1e-3], (0.9,), False),
        (["sgd", "adam"], (0.9, 0.5), False),
    ],
)
def test_a_value_at_the_edge_of_those_tried_is_marked(make, rates, scores, at_edge):
    config = grid(sweep={**grid().sweep, "train.lr": rates}, select=SELECT)
    runs = [
        run
        for lr, score in zip(rates, scores, strict=True)
        for run in (() if score is None else three(valid={100: score}, train={"lr": lr}))
    ]
    assert ("⌉" in cell(make(*runs, config=config), "H3", "AR").marks) == at_edge


def test_a_value_that_is_good_enough_needs_no_neighbour(make):
    config = grid(sweep={**grid().sweep, "train.lr": [1e-3, 1e-4]}, select={**SELECT, "enough": 0.9})
    runs = [run for lr in (1e-3, 1e-4) for run in three(valid={100: 0.95}, train={"lr": lr})]
    assert cell(make(*runs, config=config), "H3", "AR").marks == ("*",)


def test_selection_looks_at_the_weights_the_run_kept(make):
    kept = {"keep": "best"}
    report = make(
        *three(values=(0.90, 0.90, 0.90), valid={50: 0.2, 100: 0.8}, train={"lr": 1e-3, **kept}),
        *three(values=(0.99, 0.99, 0.99), valid={50: 0.9, 100: 0.7}, train={"lr": 1e-4, **kept}),
        config=swept(),
    )
    assert cell(report, "H3", "AR").mean == pytest.approx(99.0)


def test_selection_takes_the_mean_over_seeds_and_shuns_failures(make):
    lucky = [
        make_run(seed=0, test=0.5, valid={100: 0.99}, train={"lr": 1e-3}),
        make_run(seed=1, status="diverged", train={"lr": 1e-3}),
        make_run(seed=2, status="diverged", train={"lr": 1e-3}),
    ]
    steady = three(values=(0.8, 0.8, 0.8), valid={100: 0.8}, train={"lr": 1e-4})
    found = cell(make(*lucky, *steady, config=swept()), "H3", "AR")
    assert found.mean == pytest.approx(80.0)
    assert found.failures == ()


def test_selection_is_by_the_mean_and_not_by_the_best_the_median_or_the_worst_seed(make):
    # the first value has the best seed and the best median, the second the best of the worst seeds
    values = {1e-3: (0.9, 0.9, 0.0), 1e-4: (0.7, 0.7, 0.7), 1e-5: (0.8, 0.8, 0.6)}
    runs = [
        make_run(seed=seed, valid={100: valid}, train={"lr": lr})
        for lr, seeds in values.items()
        for seed, valid in enumerate(seeds)
    ]
    assert cell(make(*runs, config=swept_in(list(values))), "H3", "AR").chosen == "train.lr=1e-05 (best of 3)"


def test_a_choice_by_what_no_run_has_is_an_error(make):
    runs = [make_run(test=test, train={"lr": lr}) for lr, test in ((1e-3, 0.1), (1e-4, 0.9))]
    # nothing has to be chosen yet
    assert cell(make(runs[0], config=swept()), "H3", "AR").mean == pytest.approx(10.0)
    with pytest.raises(ValueError, match=r"select\.by: no run has 'accuracy' on its rows of valid"):
        make(*runs, config=swept())
    with pytest.raises(ValueError, match="training rows have the loss alone, got 'accuracy'"):
        swept_in([1e-3], split="train")


def test_selection_by_a_loss_takes_the_lowest(make):
    def with_loss(lr: float, loss: float, accuracy: float) -> list[dict[str, Any]]:
        rows = make_run(test=accuracy, train={"lr": lr})
        return [{**rows[0], "metric": "loss", "unit": "nats", "value": loss, "split": "valid"}, *rows]

    config = swept()
    config = grid(sweep=config.sweep, select={**SELECT, "by": "loss"})
    report = make(with_loss(1e-3, 0.1, 0.7), with_loss(1e-4, 2.0, 0.9), config=config)
    assert cell(report, "H3", "AR").mean == pytest.approx(70.0)


def test_the_best_evaluation_has_the_highest_accuracy_or_the_lowest_loss(make):
    columns = {name: {"metric": name, "split": "valid", "at": "best"} for name in ("accuracy", "loss")}
    config = grid(table={"rows": {"H3": {"model.name": "h3"}}, "columns": columns}, figure=None)
    run = make_run(valid={50: 0.5, 75: 0.9, 100: 0.7}, loss={50: 2.0, 75: 1.0, 100: 3.0})
    report = make(run, config=config, expected=EXPECTED.splitlines()[0], claims=CLAIMS.splitlines()[0])
    assert [cell(report, "H3", name).mean for name in columns] == pytest.approx([90.0, 1.0])


@pytest.mark.parametrize(("keep", "chosen"), [("best", (50, -2.0)), ("last", None)])
def test_a_run_whose_last_evaluation_is_no_number_is_not_selected_by_an_earlier_one(keep, chosen):
    """Unless it has kept the weights of that one."""
    select = Select(best_of=("train.lr",), by="loss")
    assert select.evaluation([(50, 2.0), (100, None)], keep) == chosen


def test_values_of_a_grid_meet_values_of_a_resolved_run():
    assert same(1, 1.0)
    assert same("1e-3", 0.001)
    assert same([1, 2], (1, 2))
    assert same({"length": 64}, {"length": 64, "num_examples": 3})
    assert not same(True, 1)
    assert not same(1, True)
    assert not same("paper", None)
    assert not same([1], [1, 2])
    assert matches({"model.name": "h3", "slice": "length=64"}, {"model": {"name": "h3"}})
    assert not matches({"model.name": "h3", "model.inner": "s6"}, {"model": {"name": "h3"}})
    assert slice_part("length=512,num_kv_pairs=64", "num_kv_pairs") == 64
    assert slice_part("", "length") is None


def test_a_run_that_two_scales_have_is_one_seed_at_each(make):
    def both(run, scale):
        return [{**row, "scale": scale} for row in run]

    runs = [both(run, scale) for run in three() for scale in ("paper", "small")]
    for scale in ("paper", "small"):
        assert cell(make(*runs, config=grid(scales={"paper": {}, "small": {}}), scale=scale), "H3", "AR").num_seeds == 3
