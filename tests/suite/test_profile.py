"""`profile`: the parts of a step add up, and runs without steps are refused."""

from __future__ import annotations

import re

import pytest
import torch

from subquad.suite.profiling import shares


def rows(text):
    """Name, calls, microseconds and per cent of every line of a table."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    return [(name, *(float(cell.replace(",", "")) for cell in numbers)) for name, *numbers in cells]


def test_every_product_of_a_step_is_counted_and_the_longest_stands_first():
    small, large = torch.ones(4, 4), torch.ones(600, 600)

    def step():
        (small + small).sum()
        large @ large @ large

    found = shares(step, torch.device("cpu"), 5)
    assert [share.calls for share in found if share.name == "aten::mm"] == [2]
    assert [share.calls for share in found if share.name == "aten::add"] == [1]
    assert found[0].name == "aten::mm"
    assert [share.microseconds for share in found] == sorted((share.microseconds for share in found), reverse=True)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("quickstart", "--only", "model.name=gla", "--only", "model.d_model=16"), ["training step"]),
        (
            (
                *("gsa/figure4", "--scale", "cpu", "--only", "model.name=retnet"),
                *("--set", "speed.lengths=[16,32]", "--set", "model.num_layers=1"),
            ),
            ["length=16", "length=32"] * 2,
        ),
    ],
    ids=["training", "timing"],
)
def test_a_table_says_where_the_time_of_a_step_goes(command_line, monkeypatch, tmp_path, arguments, parts):
    monkeypatch.chdir(tmp_path)
    done = command_line("profile", *arguments, "--device", "cpu", "--steps", "2", "--top", "3")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())
    tables = re.split(r"(?m)^(?=.*(?:training step|length=\d+)\s*$)", done.stdout)[1:]
    assert [table.splitlines()[0].strip().rpartition(", ")[2] for table in tables] == parts
    for table in tables:
        *shown, others, total = rows(table)
        assert len(shown) == 3
        assert re.fullmatch(r"\d+ others", others[0])
        assert total[0] == "all"
        for column, slack in ((1, 0.3), (2, 0.3), (3, 0.3)):
            assert sum(line[column] for line in (*shown, others)) == pytest.approx(total[column], abs=slack)
