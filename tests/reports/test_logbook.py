"""Our verdicts in the words of logbooks: one table, which the documents show, and nothing small is called verified."""

import re
from dataclasses import replace
from typing import get_args

import pytest

from subquad.reports.render import claims, judge, logbook
from subquad.reports.render.document import FEW_SEEDS, REDUCED, STAND_IN
from subquad.run_suite import HOME
from tests.reports.made import cell, three


def test_every_verdict_has_a_word():
    verdicts = {*get_args(judge.Verdict), *get_args(claims.Verdict)} - {"", "not run"}
    assert set(logbook.WORDS) == verdicts
    assert set(logbook.WORDS.values()) | {"toy"} == set(get_args(logbook.Word))


def test_the_document_shows_the_table():
    text = (HOME / "docs" / "reading.md").read_text()
    shown = dict(re.findall(r"^\| ([\w, ]+) \| (verified|falsified|inconclusive) \|$", text, re.MULTILINE))
    found = {ours: word for names, word in shown.items() for ours in names.split(", ") if "any" not in names}
    found = {name: word for name, word in found.items() if "seeds" not in name}
    assert found == logbook.WORDS


@pytest.mark.parametrize(
    ("verdict", "marks", "word"),
    [
        ("agrees", (), "verified"),
        ("agrees", (REDUCED,), "toy"),
        ("differs", (STAND_IN,), "toy"),
        ("agrees", (FEW_SEEDS,), "inconclusive"),
        ("differs", (FEW_SEEDS, REDUCED), "toy"),
        ("", (), ""),
    ],
)
def test_small_scales_and_few_seeds_verify_nothing(make, verdict, marks, word):
    report = make(*three())
    found = replace(cell(report, "H3", "AR"), verdict=verdict, marks=marks)
    (line,) = logbook.lines(replace(report, cells=(found,), claims=()))
    assert line["logbook"] == word
    assert (line["paper"], line["ours"], line["seeds"]) == (99.8, pytest.approx(99.8), 3)
    (claim,) = (claim for claim in report.claims if claim.verdict == "holds")
    (line,) = logbook.lines(replace(report, cells=(), claims=(replace(claim, marks=marks),)))
    assert line["logbook"] == (word if marks else "verified")


def test_a_claim_at_a_reduced_scale_is_a_toy_and_one_of_ours_is_left_out(make):
    report = make(*three())
    (claim,) = (claim for claim in report.claims if claim.verdict == "holds")
    mine = replace(claim, source="ours: a view")
    found = list(logbook.lines(replace(report, cells=(), claims=(claim, mine), reduced=True)))
    assert [line["logbook"] for line in found] == ["toy"]
