"""The plan of `run --dry-run` says once what runs share, and in a table what tells them apart."""

from __future__ import annotations

import re
import shlex

from hypothesis import given
from hypothesis import strategies as st

from subquad.run_suite import HOME
from subquad.suite.commands.run import _told_apart, print_plan
from subquad.suite.settings.grid import expand
from tests.suite.test_config import grid
from tests.suite.toy import RESOLVER

KEYS = ("task.name", "task.length", "model.name", "train.lr", "seed")
flats = st.lists(
    st.fixed_dictionaries({"seed": st.sampled_from("01")}, optional={key: st.sampled_from("abc") for key in KEYS[:-1]}),
    min_size=1,
    max_size=8,
)


@given(flats)
def test_no_setting_of_a_run_is_lost(flat):
    """A column has it, or it follows from one that has."""
    varying = [key for key in KEYS if len({values.get(key) for values in flat}) > 1]
    columns, following = _told_apart(flat, varying)
    assert sorted([*columns, *(key for found in following.values() for key in found)]) == sorted(varying)
    assert set(following) <= set(columns)
    for column, keys in following.items():
        told = {values.get(column): [values.get(key) for key in keys] for values in flat}
        assert all(told[values.get(column)] == [values.get(key) for key in keys] for values in flat)


def test_what_runs_share_and_what_follows_from_a_model_is_said_once(command_line, tmp_path):
    plan = command_line("run", "h3/table2", "--dry-run", "--results", tmp_path).stdout
    assert plan.count("model.num_layers = 2") == 1
    assert plan.count('with model.name = "h3"') == plan.count("model.head_dim = 1") == 1
    assert re.search(r"^run +state +task.name +model.name +seed$", plan, re.MULTILINE)
    assert max(map(len, plan.partition("\n64 runs")[0].splitlines())) <= 120


def test_a_narrow_terminal_breaks_the_plan_between_words(capsys):
    runs = expand("toy/test", grid(), RESOLVER, overrides=("train.lr=1e-3,3e-3",), seeds=(0, 1))
    words = []
    for width in (1000, 40):
        print_plan(runs, ["to do"] * len(runs), width)
        lines = capsys.readouterr().out.splitlines()
        words.append(" ".join(lines).replace(";", "").split())
        assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    assert words[0] == words[1]


OWN_GRID = """title: own
baseline:
  task: {name: flip-flop, length: 8, num_train: 64, num_test: 16}
  model: {name: gla, num_layers: 1, d_model: 8}
  train: {steps: 2, batch_size: 8, lr: 1.0e-3}
sweep: {model.name: [gla, my-mixer]}
"""


def test_where_no_run_is_stored_the_plan_has_the_command_that_measures_one(command_line, tmp_path):
    """Also of a grid elsewhere with plugins, whose runs no command knows by its name alone."""
    own = tmp_path / "of mine"
    own.mkdir()
    (own / "grid.yaml").write_text(OWN_GRID)
    plugins = [word for name in ("my_task", "my_mixer") for word in ("--plugin", HOME / "examples" / f"{name}.py")]
    # a scale that cannot run here gets no rows
    for words in (["mamba/table13", "--scale", "paper"], [own, *plugins, "--set", "train.lr=1e-2,2e-2"]):
        plan = command_line("run", *words, "--dry-run", "--results", tmp_path).stdout
        (command,) = re.findall(r"one run shows how long they take: python run_suite.py (.*)", plan)
        measured = command_line(*shlex.split(command), "--dry-run").stdout
        assert "1 run, 1 to do" in measured, command


def test_the_report_that_a_call_names_averages_no_two_models(command_line, tmp_path):
    only = ("--only", "model.name=attention,gla", "--only", "model.d_model=8", "--device", "cpu")
    few = ("--set", "train.steps=2", "--set", "task.num_train=64", "--results", tmp_path)
    last = command_line("run", "quickstart", *only, *few).stdout.splitlines()[-1]
    asked = shlex.split(last.partition(" report ")[2])
    lines = command_line("report", *asked).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("attention ", "gla "))] == ["attention", "gla"]
