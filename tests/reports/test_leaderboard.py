"""The views of the leaderboard: every mixer is in each of them, and what a view holds equal is equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from subquad.models import MODELS
from subquad.reports.render.quotes import read_queries
from subquad.run_suite import REPOSITORY, WORKLOADS
from subquad.suite.settings.config import load_experiment
from subquad.suite.settings.grid import expand, points
from subquad.suite.settings.resolver import Resolver
from subquad.tasks import TASKS
from tests.reports.committed import CONFIGS

REPORTS = Path(__file__).resolve().parents[2] / "reports"
NO_MIXERS = {"transformer++", "pythia", "hybrid", "sashimi", "dss-softmax", "dss-exp-no-scale"}
OF_THEIR_OWN = {"attention", "gated-attention", "hyena", "rwkv", "slstm"}
"""Mixers whose state has no option that could make it equal to others."""


def networks(view):
    """(name, network without memory for its weights, task) of every mixer on recall."""
    grid = CONFIGS[f"leaderboard/{view}"]
    resolver = Resolver(TASKS, MODELS, WORKLOADS)
    for run in expand(f"leaderboard/{view}", grid, resolver, scale="small", only=["task.name=mqar"]):
        with torch.device("meta"):
            yield run.resolved["model"]["name"], run.model.build(run.task.spec), run.task


@pytest.mark.parametrize(("view", "of"), [("parameters", "num_parameters"), ("state", "state_size")])
def test_every_mixer_has_a_place_and_as_much_of_what_the_view_holds_equal(view, of):
    budget = CONFIGS[f"leaderboard/{view}"].budget
    assert (budget.of, budget.task) == (of, "mqar")
    found = {}
    for name, network, task in networks(view):
        count = sum(parameter.numel() for parameter in network.parameters())
        found[name] = count if of == "num_parameters" else network.state_size(task.length)
    assert found.keys() == set(MODELS) - NO_MIXERS
    exempt = OF_THEIR_OWN if of == "state_size" else set()
    wanted = pytest.approx(budget.value, rel=budget.within)
    assert {name: size for name, size in found.items() if name not in exempt and size != wanted} == {}


def test_every_mixer_is_timed():
    grid = CONFIGS["leaderboard/speed"]
    runs = list(expand("leaderboard/speed", grid, Resolver(TASKS, MODELS, WORKLOADS), scale="paper"))
    for measure in ("layer", "decode"):
        timed = [run.resolved["model"]["name"] for run in runs if run.resolved["speed"]["measure"] == measure]
        assert set(timed) == set(MODELS) - NO_MIXERS
        assert len(timed) == len(grid.table.rows)


@pytest.mark.parametrize(("scale", "parameters"), [("paper", 15e6), pytest.param("60m", 60e6, marks=pytest.mark.slow)])
def test_all_networks_of_equal_minutes_have_as_many_parameters(scale, parameters):
    grid = CONFIGS["leaderboard/minutes"]
    resolver = Resolver(TASKS, MODELS, WORKLOADS, without_data=True)
    runs = expand("leaderboard/minutes", grid, resolver, scale=scale, seeds=(0,), only=["task.length=1024"])
    assert len(list(runs)) == len(grid.table.rows)
    for run in runs:
        with torch.device("meta"):
            network = run.model.build(run.task.spec)
        count = sum(parameter.numel() for parameter in network.parameters())
        assert count == pytest.approx(parameters, rel=0.025), run.title


def test_every_scale_of_equal_minutes_has_the_rate_of_the_mixer_and_tries_it_at_rates():
    """A rate that an axis overrides, a second number for one mixer, or one with digits cut off would be found here."""
    folder = REPORTS / "leaderboard/minutes"
    grid = CONFIGS["leaderboard/minutes"]
    rates = {}
    for scale in ("paper", "60m", "bpe", "local", "rates"):
        for point in points(grid, scale):
            rates.setdefault(scale, {}).setdefault(point["model.name"], set()).add(point["train.lr"])
    stated = {
        key: {float(rate)}
        for key, rate in re.findall(r"&(\S+) (\S+?)}?  # <!--= \1 -->", (folder / "grid.yaml").read_text())
    }
    assert stated.keys() == {row["model.name"] for row in grid.table.rows.values()}
    tried = rates.pop("rates")
    for scale, found in rates.items():
        assert found == stated, scale
    assert all(len(tried[name]) > 1 and rate <= tried[name] for name, rate in stated.items())
    queries = read_queries(folder / "quotes.csv")
    assert {key: query.sources for key, query in queries.items()} == {
        row["model.name"]: f"{label} | T=1024 | train.lr" for label, row in grid.table.rows.items()
    }


def test_an_experiment_that_reads_anothers_rows_runs_and_shows_those(tmp_path):
    """Its runs are those of the other under its name, so none is trained twice."""
    minutes, flops = (REPOSITORY.experiment(f"leaderboard/{view}") for view in ("minutes", "flops"))
    assert flops.rows == minutes.rows == minutes.name == "leaderboard/minutes"
    assert flops.config.sweep == minutes.config.sweep
    assert flops.config.table.columns != minutes.config.table.columns
    lost = tmp_path / "some" / "grid.yaml"
    lost.parent.mkdir()
    lost.write_text("title: lost\nreads: nothing\n")
    with pytest.raises(ValueError, match="no experiment 'nothing' beside this one"):
        load_experiment(lost)


def test_a_mixer_of_a_plugin_has_a_row_at_the_rate_that_its_user_sets():
    """The table states its rows, and a rate that the baseline stated would leave out the runs with another one."""
    path = REPORTS / "leaderboard/minutes/grid.yaml"
    grid = load_experiment(path, {"model.name": ["mine"], "task.name": []})
    assert list(grid.table.rows) == [*CONFIGS["leaderboard/minutes"].table.rows, "mine"]
    assert grid.table.rows["mine"] == {"model.name": "mine"}
    for scale in ("paper", "60m", "cpu"):
        (rates,) = {point.get("train.lr") for point in points(grid, scale) if point["model.name"] == "mine"}
        assert rates is None, scale
