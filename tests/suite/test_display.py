"""The lines of a grid tell its runs apart."""

import io

import pytest
from rich.console import Console

from subquad.suite.display import GridDisplay, Labels
from subquad.suite.runner import Finished
from subquad.suite.runs import Progress
from subquad.suite.settings.grid import expand
from tests.suite.test_config import grid
from tests.suite.toy import RESOLVER


def runs(*overrides, **changes):
    return expand("toy/test", grid(**changes), RESOLVER, overrides=overrides, seeds=(0, 1))


def test_runs_of_one_title_are_told_apart_by_the_settings_in_which_they_differ():
    found = runs("train.lr=1e-3,3e-3", sweep={})
    label = Labels(found)
    assert [label(run).partition(" [")[0] for run in found] == [
        "toy on parity, seed 0, lr=0.001",
        "toy on parity, seed 1, lr=0.001",
        "toy on parity, seed 0, lr=0.003",
        "toy on parity, seed 1, lr=0.003",
    ]
    # seeds alone stand in the title
    (first, _) = found = runs(sweep={})
    assert Labels(found)(first) == f"toy on parity, seed 0 [{first.run_id[:6]}]"


def test_settings_that_change_together_leave_room_for_those_that_tell_runs_apart():
    """A grid of blocks has several options for each kind of block, all of which differ where the kind does."""
    together = [
        {f"train.{key}": value for key in ("epochs", "batch_size", "eval_batch_size", "eval_every", "warmup_steps")}
        for value in (2, 4)
    ]
    found = runs(sweep={"sizes": together, "train.clip": [1.0, 2.0]})[::2]
    label = Labels(found)
    assert len({label(run).partition(" [")[0] for run in found}) == len(found) == 4


def test_the_line_of_a_finished_run_has_its_setting():
    found = runs("train.lr=1e-3,3e-3", sweep={})
    written = io.StringIO()
    with GridDisplay(Console(file=written, width=200), len(found), runs=found) as display:
        display.finished(Finished(found[2], "ok", error="", seconds=1.0, found=""))
    assert written.getvalue().startswith("ok       toy on parity, seed 0, lr=0.003 [")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [60, 80, 99, 100, 140])
def test_a_narrow_terminal_drops_the_loss_and_keeps_the_bar(width):
    found = runs("train.lr=1e-3,3e-3", sweep={})
    display = GridDisplay(Console(file=Terminal(), width=width), len(found), runs=found)
    display.progressed(found[0], Progress(120, 1000, "loss 2.3451, accuracy 0.9312"))
    shown = Console(file=io.StringIO(), width=width)
    shown.print(display.bars.get_renderable())
    (line,) = [line for line in shown.file.getvalue().splitlines() if "toy on" in line]
    assert "━" in line
    assert "120/1000" in line
    assert "-:--:--" in line
    assert ("loss" in line) == (width >= 100)
