"""The claims of a paper hold, fail, are unclear or wait."""

from __future__ import annotations

import math

import pytest

from reports.render import render
from reports.render.claims import _number as ratio
from reports.render.claims import tally
from reports.render.judge import Cell
from tests.reports.made import (
    make_run,
    three,
    used,
)


def test_claims_hold_fail_or_wait(make):
    both = [*three(), *three("s4d", values=(0.86, 0.86, 0.86)), *three(task="induction-heads", values=(1.0, 1.0, 1.0))]
    waiting = make(*both).claims
    assert [claim.verdict for claim in waiting] == ["holds", "not run"]
    done = make(*both, *three("s4d", "induction-heads", (0.356, 0.35, 0.36))).claims
    assert [(claim.verdict, claim.detail) for claim in done] == [("holds", "3 seeds"), ("holds", "2 of 2, 3 seeds")]


@pytest.mark.parametrize(("comparison", "verdict"), [(">", "fails"), (">=", "holds"), ("<", "fails")])
def test_equal_sides_are_neither_larger_nor_smaller(make, comparison, verdict):
    claims = f"claim,left,comparison,right,source\na,H3 | AR,{comparison},98,s\n"
    (claim,) = make(*three(values=(0.98, 0.98, 0.98)), claims=claims).claims
    assert claim.verdict == verdict


def test_a_claim_fails_at_one_column_even_while_others_wait(make):
    report = make(*three(values=(0.5, 0.5, 0.5)), *three("s4d", values=(0.86, 0.86, 0.86)))
    first, second = report.claims
    assert first.verdict == "fails"
    assert (second.verdict, second.detail) == ("fails", "50.00 against 86.00 at AR, 3 seeds")


def test_a_claim_is_unclear_within_its_noise_or_where_a_seed_is_lost(make):
    claims = "claim,left,comparison,right,source\na,H3 | AR,>=,95,s\n"
    steady = make(*three(values=(0.98, 0.99, 1.0)), claims=claims).claims[0]
    noisy = make(*three(values=(0.90, 1.0, 1.0)), claims=claims).claims[0]
    lost = make(*three(values=(0.98, 0.99)), make_run(seed=2, status="diverged"), claims=claims).claims[0]
    assert [claim.verdict for claim in (steady, noisy, lost)] == ["holds", "unclear", "unclear"]
    assert noisy.detail == "by 1.67, two standard errors are 6.67, 3 seeds"
    assert lost.detail == "1 run without a value, 2 seeds"


def test_a_claim_cannot_hold_vacuously_and_one_that_follows_is_not_counted(make):
    claims = (
        "claim,left,comparison,right,source,if,follows,note\n"
        "S4D fails beyond,S4D | AR,<,50,s,S4D | IH >= 99,,the paper has S4\n"
        "S4D fails clearly,S4D | AR,<,60,s,,S4D fails beyond,\n"
    )
    assert make(*three("s4d", values=(0.2, 0.2, 0.2)), claims=claims).claims[0].verdict == "not run"
    unsolved = [*three("s4d", values=(0.2, 0.2, 0.2)), *three("s4d", "induction-heads", (0.1, 0.1, 0.1))]
    first, second = make(*unsolved, claims=claims).claims
    assert (first.verdict, first.detail) == ("void", "needs S4D | IH >= 99, got 10.00, 3 seeds")
    assert tally([first, second]) == (0, 1)
    assert second.verdict == "holds"
    solved = [*three("s4d", values=(0.2, 0.2, 0.2)), *three("s4d", "induction-heads", (1.0, 1.0, 1.0))]
    report = make(*solved, claims=claims)
    assert report.claims[0].verdict == "holds"
    assert tally(report.claims) == (1, 1)
    text = render(report, "terminal")
    assert "S4D fails beyond [the paper has S4]" in text
    assert "(not counted: follows from 'S4D fails beyond')" in text


def test_a_claim_carries_every_mark_of_its_cells(make):
    claims = "claim,left,comparison,right,source\na,H3 | AR,>,S4D | AR,s\n"
    runs = [make_run(columns=used(1, "triton")), make_run(seed=1, columns=used(2, "triton"))]
    (claim,) = make(*runs, make_run("s4d", test=0.5, stand_in="a sample"), claims=claims).claims
    assert claim.marks == ("‡", "§", "¶")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x,H3 | AR,!=,1,s", "'!=' is not one of"),
        ("x,H4 | AR,>,1,s", "no 'H4'.*did you mean 'H3'"),
        ("x,H3 | XX,>,1,s", "no 'XX'"),
        ("x,much,>,1,s", "neither a number nor"),
        ("x,H3 | AR,>,1,s,H3 is good", "if is not `row | column >= number`, got 'H3 is good'"),
        ("x,H3 | AR,>,1,s,,y", "follows names no other claim, 'y'"),
    ],
)
def test_a_claim_about_nothing_is_an_error(make, line, message):
    with pytest.raises(ValueError, match=message):
        make(claims=f"claim,left,comparison,right,source,if,follows\n{line}\n")


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ("claim,left,comparison,right\n", r": the header has no source; it needs claim,left,comparison,right,source"),
        ("claim,left,comparison,right,source,if\nx,H3 | AR,>\n", r", line 2: has 3 values, needs 5 to 6;"),
        ("claim,left,comparison,right,source\nx, y,H3 | AR,>,1,s\n", r", line 2: has 6 values, needs 5; put a text"),
    ],
)
def test_a_wrong_line_of_the_claims_is_named(make, claims, message):
    with pytest.raises(ValueError, match=r"claims\.csv" + message):
        make(claims=claims)


def test_close_is_within_the_tables_tolerance(make):
    claims = "claim,left,comparison,right,source\na,H3 | AR,~,100.5,s\nb,H3 | AR,~,101,s\nc,H3 | AR,<,101,s\n"
    assert [claim.verdict for claim in make(*three(), claims=claims).claims] == ["holds", "fails", "holds"]


def test_a_ratio_has_the_error_of_both_of_its_sides():
    sides = ("a", "c"), ("b", "c")
    cells = {
        sides[0]: Cell("a", "c", mean=8.0, sd=0.4, num_seeds=4),
        sides[1]: Cell("b", "c", mean=2.0, sd=0.2, num_seeds=4),
    }
    found = ratio(sides, "", cells)
    assert found.value == 4.0
    assert found.error == pytest.approx(math.hypot(0.2, 4 * 0.1) / 2)
