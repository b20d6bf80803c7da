"""Published numbers and claims are counted once, and none flatters."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from subquad.reports.render.claims import read_claims
from subquad.reports.render.count import CELLS, PAPERS, REASONS, claims_text, count, headline, is_result, reasons
from subquad.reports.render.judge import is_at_chance, of_another_device
from subquad.reports.render.plan import Published, read_expected
from subquad.suite.options import parse
from subquad.suite.settings.report_spec import TableSpec
from tests.reports.committed import CONFIGS, EXPERIMENTS
from tests.reports.made import EXPECTED, GRID, cell, grid, make_run, three

HOME = Path(__file__).resolve().parents[2]

NUMBERS = {name: read_expected(path.parent / "expected.csv") for name, path in EXPERIMENTS.items()}
HEADER = "row,column,value,unit,better,seeds,hardware,note,source,follows\n"


def table(**options: Any) -> dict[str, Any]:
    return {"table": {**yaml.safe_load(GRID)["table"], **options}}


def published(value: float = 99.8, unit: str = "%", hardware: str = "", follows: str = "") -> str:
    return f"{HEADER}H3,AR,{value},{unit},higher,,{hardware},,paper,{follows}\n"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({}, "agree"),
        ({"values": (1.0, 1.0, 1.0), "published": published(90)}, "better"),
        ({"values": (0.965, 0.985, 1.0)}, "unclear"),
        ({"values": (0.9, 0.99, 0.99)}, "differ"),
        ({"values": (0.9, 0.9, 0.9)}, "differ"),
        ({"values": (0.998, 0.998)}, "agree, few seeds"),
        ({"values": (0.9,)}, "differ, few seeds"),
        ({"table": {"chance": 99.0}}, "at chance"),
        ({"published": published(unit="hours", hardware="1x A100 80GB")}, "other device"),
        ({"published": published(unit="hours")}, "other device"),
        ({"published": published(unit="hours", hardware="NVIDIA H200")}, "agree"),
        ({"published": published(unit="x", hardware="1x A100 80GB")}, "agree"),
        ({"table": {"protocol": "it counts other bytes"}}, "other device"),
        ({"stand_in": "a sample"}, "other data"),
        ({"scale": "small"}, "not run"),
        ({"status": "oom"}, "not run"),
        ({"published": published(unit="steps")}, ""),
        ({"published": published(follows="demo/table1 | H3 | AR")}, ""),
        ({"published": published().replace("H3,AR", "Random,AR")}, "not in a grid"),
        ({"table": {"reference": "peer"}}, ""),
    ],
)
def test_a_published_number_is_counted_as_one_thing(make, made, expected):
    runs = three(values=made.get("values", (0.998,) * 3), **{k: made[k] for k in ("stand_in", "scale") if k in made})
    if "status" in made:
        runs = [*runs[:2], make_run(seed=2, status=made["status"])]
    report = make(*runs, config=grid(**table(**made.get("table", {}))), expected=made.get("published", published()))
    found = count(report)
    assert {name: found[name] for name in CELLS if found[name]} == ({expected: 1} if expected in CELLS else {})
    assert (found["published"], found["in a grid"]) == (bool(expected), expected in CELLS)


def test_what_is_not_compared_has_neither_a_verdict_nor_a_difference(make):
    found = cell(make(*three(), expected=published(unit="hours", hardware="1x A100 80GB")), "H3", "AR")
    assert (found.verdict, found.difference, found.successes) == ("other device", None, None)
    assert found.published is not None, "the number is shown"


@pytest.mark.parametrize(
    ("hardware", "device", "other"),
    [
        ("1x A100 80GB", "NVIDIA H200", True),
        ("1x A100 80GB", "NVIDIA A100-SXM4-80GB", False),
        ("1x H800", "NVIDIA H200", True),
        ("NVIDIA H200", "NVIDIA H200, 6 runs at a time", False),
        ("", "NVIDIA H200", True),
    ],
)
def test_a_time_is_of_our_device_only_where_the_paper_names_it(hardware, device, other):
    assert of_another_device(Published(1.0, 1, "ms", "lower", "", "paper", hardware), device) == other


@pytest.mark.parametrize(
    ("value", "better", "at_chance"),
    [
        (11.6, "higher", True),
        (11.7, "higher", False),
        (2.0, "higher", True),
        (1.0, "lower", False),
        (9.0, "lower", True),
    ],
)
def test_a_number_is_at_chance_if_it_is_hardly_better_than_a_guess_or_worse(value, better, at_chance):
    assert is_at_chance(Published(value, 1, "%", better, "", "paper"), 6.6, 5.0) == at_chance


def test_the_chance_of_h3s_grid_is_the_papers():
    spec = CONFIGS["h3/table2"].table
    assert spec is not None
    for column in spec.columns:
        assert spec.of(column, "chance") == NUMBERS["h3/table2"]["Random", column].value


@pytest.mark.parametrize(
    ("metric", "take", "speedup"),
    [("accuracy", "max", 4.0), ("accuracy", "mean", 3.0), ("loss", "max", 0.5), ("loss", "mean", 0.375)],
)
def test_a_speedup_is_the_ratio_to_another_row_above_one_where_that_is_worse(make, metric, take, speedup):
    columns = {"AR": {"task.name": "associative-recall"}, "IH": {"task.name": "induction-heads"}}
    columns |= {"speedup": {"speedup_over": "S4D", "take": take, "tolerance": 0.1}}
    tests = {("h3", "associative-recall"): 0.8, ("h3", "induction-heads"): 0.4}
    tests |= dict.fromkeys((("s4d", "associative-recall"), ("s4d", "induction-heads")), 0.2)
    runs = [make_run(*of, 0, test) for of, test in tests.items()]
    for rows in runs:
        (row,) = (row for row in rows if row["metric"] == "accuracy")
        row["metric"] = metric
    expected = HEADER + "H3,speedup,2.0,x,higher,,1x A100 80GB,,paper,\n"
    made = {"expected": expected, "claims": "claim,left,comparison,right,source\n"}
    report = make(*runs, config=grid(**table(columns=columns, metric=metric, percent=False)), **made)
    found = cell(report, "H3", "speedup")
    assert found.mean == pytest.approx(speedup)
    assert found.verdict == ("better" if speedup > 2.1 else "worse")
    assert cell(report, "S4D", "speedup").mean is None
    assert set(found.run_ids) == {rows[0]["run_id"] for rows in runs}


@pytest.mark.parametrize(
    "column", [{"speedup_over": "H9", "take": "max"}, {"speedup_over": "H3"}, {"speedup_over": "H3", "take": "min"}]
)
def test_a_ratio_to_nothing_is_an_error(column):
    with pytest.raises(ValueError, match=r"take is max or mean|take: Input should be 'max' or 'mean'"):
        parse(TableSpec, {"rows": {"H3": {}}, "columns": {"speedup": column}}, "grid.yaml")


def test_a_number_that_stands_in_several_tables_follows_the_one_where_it_counts():
    for name, numbers in NUMBERS.items():
        for place, number in numbers.items():
            if number.follows:
                experiment, row, column = number.follows.split(" | ")
                other = NUMBERS[experiment][row, column]
                assert (other.value, other.follows) == (number.value, ""), f"{name}: {place}"


def test_no_number_is_counted_twice():
    """The same row, column and value in two tables of a paper is one number."""
    counted: dict[tuple[Any, ...], list[str]] = {}
    for name, numbers in NUMBERS.items():
        config = CONFIGS[name]
        for (row, column), number in numbers.items():
            if is_result(config, number) and not number.follows:
                counted.setdefault((name.partition("/")[0], row, column, number.value), []).append(name)
    assert {key: names for key, names in counted.items() if len(names) > 1} == {}


def test_a_claim_that_recurs_follows_one_that_is_counted():
    lines = {name: read_claims(path.parent / "claims.csv") for name, path in EXPERIMENTS.items()}
    for line in (line for found in lines.values() for line in found if " | " in (line.get("follows") or "")):
        experiment, text = line["follows"].split(" | ", 1)
        (other,) = [known for known in lines[experiment] if known["claim"] == text]
        assert not other.get("follows")
    both = combinations([(name, line) for name, found in lines.items() for line in found], 2)
    for (a, first), (b, second) in both:
        if a.partition("/")[0] == b.partition("/")[0] and first["source"] == second["source"]:
            free = not (first.get("follows") or second.get("follows"))
            same = all(first[key] == second[key] for key in ("left", "comparison", "right"))
            assert not (same and free), f"{a} and {b}: {first['claim']}"


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name.partition("/")[0] in PAPERS])
def test_what_cannot_run_says_of_what_there_is_not_enough(name):
    config = CONFIGS[name]
    if "paper" in config.cannot_run and any(is_result(config, number) for number in NUMBERS[name].values()):
        assert set(reasons(config, {"published": 1, "not run": 1})) <= set(REASONS) != set()
        assert reasons(config, {"published": 1, "not run": 1})


def test_zero_of_four_is_never_said_of_claims_of_which_none_failed(make):
    assert claims_text(count(make())) == "0 hold · 0 fail · 0 unclear · 2 not run"
    assert claims_text({}) == ""


def test_the_number_of_a_document_is_the_one_farthest_behind_the_paper(make):
    runs = [*three(), *three(task="induction-heads", values=(0.9, 0.9, 0.9)), *three("s4d", values=(1.0, 1.0, 1.0))]
    assert (found := headline(make(*runs))) is not None
    assert (found.row, found.column) == ("H3", "IH")


def test_a_number_of_another_device_is_no_headline_where_one_is_judged(make):
    expected = EXPECTED.replace("H3,IH,100.0,%,higher,,,,", "H3,IH,100.0,hours,higher,,1x A100,,")
    runs = [*three(), *three(task="induction-heads", values=(0.5, 0.5, 0.5))]
    assert (found := headline(make(*runs, expected=expected))) is not None
    assert found.column == "AR"


def test_without_verdicts_the_headline_is_what_the_first_claim_names(make):
    runs = [*three(), *three("s4d"), *three("s4d", "induction-heads")]
    claims = "claim,left,comparison,right,source\na,S4D | IH,<,H3 | AR,s\n"
    assert (found := headline(make(*runs, expected=HEADER, claims=claims))) is not None
    assert (found.row, found.column) == ("S4D", "IH")
    assert headline(make(expected=HEADER)) is not None
    assert headline(make(expected=HEADER, scale="small")) is None
