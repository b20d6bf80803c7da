"""A grid is parsed strictly, expanded in order, and every fault is one line that says where and what to do."""

import os
import re
from dataclasses import replace
from typing import ClassVar

import pytest

from subquad.models import MODELS
from subquad.suite.options import alternatives, parse, seeds_in
from subquad.suite.settings.config import ExperimentConfig, load_experiment
from subquad.suite.settings.grid import expand, lookup, refuse, same
from subquad.suite.training.config import TrainConfig
from tests.suite.toy import RESOLVER, ToyConfig, make_run

GRID = {
    "title": "toy",
    "baseline": {"task": {"name": "parity"}, "model": {"name": "toy"}, "train": {"epochs": 2}},
    "sweep": {"train.lr": [0.1, 0.01], "model": [{"model.d_model": 2}, {"model.d_model": 3, "train.epochs": 5}]},
    "seeds": (0, 1),
    "scales": {"paper": {}, "small": {"train.epochs": 1, "seeds": [7], "sweep": {"train.lr": [0.5]}}},
}


def grid(**changes):
    return ExperimentConfig(**{**GRID, **changes})


def runs(config=None, resolver=RESOLVER, **options):
    return expand("toy/test", config or grid(), resolver, **options)


def test_the_reason_why_a_scale_cannot_run_is_told_in_one_line():
    config = grid(cannot_run={"paper": "more data\n than there is "})
    with pytest.raises(ValueError, match=r"cannot run here: more data than there is; --scale small runs$"):
        refuse(config, "paper", "grid.yaml")


def test_a_grid_is_the_product_of_its_axes_and_seeds_in_order():
    found = [(run.train.lr, run.model.d_model, run.train.epochs, run.seed) for run in runs()]
    assert found == [(lr, d, epochs, seed) for lr in (0.1, 0.01) for d, epochs in ((2, 2), (3, 5)) for seed in (0, 1)]


def test_a_scale_overrides_values_and_narrows_axes_and_seeds():
    found = [(run.train.lr, run.model.d_model, run.train.epochs, run.seed) for run in runs(scale="small")]
    assert found == [(0.5, 2, 1, 7), (0.5, 3, 1, 7)]


def test_set_wins_over_everything_and_seeds_replace_the_grids():
    found = runs(scale="small", overrides=["train.lr=1e-3", "train.epochs=9"], seeds=(0, 1))
    assert {(run.train.lr, run.train.epochs) for run in found} == {(0.001, 9)}
    assert [run.seed for run in found] == [0, 1, 0, 1]


def test_a_part_of_a_value_is_set_by_its_key_and_the_other_parts_stay():
    """A plan prints such keys, so they can be given back."""
    train = {"epochs": 2, "early_stop": {"threshold": 0.9, "patience": 3}}
    config = grid(baseline={**GRID["baseline"], "train": train})
    found = runs(config, overrides=["train.early_stop.patience=1,2"], seeds=(0,))
    stops = [run.train.early_stop for run in found if run.train.lr == 0.1 and run.model.d_model == 2]
    assert [(stop.threshold, stop.patience) for stop in stops] == [(0.9, 1), (0.9, 2)]
    assert train["early_stop"]["patience"] == 3
    alone = runs(overrides=["train.early_stop.patience=4"], seeds=(0,))
    assert {run.train.early_stop.patience for run in alone} == {4}


def test_several_values_of_set_are_an_axis():
    found = runs(scale="small", overrides=["train.lr=1e-3,3e-3", "train.epochs=4,5"])
    assert [(run.train.lr, run.train.epochs) for run in found if run.model.d_model == 2] == [
        (0.001, 4),
        (0.001, 5),
        (0.003, 4),
        (0.003, 5),
    ]
    assert len(runs(overrides=["train.lr=1e-3,1e-3"], seeds=(0,))) == 2
    with pytest.raises(ValueError, match=r"^--set train.epochs=0: "):
        runs(overrides=["train.lr=1e-3,3e-3", "train.epochs=9,0"])
    with pytest.raises(ValueError, match=r"^--set: the values have more than 1,000,000 combinations"):
        runs(overrides=[f"train.{key}={','.join(map(str, range(1, 102)))}" for key in ("lr", "epochs", "clip")])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("k=1,2", ["k=1", "k=2"]),
        ("k=[1,2],[3]", ["k=[1,2]", "k=[3]"]),
        ("k={a: 1, b: 2}", ["k={a: 1, b: 2}"]),
        ('k="a,b",c', ['k="a,b"', "k=c"]),
        ("k=it's,b", ["k=it's", "k=b"]),
        ("k=", ["k="]),
        ("k", ["k"]),
    ],
)
def test_commas_outside_brackets_and_quotes_separate_values(text, parts):
    assert alternatives(text, "--set") == parts


def test_a_comma_without_a_value_is_refused_and_gives_no_null():
    for option in ("overrides", "only"):
        with pytest.raises(ValueError, match=r"^--\w+ 'train\.lr=1e-3,': a comma needs a value on both sides"):
            runs(**{option: ["train.lr=1e-3,"]})


def test_a_list_for_a_number_is_told_how_several_values_are_written():
    with pytest.raises(ValueError, match=r"leave out the brackets: train.lr=1e-3, 3e-3$"):
        runs(overrides=["train.lr=[1e-3, 3e-3]"])
    # a list that is wrong in itself is not
    with pytest.raises(ValueError, match=r"^--set train.lr=\[x, y\]: ((?!brackets).)*$"):
        runs(overrides=["train.lr=[x, y]"])


def test_a_pattern_of_set_stands_for_the_names_that_fit():
    entry = RESOLVER.models.entries["toy"]
    models = RESOLVER.models.extended({"toy-2": entry, "other": entry}, by="test")
    found = runs(resolver=replace(RESOLVER, models=models), overrides=["model.name=t*y,*-2"], seeds=(0,))
    assert {run.model_name for run in found} == {"toy", "toy-2"}
    with pytest.raises(ValueError, match=r"^--set model.name=x-\*: no model fits; there are: toy$"):
        runs(overrides=["model.name=x-*"])


def test_only_keeps_the_runs_that_have_the_value():
    assert {run.model.d_model for run in runs(only=["model.d_model=3", "train.lr=0.1"])} == {3}
    assert len(runs(only=["model.d_model=3", "model.d_model=2"])) == 8
    assert len(runs(only=["model.d_model=3,2"])) == 8
    assert len(runs(only=["model.name=t*", "task.name=p?rity,parity"])) == 8


def test_a_run_that_only_leaves_out_by_a_word_is_not_resolved():
    # the data and modules of a run that is left out need not be here
    sweep = {**GRID["sweep"], "train.schedule": ["constant", "missing"]}
    found = runs(grid(sweep=sweep), only=["train.schedule=constant"])
    assert {run.train.schedule for run in found} == {"constant"}
    with pytest.raises(ValueError, match="missing"):
        runs(grid(sweep=sweep))


@pytest.mark.parametrize(
    ("text", "wanted"), [("1", (0,)), ("3", (0, 1, 2)), ("3,7", (3, 7)), ("3,", (3,)), (" 4, 2 ", (4, 2))]
)
def test_seeds_are_a_number_or_a_list(text, wanted):
    assert seeds_in(text, "--seeds") == wanted


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "1,a", "1,1", ",", "1,,2", "1.5", "100001", f"1,{2**63}", "٣"])
def test_other_seeds_are_refused(text):
    with pytest.raises(ValueError, match=r"--seeds .*expected a number of seeds"):
        seeds_in(text, "--seeds")


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (
            {"baseline": {**GRID["baseline"], "train": {"epoch": 2}}},
            {},
            ["epoch: unknown key", "did you mean 'epochs'"],
        ),
        ({"baseline": {**GRID["baseline"], "task": {"name": "parrot"}}}, {}, ["unknown task 'parrot'", "'parity'"]),
        ({"baseline": {**GRID["baseline"], "model": {"name": "toys"}}}, {}, ["unknown model 'toys'", "'toy'"]),
        ({"baseline": {**GRID["baseline"], "model": {}}}, {}, ["model.name: missing", "toy"]),
        ({"baseline": {**GRID["baseline"], "trian": {}}}, {}, ["baseline.trian", "did you mean 'train'"]),
        (
            {"baseline": {**GRID["baseline"], "train": {"epochs": 1, "steps": 2}}},
            {},
            ["exactly one of steps, epochs and budget"],
        ),
        ({"baseline": {**GRID["baseline"], "train": {"epochs": 0}}}, {}, ["train: epochs", "got 0"]),
        ({"sweep": {"lr": [1]}}, {}, ["'lr'", "task, model, train"]),
        ({"sweep": {"model.d_model": [65]}}, {}, ["d_model=65 is above 64; lower it"]),
        ({}, {"scale": "papr"}, ["unknown scale 'papr'", "did you mean 'paper'"]),
        ({}, {"only": ["model.d_model=4"]}, ["toy/test: --only model.d_model=4", "2, 3"]),
        ({"sweep": {"train.lr": [16, 8, 0.5]}}, {"only": ["train.lr=1"]}, ["there are: 0.5, 8.0, 16.0"]),
        (
            {},
            {"overrides": ["train.lr=1e-3", "model.d_model=2", "train.lr = 1e-2"]},
            ["--set train.lr is given twice; for both values: --set train.lr=1e-3,1e-2"],
        ),
        ({}, {"only": ["model.name=toy,tyo"]}, ["--only model.name=tyo", "did you mean 'toy'"]),
        ({}, {"only": ["model.name=[toy]"]}, ["--only model.name=['toy']"]),
        ({}, {"only": ["nonsense"]}, ["--only 'nonsense'", "section.key=value"]),
        ({}, {"overrides": ["train.batchsize=3"]}, ["batchsize: unknown key", "batch_size"]),
        ({}, {"overrides": ["lr=3"]}, ["--set", "'lr'"]),
        ({}, {"overrides": ["model.name=7"]}, ["unknown model 7"]),
        ({}, {"overrides": ["model.name=[a]"]}, ["unknown model ['a']"]),
        ({}, {"overrides": ["train.betas=[2, 3]"]}, ["train: betas.0", "less than 1"]),
        ({}, {"overrides": ["train.eps=.inf"]}, ["train.eps=.inf", "finite"]),
        (
            {},
            {"overrides": [f"train.batch_size=1{'0' * 40}"]},
            ["train: batch_size", "less than or equal to 2147483647"],
        ),
        ({}, {"overrides": ["train.batch_size=1e30"]}, ["train: batch_size", "1e+30"]),
        ({}, {"overrides": [f"train.batch_size=1{'0' * 5000}"]}, ["not valid YAML"]),
        ({}, {"overrides": ["train.lr=10", "train.weight_decay=0.5"]}, ["weight_decay=0.5 with lr=10.0"]),
        ({}, {"overrides": ["train.early_stop={metric: acuracy, patience: 1}"]}, ["early_stop.metric", "'accuracy'"]),
        ({}, {"overrides": ["train.keep_metric=perplexity"]}, ["train.keep_metric", "accuracy, loss"]),
        ({}, {"overrides": ["train.schedule=plateau", "train.plateau_metric=los"]}, ["plateau_metric", "'loss'"]),
        (
            {"select": {"best_of": ["train.lrr"]}},
            {},
            ["select.best_of: no run has 'train.lrr'", "did you mean 'train.lr'"],
        ),
        (
            {"figure": {"kind": "lines", "x": "model.dmodel"}},
            {},
            ["figure.x: no run has 'model.dmodel'", "'model.d_model'"],
        ),
        (
            {"figure": {"kind": "lines", "x": "step", "panels": "task.lenght"}},
            {},
            ["figure.panels: no run has 'task.lenght'", "'task.length'"],
        ),
        (
            {"table": {"rows": {"Two": {"model.d_model": 22}}, "columns": {"accuracy": {}}}},
            {},
            ["table.rows.Two: no run has model.d_model=22 (did you mean '2'?); there are: 2, 3"],
        ),
        (
            {"table": {"rows": {"Two": {"model.d_model": 2, "train.epochs": 5}}, "columns": {"accuracy": {}}}},
            {"scale": "paper"},
            ["table.rows.Two: no run has all of model.d_model=2, train.epochs=5"],
        ),
        (
            {"table": {"rows": {"Two": {"model.d_model": 2}}, "columns": {"fast": {"train.lrr": 0.1}}}},
            {},
            ["table.columns.fast: no run has 'train.lrr' (did you mean 'train.lr'?)"],
        ),
        (
            {"table": {"rows": {"Two": {"modle.d_model": 2}}, "columns": {"accuracy": {}}}},
            {},
            ["table.rows.Two: 'modle.d_model' selects nothing; a key is one of task.<key>, model.<key>"],
        ),
        (
            {"sweep": {f"train.{axis}": [1] * 100 for axis in ("lr", "clip", "eps", "steps")}},
            {},
            ["sweep", "1,000,000"],
        ),
    ],
)
def test_a_fault_is_one_line_with_what_is_allowed(changes, options, words):
    with pytest.raises(ValueError, match=r".+") as caught:
        runs(grid(**changes), **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_a_grid_file_with_an_unknown_key_is_refused_by_name(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text("title: x\nbaseline: {}\nseed: [1]\n")
    with pytest.raises(ValueError, match=r"grid.yaml: seed: unknown key \(did you mean 'seeds'\?\)"):
        load_experiment(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "grid.yaml: the file is empty; expected a mapping"),
        ("# nothing yet\n", "grid.yaml: the file is empty"),
        ("title: x\nbaseline:\n\ttask: {}\n", "in line 3, column 1; lines are indented by spaces, and no value"),
        ("title: x\nseeds: -3\n", "seeds: expected a list of seeds, such as [0, 1, 2], got -3"),
        ("title: x\nseeds: [1, 0, 1]\n", "seeds: expected different seeds, such as [0, 1, 2], got [1, 0, 1]"),
        ("title: x\nscales: {a: {seeds: 3}}\n", "seeds: expected a list of seeds, such as [0, 1, 2], got 3"),
    ],
)
def test_a_fault_of_a_grid_file_says_what_to_write(tmp_path, text, words):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        load_experiment(path)
    assert str(caught.value).count("got") == ("got" in words)


def bomb(template):
    """Aliases of aliases that stand for 9^12 values."""
    lines = (f"a{i}: &a{i} {template.format(', '.join([f'*a{i - 1}'] * 9))}\n" for i in range(1, 12))
    return "a0: &a0 {x: 1}\n" + "".join(lines)


BAD_FILES = [
    *("a: [", "- 1\n- 2\n", "title: x\nbaseline: 3\n", "", "\0", "7", "&a [*a]", "&a {title: *a}", "[" * 1000),
    *(
        f"title: x\nbaseline: {{task: {{}}}}\n{more}\n"
        for more in (
            "scales: {}",
            "scales: {a/b: {}}",
            "scales: {..: {}}",
            "scales: {'': {}}",
            "sweep: [1]",
            "sweep: {a: []}",
            "sweep: {1: [2]}",
            "3: 4",
        )
    ),
    *(
        f"title: x\nbaseline: {{task: {{}}}}\nscales: {{paper: {more}}}\n"
        for more in ("3", "[1]", "{seeds: abc}", "{seeds: []}", "{seeds: [-1]}", "{sweep: [1]}", "{sweep: {a: 3}}")
    ),
    *("title: 2020-99-99", "title: !!int ''", "title: !!timestamp x", f"title: {'9' * 5000}", "seeds: [1e40]"),
    *(bomb("[{}]"), bomb("{{<<: [{}]}}"), bomb("{{k: [{}]}}")),
]


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_file_that_is_not_a_grid_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"grid.yaml: ") as caught:
        load_experiment(path)
    assert "\n" not in str(caught.value)


def test_a_grid_file_in_place_of_its_folder_is_refused_with_the_folder(command_line, tmp_path):
    (tmp_path / "grid.yaml").write_text("title: x\n")
    done = command_line("run", str(tmp_path / "grid.yaml"), "--dry-run")
    assert done.returncode == 2
    assert f"give its folder, {tmp_path}" in done.stderr.replace("\n", "")


def test_a_pipe_in_place_of_a_grid_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "grid.yaml")
    with pytest.raises(ValueError, match=r"grid.yaml: no regular file"):
        load_experiment(tmp_path / "grid.yaml")


@pytest.mark.parametrize(
    ("model", "option", "value"),
    [
        *(("gsa", "init_std", value) for value in (-1, 0, 1e30)),
        *(("gla", "expand_k", value) for value in (0, -0.5)),
        *(("gsa", option, 10**30) for option in ("d_model", "num_layers", "num_heads", "num_slots", "mlp_ratio")),
        *(
            ("gsa", option, 0)
            for option in ("d_model", "num_layers", "num_heads", "num_slots", "mlp_ratio", "norm_eps")
        ),
        *(("attention", option, 1) for option in ("embed_dropout", "resid_dropout", "attention_dropout")),
        *(("mamba", option, -1) for option in ("d_state", "dt_min", "dt_max", "ssm_lr", "expand", "dt_rank")),
    ],
)
def test_a_model_that_cannot_work_is_refused(model, option, value):
    with pytest.raises(ValueError, match=f"here: {option}: Input should be (greater|less)"):
        parse(MODELS.load(model), {option: value}, "here")


def test_one_value_where_a_list_belongs_is_refused_with_the_list_to_write():
    for given in ("dt", 2):
        with pytest.raises(ValueError, match=rf"here: fixed: expected a list, such as \[{given}\], got {given!r}"):
            parse(MODELS.load("mamba"), {"fixed": given}, "here")


def test_yaml_with_code_in_it_is_not_run(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text("title: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_experiment(path)


def test_the_run_id_depends_on_every_resolved_value_and_nothing_else():
    base = make_run()
    assert make_run().run_id == base.run_id
    assert make_run(seed=1).run_id != base.run_id
    assert make_run(task={"length": 7}).run_id != base.run_id
    assert make_run(model={"d_model": 5}).run_id != base.run_id
    assert make_run(train={"clip": 1.0}).run_id != base.run_id
    # a default written out is the same run
    assert make_run(train={"weight_decay": 0.0}).run_id == base.run_id


class Later(ToyConfig):
    """The same options of a model that computes something else."""

    version: ClassVar[int] = 2


def test_a_raised_version_is_a_new_run():
    run = make_run()
    assert replace(run, model=ToyConfig()).run_id == run.run_id
    assert replace(run, model=Later()).run_id != run.run_id


def test_numbers_in_yaml_without_a_dot_are_numbers():
    assert parse(TrainConfig, {"steps": 3, "lr": "1e-3"}, "here").lr == 0.001


def test_lookup_follows_dotted_keys_through_lists():
    assert lookup({"task": {"train": [{"length": 4}]}}, "task.train.0.length") == 4
    assert lookup({"task": {}}, "task.train.0.length") is None


def test_a_thousand_runs_expand_in_under_two_seconds():
    import time

    config = grid(seeds=tuple(range(250)))
    # time in which other processes have the processor does not count
    start = time.process_time()
    assert len(runs(config)) == 1000
    assert time.process_time() - start < 2


def test_an_empty_list_means_an_option_that_a_run_leaves_out():
    assert same([], None)
    assert same([], [])
    assert not same([], [1])
    assert not same([1], None)
