"""Claims about `report kernels`: the newest figure of each case, comparisons, and nothing divided across runs."""

from __future__ import annotations

import dataclasses
import json

import pandas as pd
import pytest
import torch

from subquad.reports.render import history, render
from subquad.reports.render.changes import changes_of
from subquad.reports.render.floors import with_floors
from subquad.reports.render.speed import points_of
from subquad.suite.bench.cases import Case
from subquad.suite.bench.compare import Comparison
from subquad.suite.bench.measure import Ceilings
from subquad.suite.bench.run import Rows, Timing, Verdict
from subquad.suite.store import storage
from tests.reports.drawn import faults, words

CASE = Case("causal_conv1d", "triton", (("B", 8), ("T", 64), ("memory", "channel-first")), "bfloat16", True)
PEER = Case("causal_conv1d", "causal-conv1d", CASE.shape, "bfloat16", True)


def bench(root, commit, started, times, *, device="GPU X", verdict=None):
    rows = Rows(root, "quick", torch.device("cpu"), [commit, started])
    rows.provenance |= {"commit": commit, "device": device, "torch": "2.13.0", "triton": "3.9.0", "dirty": False}
    if verdict is None:
        rows.add_timing(Timing(CASE, times, floor_ms=0.05, num_bytes=8, extra_bytes=3 << 20, cold_start_s=1.5), 1)
        rows.add_timing(Timing(PEER, [], status="n/a", reason="no module | named peer"), 1)
    else:
        rows.add_verdict(Verdict(CASE, verdict), "ba5e" * 10, 1)
    for row in rows.rows:
        row["started_at"] = started
    rows.write()


@pytest.fixture
def frame(tmp_path):
    slower = Comparison(1.07, 1.05, 1.09, 0.004, {"A": [0.1] * 3, "B": [0.107] * 3, "control": [0.1] * 3}, [1.07] * 3)
    bench(tmp_path, "aaaa", "2026-01-01", [0.2, 0.2, 0.2])
    bench(tmp_path, "cccc", "2026-03-01", [], verdict=slower)
    bench(tmp_path, "bbbb", "2026-02-01", [0.4, 0.4, 0.4])
    bench(tmp_path, "dddd", "2026-04-01", [9.0, 9.0, 9.0], device="CPU Y")
    return storage.read(storage.files([tmp_path], "kernels"))


def test_the_newest_run_of_each_case_and_device_is_shown(frame):
    lines = [line for line in history(frame).grids[0].lines if line[3] == "triton"]
    assert [line[-2] for line in lines] == ["dddd", "cccc"]
    assert lines[1][1:] == (
        *("B8 T64 channel-first bfloat16", "forward+backward", "triton", "0.1070", "0.0%"),
        *("—", "—", "—", "cccc", "4"),
    )
    assert lines[0][4:9] == ("9.0000", "0.0%", "1%", "3.0", "1.5")


def test_a_comparison_shows_its_ratio_interval_noise_and_both_commits(frame):
    (line,) = history(frame).grids[-1].lines
    assert line == (
        *("causal_conv1d", "B8 T64 channel-first bfloat16 forward+backward", "triton", "slower"),
        *("ba5eba5eba", "cccc", "1.070", "[1.050, 1.090]", "0.4%"),
    )


@pytest.mark.parametrize("format", ["terminal", "md", "latex", "html"])
def test_every_format_gives_the_figures_and_the_reason_of_what_is_missing(frame, format):
    text = render(history(frame), format)
    assert "0.1070" in text
    assert "9.0000" in text
    assert "no module" in text


def test_the_shares_of_the_floor_name_every_case_on_every_device(frame, tmp_path):
    one, other = history(frame, "shares").draw().axes
    assert [ax.get_title(loc="left") for ax in (one, other)] == ["causal_conv1d\nCPU Y", "causal_conv1d\nGPU X"]
    assert [label.get_text() for label in one.get_yticklabels()] == ["B8 T64 channel-first bfloat16, forward+backward"]
    # 0.05 of 9 ms
    assert [x for line in one.lines for x in line.get_xdata()] == pytest.approx([100 * 0.05 / 9.0] * 3)
    dots = {line.get_xdata()[0]: line.get_markerfacecolor() for line in other.lines if line.get_marker() != "None"}
    assert sorted(dots) == pytest.approx([12.5, 25.0])
    assert dots[25.0] == "none", "an earlier commit is hollow"
    assert dots[12.5] != "none"
    path = render(history(frame), "png", tmp_path / "kernels.png")
    assert path.stat().st_size > 10_000


def changes(tmp_path, *runs):
    """The changes between runs with these commits and samples, in their order."""
    for i, (commit, samples) in enumerate(runs):
        bench(tmp_path, commit, f"2026-01-{i + 1:02}", samples)
    return changes_of(points_of(storage.read(storage.files([tmp_path], "kernels"))))


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([("a", [1.0, 1.01, 1.02]), ("b", [1.2, 1.21, 1.22])], "slower"),
        ([("a", [1.0, 1.01, 1.02]), ("b", [0.8, 0.81, 0.82])], "faster"),
        # quartiles apart, and less than 3 %
        ([("a", [1.0, 1.0, 1.0]), ("b", [1.02, 1.02, 1.02])], "unchanged"),
        # more than 3 %, and the quartiles overlap
        ([("a", [1.0, 1.0, 1.3]), ("b", [0.9, 1.2, 1.4])], "unclear"),
        # two runs of the earlier commit differ by as much
        ([("a", [1.0] * 3), ("a", [1.3] * 3), ("b", [1.6] * 3)], "unclear"),
        # a newest commit that was measured twice is compared with the one before
        ([("a", [1.0] * 3), ("b", [1.2] * 3), ("b", [1.21] * 3)], "slower"),
        # the last two of several commits are compared
        ([("a", [9.0] * 3), ("b", [1.0] * 3), ("c", [1.2] * 3)], "slower"),
    ],
)
def test_slower_is_what_differs_by_more_than_noise(tmp_path, runs, verdict):
    (change,) = changes(tmp_path, *runs)
    assert change.verdict == verdict


@pytest.mark.parametrize(("word", "verdict"), [("same", "unchanged"), ("slower", "slower")])
def test_what_a_comparison_in_one_run_says_of_two_commits_stands(tmp_path, word, verdict):
    ratio = {"same": 1.0, "slower": 1.2}[word]
    # medians of all samples tell nothing of the rounds, in which both are timed under one load
    taken = {"A": [0.1] * 3, "B": [0.15] * 3 if word == "same" else [0.1] * 3, "control": [0.1] * 3}
    bench(tmp_path, "bbbb", "2026-02-01", [], verdict=Comparison(ratio, 0.99, 1.21, 0.004, taken, [ratio] * 3))
    (change,) = changes_of(points_of(storage.read(storage.files([tmp_path], "kernels"))))
    assert (change.ratio, change.verdict) == (ratio, verdict)
    assert change.differs == "measured in one run: ratio between 0.990 and 1.210"


def test_a_change_names_what_else_differs_and_how_the_others_changed(tmp_path):
    (change,) = changes(tmp_path, ("a", [1.0, 1.0, 1.0]), ("b", [1.0, 1.5, 1.5]))
    assert (change.ratio, change.fastest, change.others) == (1.5, 1.0, None)
    other = dataclasses.replace(change.before, setting={**change.before.setting, "torch": "2.12", "shapes": "paper"})
    assert dataclasses.replace(change, before=other).differs == "shapes: paper, then quick; torch: 2.12, then 2.13.0"
    document = history(storage.read(storage.files([tmp_path], "kernels")))
    (line,) = next(grid for grid in document.grids if grid.heading.startswith("Newest against")).lines
    assert line[4:8] == ("1.0000 [1.0000, 1.0000]", "1.5000 [1.0000, 1.5000]", "1.500", "unclear")
    assert line[-1] == "commit: a, then b"
    for width in ("page", "column"):
        canvas = document.draw(width)
        assert faults(canvas) == []
        assert "0 slower, 0 faster, 1 unclear, 0 unchanged" in words(canvas)


def test_only_floors_of_plain_float32_products_are_computed_again():
    def row(metric, value, precision="float32", **config):
        return {"run_id": "r", "metric": metric, "value": value, "precision": precision, "config": json.dumps(config)}

    cost = {"num_bytes": 10**9, "num_flops": 10**12}
    rates = [
        row("copy_bandwidth", 1e12),
        row("matmul_rate", 6e14, dtype="bfloat16"),
        row("matmul_rate", 5e13, dtype="float32"),
    ]
    floors = [
        # 20 ms at the rate of float32; three products of half the rate of bfloat16 take 10 ms
        row("floor_time", 20.0, **cost),
        # the bytes decide
        row("floor_time", 20.0, **{**cost, "num_bytes": 12 * 10**9}),
        # not a matrix product, whose floor is that of its bytes
        row("floor_time", 1.0, **cost),
        row("floor_time", 20.0, "bfloat16", **cost),
    ]
    found = with_floors(pd.DataFrame([*rates, *floors]))
    assert found["value"].tolist()[3:] == pytest.approx([10.0, 12.0, 1.0, 20.0])
    measured = pd.DataFrame([*rates, row("matmul_rate", 3e14, dtype="tf32"), *floors])
    assert with_floors(measured)["value"].tolist()[4:] == [20.0, 20.0, 1.0, 20.0], "a new run knows its rate"


@pytest.mark.parametrize(("tf32", "rate"), [(None, 5e13), ([6e13], 5e13), ([3e14], 1e14)])
def test_products_of_float32_count_as_three_of_tf32_where_that_is_faster(tf32, rate):
    rates = {"bfloat16": [6e14], "float32": [5e13], **({"tf32": tf32} if tf32 else {})}
    assert Ceilings([1e12], rates).products("float32") == rate
    assert Ceilings([1e12], rates).products("float16") == 6e14


@pytest.mark.parametrize("name", ["started_at", "device", "commit", "torch", "triton"])
def test_a_text_that_a_row_of_others_lacks_is_empty(frame, name):
    frame.loc[frame.index[::3], name] = None
    assert render(history(frame), "md")


def test_without_rows_it_says_how_to_get_some(tmp_path):
    document = history(storage.read([]))
    assert "run_suite.py bench" in render(document, "terminal")
    with pytest.raises(ValueError, match="nothing to draw"):
        render(document, "png", tmp_path / "kernels.png")
