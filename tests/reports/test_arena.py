"""Claims about the page of the arena, on a few rows."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from subquad.reports.render import arena, render
from subquad.reports.render.document import DASH
from subquad.run_suite import REPOSITORY
from subquad.suite.commands.report import _arena

HOME = Path(__file__).resolve().parents[2]
KNOWN = {"scan": ["peer", "other"]}


def row(model, value, *, run="a", at="2026-12-01T10:00:00+00:00", scale="arena", status="ok", error="", **config):
    settings = (
        {"method": 2, "packages": {} if model == "triton" else {model: "1.0"}} if scale == "arena" else {}
    ) | config
    return {
        "metric": "time",
        "scale": scale,
        "run_id": run,
        "started_at": at,
        "device": "NVIDIA H200",
        "cuda": "13.0",
        "commit": "0123456789abcdef",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "task": "scan",
        "model": model,
        "slice": "B=8,T=64,dtype=bfloat16,pass=forward",
        "value": value,
        "status": status,
        "error": error,
        "config": json.dumps(settings),
    }


def grids(*rows):
    document = arena(pd.DataFrame(list(rows)), KNOWN)
    return document, {
        grid.heading: [dict(zip(grid.header, line, strict=True)) for line in grid.lines] for grid in document.grids
    }


def times(*rows):
    return grids(*rows)[1].get("Times on NVIDIA H200", [])


def test_a_line_of_ours_that_is_slower_stands_there_like_any_other():
    document, found = grids(row("triton", 0.3), row("peer", 0.15), row("other", 0.6))
    (line,) = found["Times on NVIDIA H200"]
    assert (line["fastest"], line["others, times as long"]) == ("peer", "ours 2.00, other 4.00")
    assert (line["ms"], line["ours, ms"]) == ("0.1500", "0.3000")
    assert found[""] == [
        {
            "device": "NVIDIA H200",
            "operator": "scan",
            "comparisons won": "peer 1",
            "comparisons": "1",
            "won by ours": "0",
        }
    ]
    assert "ours is the fastest in 0, a kernel of another project in 1" in document.where


def test_times_of_two_runs_are_never_compared():
    (line,) = times(row("triton", 0.3), row("peer", 0.1, run="b"))
    assert (line["fastest"], line["others, times as long"], line["ours, ms"]) == ("peer", DASH, DASH)
    later = "2026-12-02T10:00:00+00:00"
    (line,) = times(
        row("triton", 0.3), row("peer", 0.1), row("triton", 0.2, run="b", at=later), row("peer", 0.4, run="b", at=later)
    )
    assert (line["fastest"], line["others, times as long"], line["measured"]) == ("ours", "peer 2.00", "2026-12-02")
    # a run without the peer's time does not hide the last comparison
    (line,) = times(row("triton", 0.3), row("peer", 0.1), row("triton", 0.2, run="b", at=later))
    assert line["fastest"] == "peer"


def test_what_was_refused_is_listed_with_its_reason_until_it_has_a_time():
    refused = row("peer", None, status="n/a", error="RuntimeError: needs sm_100")
    _, found = grids(row("triton", 0.3), row("other", 0.4), refused)
    (line,) = found["Without a time"]
    assert (line["implementation"], line["why it has no time"]) == ("peer", "n/a: RuntimeError: needs sm_100")
    later = "2026-12-02T10:00:00+00:00"
    _, found = grids(row("triton", 0.3), row("other", 0.4), refused, row("peer", 0.1, run="b", at=later))
    assert "Without a time" not in found


def test_what_was_not_installed_was_not_measured_and_not_refused():
    gone = [
        row("other", None, status="n/a", error=f"ModuleNotFoundError: No module named {name}")
        for name in ("'fla'", "'fla.ops'")
    ]
    for absent in (gone[0], row("other", None, status="n/a", error="not installed: fla-core")):
        _, found = grids(row("triton", 0.3), row("peer", 0.4), absent)
        assert "Without a time" not in found
        assert found["Not measured yet"] == [{"operator": "scan", "implementation": "other"}]
    # it is installed, and a part of it is missing
    assert "Without a time" in grids(row("triton", 0.3), row("peer", 0.4), gone[1])[1]


def test_kernels_that_nobody_has_timed_yet_are_named():
    document, found = grids(row("triton", 0.3), row("peer", 0.4))
    assert found["Not measured yet"] == [{"operator": "scan", "implementation": "other"}]
    assert "1 more kernels of other projects have no comparison yet" in document.where


def test_rows_of_single_kernels_and_of_varied_options_are_no_times_of_an_operator():
    swept = {"run": "sweep", "scale": "sweep"}
    rows = (row("triton", 0.3, peer="peer 1.0; tunes itself", **swept), row("triton", 0.01, kernel="last", **swept))
    theirs = row("flash-linear-attention", 0.6, peer="peer 1.0; tunes itself", **swept)
    (line,) = times(*rows, theirs)
    assert (line["ms"], line["others, times as long"], line["method"]) == (
        "0.3000",
        "flash-linear-attention 2.00",
        "1, sweep",
    )
    assert times(row("triton", 0.01, kernel="last", **swept), row("fft", 0.6, scale="quick", run="b")) == []


def test_the_history_has_every_run_and_marks_a_change_of_method():
    old = [
        row(name, 0.3, run="old", at="2026-11-30T10:00:00+00:00", scale="paper") for name in ("triton", "sdpa-flash")
    ]
    _, found = grids(*old, row("triton", 0.3), row("peer", 0.4))
    history = found["History"]
    assert [line["method"] for line in history] == ["1", "2 (changed)"]
    assert history[1]["versions"] == "torch 2.11.0, triton 3.6.0, peer 1.0"


def test_a_call_that_was_not_recorded_is_marked():
    document, found = grids(row("triton", 0.3), row("peer", 0.4, not_recorded="RuntimeError: capture"))
    assert found["Times on NVIDIA H200"][0]["others, times as long"] == "peer ° 1.33"
    assert any(note.startswith("°") for note in document.notes)


def test_no_rows_say_how_to_begin():
    assert "bench --arena" in render(arena(pd.DataFrame(columns=list(row("triton", 1.0)))), "terminal")


def test_the_committed_page_has_the_committed_rows():
    text = render(_arena(REPOSITORY, HOME / "results" / "reference"), "md")
    assert (HOME / "docs" / "arena.md").read_text() == text, "run `python run_suite.py report --update-docs`"
