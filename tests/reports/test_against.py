"""Rows of a table are compared with one of them over their seeds."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from subquad.reports.render import against, render
from subquad.reports.render.against import interval
from subquad.suite.store.comparison import ALPHA, holm, permutation_p, smallest_p
from tests.reports.made import GRID, cell, grid, make_run, note, swept, three

FOUR = (0.90, 0.92, 0.94, 0.96)


def both(ours: tuple[float, ...], theirs: tuple[float, ...] = FOUR, **options):
    return [*three(values=ours, **options), *three("s4d", values=theirs, **options)]


def line(document) -> dict[str, str]:
    (found,) = document.grids[0].lines
    return dict(zip(document.grids[0].header, found, strict=True))


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ((0.97, 0.98, 0.99, 1.0), "better"),
        ((0.80, 0.82, 0.84, 0.86), "worse"),
        ((0.91, 0.93, 0.95, 0.97), "tie"),
        ((0.97, 0.98, 0.99), "too few seeds"),
    ],
)
def test_a_mixer_is_better_than_another_where_chance_does_not_explain_it(make, ours, verdict):
    theirs = FOUR[: len(ours)]
    found = line(against(make(*both(ours, theirs)), "S4D"))
    assert (found["row"], found["column"], found["verdict"]) == ("H3", "AR", verdict)
    assert found["difference"] == f"{100 * (sum(ours) - sum(theirs)) / len(ours):+.1f}"
    assert (found["p"] == "—") == (verdict == "too few seeds")


def test_smaller_losses_are_better(make):
    columns = {"loss": {"task.name": "associative-recall", "metric": "loss", "split": "test"}}
    runs = both((0.97, 0.98, 0.99, 1.0))
    for rows in runs:
        next(row for row in rows if row["metric"] == "accuracy").update(metric="loss", unit="nats")
    table = {"rows": {"S4D": {"model.name": "s4d"}, "H3": {"model.name": "h3"}}, "columns": columns}
    report = make(*runs, config=grid(table=table), claims="claim,left,comparison,right,source\n")
    assert line(against(report, "S4D"))["verdict"] == "worse"


def test_of_a_metric_of_unknown_direction_no_row_is_better_or_worse(make):
    runs = both((0.97, 0.98, 0.99, 1.0))
    for rows in runs:
        next(row for row in rows if row["metric"] == "accuracy").update(metric="coverage", unit="")
    table = yaml.safe_load(GRID)["table"] | {"metric": "coverage"}
    assert line(against(make(*runs, config=grid(table=table)), "S4D"))["verdict"] == "differs"


def test_seeds_that_are_left_after_failures_are_not_compared(make):
    """The others of a row that mostly diverges are its lucky ones."""
    diverged = [make_run(seed=seed, status="diverged") for seed in range(4, 8)]
    document = against(make(*both((0.97, 0.98, 0.99, 1.0)), *diverged), "S4D")
    assert (line(document)["verdict"], line(document)["p"]) == ("seeds lost", "—")
    assert any(text.startswith("seeds lost: ") for text in document.notes)
    assert not any(text.startswith("too few seeds") for text in document.notes)


def test_each_row_is_at_the_setting_that_is_best_for_it(make):
    good, bad = (0.97, 0.98, 0.99, 1.0), (0.1, 0.1, 0.1, 0.1)
    runs = [
        *three(values=good, train={"lr": 1e-3}, valid={100: 0.9}),
        *three(values=bad, valid={100: 0.1}, train={"lr": 1e-4}),
    ]
    runs += [*three("s4d", values=FOUR, valid={100: 0.9}, train={"lr": 1e-4})]
    runs += [*three("s4d", values=bad, valid={100: 0.1}, train={"lr": 1e-3})]
    report = make(*runs, config=swept())
    assert line(against(report, "S4D"))["verdict"] == "better"
    assert cell(report, "H3", "AR").chosen != cell(report, "S4D", "AR").chosen
    assert note(report, "*") in against(report, "S4D").notes


def test_p_is_corrected_for_the_number_of_comparisons(make):
    """One outcome in 35 is no evidence where two were looked at."""
    runs = both((0.97, 0.98, 0.99, 1.0)) + [
        make_run(name, "induction-heads", seed, 0.5) for name in ("h3", "s4d") for seed in range(4)
    ]
    document = against(make(*runs), "S4D")
    first, second = (dict(zip(document.grids[0].header, texts, strict=True)) for texts in document.grids[0].lines)
    assert (second["p"], second["p (Holm)"], second["verdict"]) == ("0.029", "0.057", "tie")
    assert first["p"] == "1.000"
    assert any("name fewer rows, or run 5 seeds" in text for text in document.notes)
    assert "p (Holm)" in str(render(document, "md"))


def test_a_note_says_how_many_seeds_can_decide_all_comparisons(make):
    """Four decide one comparison (2 of 70 outcomes), and not two of them."""
    few = [
        make_run(name, task, seed, 0.5)
        for name in ("h3", "s4d")
        for task in ("induction-heads", "associative-recall")
        for seed in range(3)
    ]
    assert any(
        "4 seeds on both sides, and 5 for all 2 comparisons" in text for text in against(make(*few), "S4D").notes
    )


def test_a_row_that_is_not_there_is_an_error(make):
    report = make(*both(FOUR))
    with pytest.raises(ValueError, match=r"no row 'H4' \(did you mean 'H3'\?\)"):
        against(report, "H4")
    empty = against(make(scale="small"), "S4D", ["H3"])
    assert empty.grids[0].lines == ()
    assert any("`run` makes them" in text for text in empty.notes)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8))
def test_holm_never_lowers_a_p_and_keeps_their_order(ps):
    corrected = holm(ps)
    assert all(p <= new <= 1.0 for p, new in zip(ps, corrected, strict=True))
    assert sorted(corrected) == [corrected[i] for i in sorted(range(len(ps)), key=lambda i: (ps[i], corrected[i]))]
    assert min(corrected) == min(1.0, len(ps) * min(ps))
    assert max(corrected) >= max(ps)


def test_holm_is_as_published():
    """The example of the method: of four, the second smallest is multiplied by three."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


values = st.lists(st.integers(0, 50), min_size=4, max_size=5)


@given(values, values)
def test_the_interval_has_the_differences_that_the_test_allows(ours, theirs):
    low, high = interval(ours, theirs)
    difference = sum(ours) / len(ours) - sum(theirs) / len(theirs)
    assert low <= difference <= high
    for end, inside in ((low, 1), (high, -1)):
        shift = end - difference + inside * 1e-3
        moved = [value - difference - shift for value in ours]
        assert low == high or permutation_p(moved, theirs) > ALPHA


@pytest.mark.parametrize(("n", "m", "p"), [(3, 3, 0.1), (4, 4, 2 / 70), (3, 4, 1 / 35)])
def test_four_seeds_are_the_fewest_that_can_decide(n, m, p):
    assert smallest_p(n, m) == pytest.approx(p)
    assert (p <= ALPHA) == (max(n, m) >= 4)
