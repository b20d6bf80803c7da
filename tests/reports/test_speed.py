"""Claims about `report kernels`: the newest figure of each case, comparisons, and nothing divided across runs."""

from __future__ import annotations

import pytest
import torch

from subquad.reports.render import history, render
from subquad.suite.bench.cases import Case
from subquad.suite.bench.compare import Comparison
from subquad.suite.bench.run import Rows, Timing, Verdict
from subquad.suite.store import storage

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
    (line,) = history(frame).grids[1].lines
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


def test_the_figure_names_every_case_and_shows_the_share_of_the_floor(frame, tmp_path):
    (ax,) = history(frame).draw().axes
    assert ax.get_title(loc="left") == "causal_conv1d"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["B8 T64 channel-first bfloat16, forward+backward"]
    # the newest device alone: 0.05 of 9 ms
    assert [x for line in ax.lines for x in line.get_xdata()] == pytest.approx([100 * 0.05 / 9.0] * 3)
    (ax,) = history(frame[frame["device"] == "GPU X"]).draw().axes
    dots = {line.get_xdata()[0]: line.get_markerfacecolor() for line in ax.lines if line.get_marker() != "None"}
    assert sorted(dots) == pytest.approx([12.5, 25.0])
    assert dots[25.0] == "none", "an earlier commit is hollow"
    assert dots[12.5] != "none"
    path = render(history(frame), "png", tmp_path / "kernels.png")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["started_at", "device", "commit", "torch", "triton"])
def test_a_text_that_a_row_of_others_lacks_is_empty(frame, name):
    frame.loc[frame.index[::3], name] = None
    assert render(history(frame), "md")


def test_without_rows_it_says_how_to_get_some(tmp_path):
    document = history(storage.read([]))
    assert "run_suite.py bench" in render(document, "terminal")
    with pytest.raises(ValueError, match="nothing to draw"):
        render(document, "png", tmp_path / "kernels.png")
