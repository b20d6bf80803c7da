"""The rules of a report of timings: no seeds but a spread, one device, ratios as claims, logarithmic axes."""

from __future__ import annotations

import json

import pytest

from subquad.reports.render import build, render
from subquad.reports.render.board import crossovers
from subquad.reports.render.draw import draw
from subquad.reports.render.layout import ours_text
from subquad.reports.render.plan import plain_table
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import points
from tests.reports.committed import ROWS
from tests.reports.drawn import words
from tests.stored import frame_of

LENGTHS = (512, 1024, 2048)
GRID = {
    "title": "scan and attention",
    "source": {"paper": "mamba", "figure": 8},
    "baseline": {"bench": {"shape": {"B": 1, "D": 64}, "lengths": list(LENGTHS), "implementation": "torch"}},
    "sweep": {"bench.op": ["attention", "scan"]},
    "scales": {
        "paper": {},
        "tiny": {
            "bench.lengths": [512],
            "sweep": {"bench.op": ["scan"]},
        },
    },
    "table": {
        "rows": {"Attention": {"bench.op": "attention"}, "Scan": {"bench.op": "scan"}},
        "columns": {f"T={n}": {"slice": f"length={n}"} for n in LENGTHS},
        "metric": "time",
        "split": "",
        "percent": False,
        "decimals": 4,
    },
    "figure": {
        "kind": "lines",
        "x": "slice.length",
        "x_log2": True,
        "y": "time",
        "y_log10": True,
        "y_label": "time (ms)",
        "split": "",
        "percent": False,
    },
}


def series(
    op,
    times,
    *,
    metric="time",
    unit="ms",
    device="NVIDIA H200",
    started_at="2026-03-01T10:00:00",
    run_id="",
    **columns,
):
    """The rows of one series: a time for each length, or the status that says why there is none."""
    bench = {**GRID["baseline"]["bench"], "op": op, "version": 1, "lengths": list(times), "dtype": "bfloat16"}
    shared = {
        "run_id": run_id or f"{op}-{device}",
        "experiment": "demo/scan",
        "scale": "paper",
        "task": op,
        "task_version": 1,
        "model": "torch",
        "seed": 0,
        "split": "",
        "step": 0,
        "config": json.dumps({"bench": bench}),
        "device": device,
        "started_at": started_at,
        "commit": "0123456789abcdef",
        "dirty": False,
        "stand_in": "",
        "split_policy": "",
        **columns,
    }
    rows = []
    for length, time in times.items():
        row = {**shared, "metric": metric, "unit": unit, "slice": f"length={length}", "status": "ok", "error": ""}
        if isinstance(time, str):
            rows.append({**row, "value": None, "status": time, "error": "a reason"})
        else:
            rows.append({**row, "value": time, "samples": [0.98 * time, time, 1.02 * time]})
            rows.append({**row, "value": 1e6 * length, "metric": "peak_extra_memory", "unit": "bytes"})
    return [*rows, {**shared, "metric": "run", "unit": "", "slice": "", "value": None, "status": "ok", "error": ""}]


@pytest.fixture
def make(tmp_path):
    """Builds a report of the rows of series."""

    def report(*runs, claims="", grid=GRID, **options):
        folder = tmp_path / "reports" / "demo" / "scan"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "claims.csv").write_text("claim,left,comparison,right,source\n" + claims)
        return build(ExperimentConfig(**grid), folder, frame_of(*runs), **options)

    return report


ATTENTION = {512: 0.05, 1024: 0.2, 2048: 0.8}
SCAN = {512: 0.1, 1024: 0.2, 2048: 0.4}


def both(**options):
    return series("attention", ATTENTION, **options), series("scan", SCAN, **options)


def cell(report, row, column):
    return next(cell for cell in report.cells if (cell.row, cell.column) == (row, column))


def verdicts(report):
    return [(claim.verdict, claim.detail) for claim in report.claims]


def test_a_time_has_its_unit_and_the_spread_of_its_samples_and_no_seeds(make):
    report = make(*both())
    found = cell(report, "Scan", "T=2048")
    assert found.mean == pytest.approx(0.4)
    # quartiles of three samples are the outer ones
    assert found.spread == pytest.approx(0.02)
    assert found.marks == ()
    text = render(report, "md")
    assert "ours (ms)" in text
    assert "| spread |" in text.replace("  ", "")
    assert "seed" not in text
    # two percent of 0.4 are 0.008
    assert any("2.0%" in line and "0.400 " in line for line in text.splitlines())
    assert "0.4000" not in text
    assert not report.costs


def test_a_row_against_a_library_shows_its_times_in_place_of_ours(make):
    ours = series("scan", SCAN)
    theirs = [
        {**row, "slice": f"{row['slice']},against=fla", "value": 3 * row["value"]}
        for row in ours
        if row["metric"] == "time"
    ]
    rows = {"Scan": {"bench.op": "scan"}, "Scan of fla": {"bench.op": "scan", "against": "fla"}}
    columns = {**GRID["table"]["columns"], "speedup": {"speedup_over": "Scan of fla", "take": "max"}}
    grid = {**GRID, "table": {**GRID["table"], "rows": rows, "columns": columns}}
    report = make([*ours, *theirs], grid=grid, claims="ours is faster,Scan | *,<,Scan of fla | *,a paper\n")
    assert cell(report, "Scan", "T=2048").mean == pytest.approx(0.4)
    assert cell(report, "Scan of fla", "T=2048").mean == pytest.approx(1.2)
    assert cell(report, "Scan", "speedup").mean == pytest.approx(3)
    assert verdicts(report) == [("holds", "3 of 3")]
    drawn = {line.label: [point.y for point in line.points] for _, panel in report.figure.panels for line in panel}
    assert drawn == {"Scan": [0.1, 0.2, 0.4], "Scan of fla": pytest.approx([0.3, 0.6, 1.2])}


@pytest.mark.parametrize(
    ("time", "spread", "text"),
    [
        (0.2851, 0.1, "0.29⇕"),
        (0.2851, 0.04, "0.29"),
        (0.2851, 0.001, "0.2851"),
        (0.2851, 0.0, "0.2851"),
        # one digit other than zero stays
        (0.2851, 4.0, "0.3⇕"),
        (1421.15, 0.2, "1400⇕"),
    ],
)
def test_the_digits_of_a_time_end_where_its_spread_begins_and_a_large_one_is_marked(make, time, spread, text):
    rows = series("scan", dict.fromkeys(LENGTHS, time))
    for row in rows:
        if row["metric"] == "time":
            row["samples"] = [(1 - spread) * time, time, (1 + spread) * time]
    report = make(rows)
    assert [ours_text(cell(report, "Scan", f"T={n}"), report.decimals) for n in LENGTHS] == [text] * 3
    assert ("⇕ half the distance between the quartiles is above 5% of the median" in report.notes) == ("⇕" in text)


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H200, 7 runs at a time"])
def test_the_table_names_its_device_and_says_where_other_runs_shared_it(make, device):
    text = render(make(series("scan", SCAN, device=device)), "terminal")
    assert f"scale: paper; device: {device}\n" in text
    busy = "busy machine: NVIDIA H200, 7 runs at a time; what shares a device is slower than alone"
    assert (busy in text) == ("7" in device)


def test_a_mean_over_settings_waits_for_all_and_has_no_spread_of_samples(make):
    sweep = {**GRID["sweep"], "bench.dtype": ["bfloat16", "float32"]}
    grid = {**GRID, "sweep": sweep, "table": {**GRID["table"], "mean_over": ["bench.dtype"]}}
    slow = series("scan", {length: 3 * time for length, time in SCAN.items()}, run_id="slow")
    for row in slow:
        row["config"] = row["config"].replace("bfloat16", "float32")
    for runs, mean in (([slow], None), ([slow, series("scan", SCAN)], 0.2)):
        found = cell(make(*runs, grid=grid), "Scan", "T=512")
        assert found.mean == (mean if mean is None else pytest.approx(mean))
        assert found.spread is None


def test_out_of_memory_stands_in_its_cell_and_the_series_goes_on(make):
    report = make(series("attention", {512: 0.05, 1024: "oom", 2048: "oom"}), series("scan", SCAN))
    assert cell(report, "Attention", "T=1024").failures == (("oom", 1),)
    assert cell(report, "Attention", "T=512").mean == pytest.approx(0.05)
    assert "— not run: 0 of 6 cells" in report.notes
    table, cells = render(report, "terminal").split("Every cell that has runs")
    assert table.count("oom") == 2
    assert sum("oom" in line for line in cells.splitlines()) == 2


def test_a_series_that_could_not_run_says_so_in_every_cell(make):
    rows = series("attention", dict.fromkeys(LENGTHS, "n/a"))
    rows[-1]["status"] = "n/a"
    report = make(rows)
    assert {cell(report, "Attention", f"T={n}").failures for n in LENGTHS} == {(("n/a", 1),)}


def test_a_claim_may_be_about_a_ratio_and_says_it(make):
    claims = (
        "twice,Attention | T=2048 / Scan | T=2048,>=,2,s\n"
        "thrice,Attention | T=2048 / Scan | T=2048,>=,3,s\n"
        "always half,Attention | * / Scan | *,>=,0.5,s\n"
        "always twice,Attention | * / Scan | *,>=,2,s\n"
        "two ratios,Attention | T=2048 / Scan | T=2048,>,Attention | T=512 / Scan | T=512,s\n"
    )
    assert verdicts(make(*both(), claims=claims)) == [
        ("holds", "2"),
        ("fails", "2.00 against 3.00"),
        ("holds", "3 of 3, 0.5 to 2"),
        ("fails", "0.50 against 2.00 at T=512; 1.00 against 2.00 at T=1024"),
        ("holds", "0.5 to 2"),
    ]


def test_a_ratio_to_what_has_no_time_waits(make):
    runs = series("attention", {512: 0.05, 1024: 0.2, 2048: "oom"}), series("scan", SCAN)
    claims = "a,Attention | T=2048 / Scan | T=2048,>=,2,s\nb,Scan | T=2048 / Attention | T=2048,<,2,s\n"
    assert verdicts(make(*runs, claims=claims)) == [("not run", ""), ("not run", "")]


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("Attention | T=512 / Scann | T=512", "no 'Scann'.*did you mean 'Scan'"),
        ("Attention | T=512 / Scan | T=5", "no 'T=5'"),
        ("Attention | T=512 / 3", "no 'T=512 / 3'"),
        ("fast / slow", "nor a ratio of two"),
    ],
)
def test_a_ratio_of_nothing_is_an_error(make, side, message):
    with pytest.raises(ValueError, match=message):
        make(claims=f"x,{side},>,1,s\n")


def test_times_of_two_devices_never_stand_in_one_report(make):
    new = both(device="NVIDIA H200", started_at="2026-03-02T10:00:00")[1]
    report = make(*both(device="NVIDIA A100"), new, claims="x,Attention | T=512 / Scan | T=512,>,0,s\n")
    assert report.device == "NVIDIA H200"
    assert cell(report, "Scan", "T=512").run_ids == ("scan-NVIDIA H200",)
    assert cell(report, "Attention", "T=512").missing
    assert verdicts(report) == [("not run", "")]
    assert "left out: 2 runs on another device than that of the newest run" in report.notes
    assert "device: NVIDIA H200" in report.provenance


def test_the_figure_has_logarithmic_axes_names_the_device_and_where_memory_ended(make):
    report = make(series("attention", {512: 0.05, 1024: 0.2, 2048: "oom"}), series("scan", SCAN))
    (_, lines), *_ = report.figure.panels
    assert {line.label: [(p.x, p.y) for p in line.points] for line in lines} == {
        "Attention": [(512, 0.05), (1024, 0.2)],
        "Scan": list(SCAN.items()),
    }
    assert {line.label: line.ended for line in lines} == {"Attention": "oom", "Scan": ""}
    canvas = draw(report)
    (axes,) = canvas.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "NVIDIA H200" in words(canvas)
    assert [text.get_text() for text in axes.texts] == ["oom past 1024"]


def test_lengths_and_series_that_a_scale_leaves_out_are_told_from_those_still_to_run(make):
    report = make(scale="tiny")
    assert "— not run: 6 of 6 cells, 5 of them not in scale tiny" in report.notes


def test_a_narrowed_axis_of_several_keys_is_counted_and_not_printed(make):
    pair = [{"bench.op": "attention"}, {"bench.op": "scan"}]
    grid = {**GRID, "sweep": {"series": pair}, "scales": {"tiny": {"sweep": {"series": pair[1:]}}}}
    report = make(series("scan", SCAN, scale="tiny"), grid=grid)
    assert "† reduced: scale tiny (series: 1 of 2); no verdict against the paper" in report.notes


def test_a_grid_without_a_table_has_a_column_for_every_length(make):
    report = make(*both(), grid={**GRID, "table": None, "figure": None})
    assert [cell.column for cell in report.cells] == [f"T={n}" for n in LENGTHS] * 2
    assert cell(report, "scan", "T=512").mean == pytest.approx(0.1)


def test_a_grid_of_models_without_a_table_has_a_column_for_every_length():
    baseline = {"model": {"num_layers": 1}, "speed": {"measure": "train", "lengths": list(LENGTHS), "tokens": 2048}}
    config = ExperimentConfig(title="models", baseline=baseline, sweep={"model.name": ["gla", "gsa"]})
    table = plain_table(config, points(config, "paper"))
    assert (list(table.rows), table.metric) == (["gla", "gsa"], "time")
    assert table.columns == {f"T={n}": {"slice": f"length={n}"} for n in LENGTHS}


def test_a_selector_of_what_a_timing_does_not_have_is_an_error(make):
    rows = {"Scan": {"model.name": "mamba"}}
    with pytest.raises(ValueError, match=r"'model.name' selects nothing; a key is one of bench\.<key>"):
        make(grid={**GRID, "table": {**GRID["table"], "rows": rows}})


@pytest.mark.parametrize(("metric", "unit", "fastest"), [("time", "ms", min), ("decode_throughput", "1/s", max)])
def test_a_row_is_compared_with_the_fastest_attention_of_every_length(make, metric, unit, fastest):
    rows = {
        "Attention": (1.0, 5.0, "oom"),
        "Flash attention": (2.0, 4.0, "oom"),
        "Linear attention": (0.1, 9.0, 9.0),
        "Scan": (3.0, 3.0, 3.0),
    }
    grid = {
        **GRID,
        "sweep": {"bench.op": list(rows)},
        "scales": {"paper": {}},
        "table": {**GRID["table"], "rows": {name: {"bench.op": name} for name in rows}, "metric": metric},
        "figure": {**GRID["figure"], "y": metric},
    }
    runs = [
        series(name, dict(zip(LENGTHS, values, strict=True)), metric=metric, unit=unit) for name, values in rows.items()
    ]
    found = {one.row: one for one in crossovers(make(*runs, grid=grid))}
    assert list(found) == ["Linear attention", "Scan"]
    assert found["Scan"].attention == "Attention, Flash attention"
    theirs = fastest(1.0, 2.0), fastest(5.0, 4.0), None
    assert found["Scan"].points == tuple(zip(LENGTHS, rows["Scan"], theirs, strict=True))
    assert found["Scan"].start == {"time": 1024, "decode_throughput": 2048}[metric]


def test_ticks_of_every_timed_figure_are_plain_numbers():
    drawn = 0
    for name in ("mamba/figure8-inference", "h3/table7", "h3/table8", "gsa/figure4"):
        canvas = draw(ROWS.report(name, "paper"))
        assert canvas is not None
        canvas.canvas.draw()
        for ax in canvas.axes:
            texts = [label.get_text() for axis in (ax.xaxis, ax.yaxis) for label in axis.get_ticklabels(which="both")]
            assert not [text for text in texts if "^" in text or "$" in text], name
            assert [text for text in texts if text]
            drawn += 1
    assert drawn == 7
