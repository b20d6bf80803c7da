"""The claims of a paper hold, fail, are unclear or wait."""

from __future__ import annotations

import math

import pytest
import yaml

from subquad.reports.render import render
from subquad.reports.render.claims import _number as ratio
from subquad.reports.render.count import CLAIMS, claims_text, count
from subquad.reports.render.judge import Cell
from tests.reports.made import (
    GRID,
    grid,
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


def test_a_claim_of_every_column_does_not_wait_for_those_that_the_scale_has_not(make):
    smaller = {"train.epochs": 20, "sweep": {"task": [{"task.name": "associative-recall"}]}}
    runs = [*three(scale="small"), *three("s4d", values=(0.86, 0.86, 0.86), scale="small")]
    for sweep, verdict in (({"train.epochs": 20}, "not run"), (smaller, "holds")):
        report = make(*runs, config=grid(scales={"paper": {}, "small": sweep}), scale="small")
        assert report.claims[1].verdict == verdict


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
    assert noisy.detail == "true by 1.67, two standard errors are 6.67, 3 seeds"
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
    assert (first.verdict, first.detail) == ("unclear", "needs S4D | IH >= 99, got 10.00, 3 seeds")
    assert second.verdict == "holds"
    solved = [*three("s4d", values=(0.2, 0.2, 0.2)), *three("s4d", "induction-heads", (1.0, 1.0, 1.0))]
    report = make(*solved, claims=claims)
    assert report.claims[0].verdict == "holds"
    assert claims_text(count(report)) == "1 hold · 0 fail · 0 unclear · 0 not run"
    text = render(report, "terminal")
    assert "S4D fails beyond [the paper has S4]" in text
    assert "(not counted: follows from 'S4D fails beyond')" in text


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.98, 0.99, 1.0), "holds"),
        ((0.93, 0.96, 0.99), "unclear"),  # true by 1, two standard errors are 3.5
        ((0.91, 0.94, 0.97), "unclear"),  # false by as much
        ((0.90, 0.91, 0.92), "fails"),
    ],
)
def test_to_fail_takes_as_much_evidence_as_to_hold(make, values, verdict):
    claims = "claim,left,comparison,right,source\na,H3 | AR,>,95,s\n"
    assert make(*three(values=values), claims=claims).claims[0].verdict == verdict


def test_numbers_that_differ_by_little_do_not_look_equal(make):
    claims = "claim,left,comparison,right,source\na,H3 | AR,<,S4D | AR,s\n"
    (claim,) = make(*three(values=(0.90002,) * 3), *three("s4d", values=(0.89999,) * 3), claims=claims).claims
    assert (claim.verdict, claim.detail) == ("fails", "90.002 against 89.999, 3 seeds")
    (claim,) = make(*three(values=(0.90001, 0.90002, 0.90003)), claims=claims).claims
    assert (claim.verdict, claim.detail) == ("fails", "90.002 against 89.999, 3 seeds")
    (claim,) = make(*three(values=(0.8998, 0.9000, 0.9002)), claims=claims).claims
    assert claim.detail == "false by 0.001, two standard errors are 0.023, 3 seeds"


@pytest.mark.parametrize(
    ("comparison", "ours", "verdict"),
    [
        *(("~", 0.95, "fails"), (">~", 0.95, "holds"), ("<~", 0.95, "fails")),
        *(("~", 0.85, "fails"), (">~", 0.85, "fails"), ("<~", 0.85, "holds")),
        *(("~", 0.9, "holds"), (">~", 0.9, "holds"), ("<~", 0.9, "holds")),
    ],
)
def test_a_claim_is_one_sided_where_the_paper_is(make, comparison, ours, verdict):
    """A model that nearly matches another one does so where it is better, too."""
    claims = f"claim,left,comparison,right,source\na,H3 | AR,{comparison},90,s\n"
    assert make(*three(values=(ours,) * 3), claims=claims).claims[0].verdict == verdict


def test_a_claim_that_the_last_epochs_refute_is_unclear(make):
    """The best of many epochs, chosen on test, may put two models in another order than the last ones."""
    claims = "claim,left,comparison,right,source\na,H3 | AR,>,S4D | AR,s\n"
    on_test = {"train": {"keep": "best"}, "task_options": {"split_policy": "paper"}}
    runs = [
        make_run(test=0.9, valid={1: 0.9, 2: 0.5}, **on_test),
        make_run("s4d", test=0.8, valid={1: 0.8, 2: 0.7}, **on_test),
    ]
    (claim,) = make(*runs, claims=claims).claims
    assert (claim.verdict, claim.detail) == ("unclear", "at the last epoch 50.00 against 70.00")


def test_only_claims_of_papers_are_counted_each_once(make):
    claims = (
        "claim,left,comparison,right,source,follows\n"
        "a,H3 | AR,>,50,paper,\nb,H3 | AR,>,60,paper,a\n"
        "c,H3 | AR,>,70,paper,other/table | a\nd,H3 | AR,>,80,ours; a goal,\n"
    )
    report = make(*three(), claims=claims)
    assert [claim.verdict for claim in report.claims] == ["holds"] * 4
    assert claims_text(count(report)) == "1 hold · 0 fail · 0 unclear · 0 not run"
    text = render(report, "terminal")
    assert text.count("not counted: follows from") == 2
    assert "not counted: no paper makes it" in text


def test_claims_of_a_reduced_scale_are_counted_apart(make):
    found = count(make(*three(scale="small")))
    assert [found[f"reduced claims: {name}"] for name in CLAIMS] == [1, 0, 0, 1]
    assert not any(found[f"claims: {name}"] for name in CLAIMS)


def test_the_counts_say_how_many_claims_rest_on_fewer_than_three_seeds(make):
    """One seed has no standard error, so a claim holds by any distance."""
    claims = "claim,left,comparison,right,source\na,H3 | AR,>,90,s\nb,S4D | AR,>,90,s\nc,S4D | AR,>,95,s\n"
    runs = [*three(values=(0.99, 0.99, 0.99)), make_run("s4d", test=0.92)]
    assert claims_text(count(make(*runs, claims=claims))) == "2 hold (1‡) · 1 fail (1‡) · 0 unclear · 0 not run"
    small = count(make(make_run("s4d", test=0.92, scale="small"), claims=claims, scale="small"))
    assert claims_text(small, "reduced claims: ") == "1 hold (1‡) · 1 fail (1‡) · 0 unclear · 1 not run"


def test_the_counts_say_how_many_claims_that_are_not_run_have_a_verdict_at_a_reduced_scale(make):
    claims = "claim,left,comparison,right,source\na,H3 | AR,>,90,s\nb,S4D | AR,>,90,s\n"
    paper, small = make(claims=claims), make(*three(scale="small"), claims=claims, scale="small")
    assert claims_text(count(paper, [small])) == "0 hold · 0 fail · 0 unclear · 2 not run (1†)"


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
        ("x,H3 | AR,>,nan,s", "'nan' is neither a number nor"),
        ("x,1,<,2,s", "names no cell, `row . column`"),
        ("x,H3 | AR / S4D | AR,~,1,s", "tolerance is that of a cell, not of a ratio; write the bounds"),
        ("x,H3 | AR,>,1,s,H3 is good", "if is not `row | column >= number`, got 'H3 is good'"),
        ("x,H3 | AR,>,1,s,,y", "follows names no other claim, 'y'"),
        ("x,H3 | AR,>,1,s\nx,H3 | AR,>,2,s", "'x' stands twice, and would be counted twice"),
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
    claims = "claim,left,comparison,right,source\na,H3 | AR,~,100.5,s\nb,H3 | AR,~,101.5,s\nc,H3 | AR,<,101,s\n"
    assert [claim.verdict for claim in make(*three(), claims=claims).claims] == ["holds", "fails", "holds"]


def test_close_is_within_the_tolerance_of_a_column_of_its_own(make):
    table = yaml.safe_load(GRID)["table"]
    table["columns"]["AR"]["tolerance"] = 0.1
    claims = "claim,left,comparison,right,source\na,H3 | AR,~,100.3,s\nb,H3 | *,~,99.85,s\n"
    steady = (0.998,) * 3
    runs = [*three(values=steady), *three(task="induction-heads", values=steady)]
    report = make(*runs, config=grid(table=table), claims=claims)
    assert [claim.verdict for claim in report.claims] == ["fails", "holds"]


@pytest.mark.parametrize(
    ("sides", "reason"),
    [("H3 | AR,>,S4D | AR", "3 runs without a value"), ("H3 | AR / S4D | IH,>,2", "the divisor of the ratio is 0")],
)
def test_a_claim_on_runs_that_gave_no_number_to_compare_is_unclear(make, sides, reason):
    diverged = [make_run("s4d", seed=seed, status="diverged") for seed in range(3)]
    runs = [*three(), *diverged, *three("s4d", "induction-heads", values=(0.0, 0.0, 0.0))]
    (claim,) = make(*runs, claims=f"claim,left,comparison,right,source\na,{sides},s\n").claims
    assert claim.verdict == "unclear"
    assert claim.detail.startswith(reason)


def test_a_ratio_has_the_error_of_both_of_its_sides():
    sides = ("a", "c"), ("b", "c")
    cells = {
        sides[0]: Cell("a", "c", mean=8.0, sd=0.4, num_seeds=4),
        sides[1]: Cell("b", "c", mean=2.0, sd=0.2, num_seeds=4),
    }
    found = ratio(sides, "", cells, grid().table)
    assert found.value == 4.0
    assert found.error == pytest.approx(math.hypot(0.2, 4 * 0.1) / 2)


@pytest.mark.parametrize(
    ("changes", "verdict"), [({}, "holds"), ({"stand_in": "a sample"}, "not run"), ({"scale": "small"}, "not run")]
)
def test_the_papers_number_of_another_model_is_not_compared_with_other_data(make, changes, verdict):
    runs = [make_run(task="induction-heads", seed=seed, test=0.98, **changes) for seed in range(3)]
    claims = "claim,left,comparison,right,source\na,H3 | IH,>,Random | IH,s\n"
    (claim,) = make(*runs, claims=claims, scale=changes.get("scale")).claims
    assert claim.verdict == verdict
