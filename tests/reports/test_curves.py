"""Tests curves of rows against a cost: every seed is drawn at what it had spent, and a tie is drawn as one."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.colors import to_hex

from subquad.reports.render import Board, render
from subquad.reports.render.costs import curves_of
from subquad.reports.render.curves import spread
from subquad.reports.render.draw import draw
from subquad.reports.render.page import page_data
from subquad.reports.render.seeds import BAND
from subquad.suite.metrics import SPENT
from subquad.suite.options import parse
from subquad.suite.settings.report_spec import FigureSpec
from subquad.suite.store import storage
from tests.reports.browser import browser, needs_browser
from tests.reports.drawn import words
from tests.reports.made import grid, make_run

MINUTES = {"metric": "train_seconds", "label": "minutes"}
OPERATIONS = {"metric": "train_flops", "label": "operations (10^15)"}
NONE = {
    "expected": "row,column,value,unit,better,seeds,hardware,note,source\n",
    "claims": "claim,left,comparison,right,source\n",
}


def run_of(model, seed, points, *, spent=SPENT, budget="seconds", stop=None, **options):
    """A run with (step, seconds, accuracy) of each evaluation, in the order in which they are stored."""
    valid = {step: value for step, _, value in points}
    train = {"budget": {budget: 180.0}, "early_stop": stop}
    run = make_run(model, "induction-heads", seed, points[-1][2], valid=valid, train=train, **options)
    scale = {"train_seconds": 1.0, "train_flops": 1e13, "train_tokens": 1e3}
    return run + [
        {**run[-1], "metric": metric, "value": scale[metric] * seconds, "step": step, "status": "ok"}
        for metric in spent
        for step, seconds, _ in points
    ]


def report_of(make, *runs, costs=(MINUTES,), models=("h3", "s4d"), **options):
    table = {"rows": {name: {"model.name": name} for name in models}, "columns": {"text": {}}}
    figure = {"kind": "curves", "split": "valid", "costs": list(costs), **options}
    return make(*runs, config=grid(table=table, sweep={"model.name": list(models)}, figure=figure), **NONE)


def flat(value, first=60.0):
    """Evaluations after a half and after the whole of a budget."""
    return [(50, first, value), (100, 180.0, value)]


def test_a_value_stands_at_what_its_own_run_had_spent_after_the_same_step(make):
    """Not at the step, nor at the seconds of another seed or of a neighbouring evaluation."""
    one, two = [(10, 60.0, 0.25), (20, 120.0, 0.5)], [(7, 90.0, 0.5), (9, 150.0, 0.75)]
    report = report_of(make, run_of("h3", 0, one), run_of("h3", 1, two), costs=(MINUTES, OPERATIONS))
    minutes, operations = (curves_of(report, cost)[0].seeds for cost in report.figure.spec.costs)
    assert minutes == (((1.0, 25.0), (2.0, 50.0)), ((1.5, 50.0), (2.5, 75.0)))
    assert operations[0] == ((pytest.approx(0.6), 25.0), (pytest.approx(1.2), 50.0))
    labels = [ax.get_xlabel() for ax in draw(report).axes if ax.get_visible()]
    assert labels == ["minutes", "operations (10^15)"]


def test_rows_in_another_order_than_their_steps_give_the_same_line(make):
    points = [(10, 18.0, 0.1), (20, 36.0, 0.2), (30, 54.0, 0.3)]
    (curve,) = curves_of(report_of(make, run_of("h3", 0, [points[2], points[0], points[1]])), _cost(MINUTES))
    (seed,) = curve.seeds
    assert [x for x, _ in seed] == sorted(x for x, _ in seed)
    assert [y for _, y in seed] == pytest.approx([10.0, 20.0, 30.0])


def _cost(values):
    return parse(FigureSpec, {"kind": "curves", "costs": [values]}, "figure").costs[0]


def test_every_seed_is_a_line_and_the_median_another(make):
    runs = [run_of("h3", seed, flat(value)) for seed, value in enumerate((0.25, 0.5, 0.875))]
    axes = draw(report_of(make, *runs)).axes[0]
    lines = [tuple(map(float, line.get_ydata())) for line in axes.lines if line.get_transform() == axes.transData]
    assert lines == [(25.0, 25.0), (50.0, 50.0), (87.5, 87.5), (50.0, 50.0)]
    diverged = run_of("h3", 3, flat(0.1), status="diverged")
    report = report_of(make, *runs, diverged)
    (curve,) = curves_of(report, _cost(MINUTES))
    assert len(curve.seeds) == 3, "a run that diverged has no curve"
    assert "Diverged: runs of h3." in words(draw(report)), "and without a word the median of the others would mislead"


def test_a_seed_with_an_evaluation_less_is_compared_at_equal_cost(make):
    """By the place of the evaluation, the second of one would be averaged with a much later one of the other."""
    whole = [(10, 60.0, 0.25), (20, 120.0, 0.5), (30, 180.0, 0.75)]
    runs = [run_of("h3", 0, whole), run_of("h3", 1, [whole[0], whole[2]])]
    (curve,) = curves_of(report_of(make, *runs), _cost(MINUTES))
    assert curve.middle == ((1.0, 25.0), (2.0, 50.0), (3.0, 75.0))


def test_the_median_ends_where_the_slower_seed_does(make):
    """In equal minutes one seed took fewer operations; what it would have at more of them is not known."""
    runs = [run_of("h3", 0, [(10, 60.0, 0.25), (20, 120.0, 0.5)]), run_of("h3", 1, [(10, 30.0, 0.25), (20, 90.0, 0.5)])]
    report = report_of(make, *runs, costs=(OPERATIONS, MINUTES))
    operations, minutes = (curves_of(report, cost)[0] for cost in report.figure.spec.costs)
    assert [x for x, _ in operations.middle] == pytest.approx([0.6, 0.9])
    assert [x for x, _ in minutes.middle] == pytest.approx([1.0, 1.5, 2.0]), "this is the end of the budget"


@pytest.mark.parametrize(
    ("other", "names"),
    [((0.3, 0.4), {"h3"}), ((0.3, 0.5), {"h3", "s4d"}), ((0.5, 0.51), {"h3", "s4d"}), ((0.7, 0.8), {"s4d"})],
)
def test_a_row_that_reaches_the_seeds_of_the_best_is_a_tie_and_no_other_row_is(make, other, names):
    runs = [run_of("h3", seed, flat(value)) for seed, value in enumerate((0.5, 0.6))]
    runs += [run_of("s4d", seed, flat(value)) for seed, value in enumerate(other)]
    canvas = draw(report_of(make, *runs))
    texts = {text.get_text().split()[1]: text for text in canvas.axes[0].texts}
    assert texts.keys() == {"h3", "s4d"}
    marked = {row for row, text in texts.items() if to_hex(text.get_bbox_patch().get_facecolor(), True)[:7] == BAND}
    assert marked == names
    best = (50.0, 60.0) if "h3" in names else (70.0, 80.0)
    (band,) = canvas.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx(best)
    assert "a row that reaches there is a tie" in words(canvas)


def test_a_run_that_stopped_early_does_not_go_on_to_the_end_of_the_budget(make):
    """Its last value, held until then, would be the median of runs that were trained three times as long."""
    stop = {"threshold": 0.4}
    runs = [run_of("h3", 0, [(10, 20.0, 0.25), (20, 60.0, 0.5)], stop=stop), run_of("h3", 1, flat(0.25), stop=stop)]
    (curve,) = curves_of(report_of(make, *runs), _cost(MINUTES))
    assert curve.middle == ((1.0, 37.5),)


def test_a_column_of_a_part_of_the_rows_has_the_curves_of_that_part(make):
    """Its panel had those of all rows, with its own name above them."""
    run = run_of("h3", 0, flat(0.5))
    part = [{**row, "slice": "length=64", "value": row["value"] / 2} for row in run if row["metric"] == "accuracy"]
    table = {"rows": {"h3": {"model.name": "h3"}}, "columns": {"64": {"slice": "length=64"}}}
    figure = {"kind": "curves", "split": "valid", "costs": [MINUTES]}
    report = make(*[run + part], config=grid(table=table, sweep={"model.name": ["h3"]}, figure=figure), **NONE)
    (curve,) = curves_of(report, _cost(MINUTES))
    assert curve.seeds == (((1.0, 25.0), (3.0, 25.0)),)


def test_a_zero_is_drawn_on_axes_that_are_logarithmic_without_it(make):
    """A cost of zero ended the command with a math error, and a row of zeros stood nowhere."""
    runs = [run_of("h3", 0, [(0, 0.0, 0.0), (50, 60.0, 0.0), (100, 180.0, 0.0)]), run_of("s4d", 0, flat(0.5))]
    assert draw(report_of(make, runs[1], y_log10=True)).axes[0].get_yscale() == "log"
    report = report_of(make, *runs, y_log10=True)
    canvas = draw(report)
    assert canvas.axes[0].get_yscale() == "linear"
    assert next(curve.seeds for curve in curves_of(report, _cost(MINUTES))) == (((1.0, 0.0), (3.0, 0.0)),)
    kind = {"kind": "lines", "x": "metric.train_flops", "x_log2": True}
    zero = [{**row, "value": 0.0} if row["metric"] == "train_flops" else row for row in runs[0]]
    assert draw(report_of(make, zero, runs[1], **kind)).axes[0].get_xscale() == "linear"


def test_a_single_evaluation_is_a_mark(make):
    """A line of one point is nothing."""
    axes = draw(report_of(make, run_of("h3", 0, [(100, 180.0, 0.5)]), run_of("s4d", 0, flat(0.4)))).axes[0]
    lines = [line for line in axes.lines if line.get_transform() == axes.transData]
    assert [(len(line.get_xdata()), line.get_marker()) for line in lines] == [(1, "o"), (2, "s")]


def test_a_line_over_a_cost_names_the_rows_whose_cost_no_run_counted(make):
    """A row of older runs was missing without a word."""
    runs = [run_of("h3", 0, flat(0.5), spent=()), run_of("s4d", 0, flat(0.4)), run_of("gss", 0, [(1, 9.0, 0.7)])]
    kind = {"kind": "lines", "x": "metric.train_flops", "x_label": "operations"}
    assert "Not known: operations of h3." in words(draw(report_of(make, *runs, models=("h3", "s4d", "gss"), **kind)))


def test_seconds_of_two_devices_are_not_in_one_curve(make):
    """Under a budget of operations, a row may have runs on both devices."""
    elsewhere = {"columns": {"device": "another"}, "budget": "flops"}
    runs = [run_of("h3", seed, flat(0.5), budget="flops") for seed in (0, 1)]
    report = report_of(make, *runs, run_of("h3", 2, flat(0.6, first=90.0), **elsewhere), costs=(MINUTES, OPERATIONS))
    minutes, operations = (curves_of(report, cost)[0].seeds for cost in report.figure.spec.costs)
    assert minutes == (((1.0, 50.0), (3.0, 50.0)),) * 2
    assert len(operations) == 3
    assert "Against minutes: runs on NVIDIA H200 alone." in words(draw(report))


def test_ties_at_equal_operations_are_where_both_rows_have_come_so_far(make):
    """In equal minutes the slower row takes half of the operations: it is the best at those, and ties with no end."""
    slow = [[(10, 30.0, value), (20, 90.0, value)] for value in (0.5, 0.6)]
    runs = [run_of("s4d", seed, points) for seed, points in enumerate(slow)]
    fast = [[(10, 60.0, low), (20, 180.0, high)] for low, high in ((0.2, 0.8), (0.3, 0.9))]
    runs += [run_of("h3", seed, points) for seed, points in enumerate(fast)]
    canvas = draw(report_of(make, *runs, costs=(OPERATIONS,)))
    (band,) = canvas.axes[0].collections
    x, y = band.get_paths()[0].vertices.T
    assert (x.min(), x.max()) == pytest.approx((0.6, 0.9))
    assert (y.min(), y.max()) == pytest.approx((50.0, 60.0))
    assert all(text.get_bbox_patch().get_facecolor()[3] == 0 for text in canvas.axes[0].texts)


@pytest.mark.parametrize("values", [{"h3": (0.5, 0.6)}, {"h3": (0.5,), "s4d": (0.5,)}])
def test_one_row_or_one_seed_is_no_tie(make, values):
    canvas = draw(report_of(make, *(run_of(m, i, flat(v)) for m, found in values.items() for i, v in enumerate(found))))
    assert "tie" not in words(canvas)
    assert len(canvas.axes[0].collections) == 0
    assert len(canvas.axes[0].texts) == len(values)


def test_a_row_without_a_run_or_without_counted_operations_is_named_and_not_drawn(make):
    report = report_of(
        make,
        run_of("h3", 0, flat(0.5)),
        run_of("s4d", 0, flat(0.4), spent=("train_seconds",)),
        costs=(OPERATIONS, MINUTES),
        models=("h3", "s4d", "gss"),
    )
    canvas = draw(report)
    said = words(canvas)
    assert "Not run: gss." in said
    assert "Not known: operations (10^15) of s4d." in said
    lines = [[line for line in ax.lines if line.get_transform() == ax.transData] for ax in canvas.axes[:2]]
    assert list(map(len, lines)) == [1, 2]


def test_runs_of_one_evaluation_show_their_seeds(make):
    axes = draw(report_of(make, run_of("h3", 0, [(100, 180.0, 0.5)]))).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["h3"]


def test_where_all_runs_are_left_out_the_refusal_says_why(make, tmp_path):
    """A stranger who set another budget was told to run what had been run."""
    report = report_of(make, run_of("mine", 0, flat(0.5)))
    with pytest.raises(ValueError, match=r"nothing to draw; left out: 1 run with model.name: mine"):
        render(report, "png", tmp_path / "figure.png")


def test_curves_need_costs_that_are_counted_on_the_way():
    for costs in ([], [{"metric": "state_size", "label": "state"}]):
        with pytest.raises(ValueError, match="a metric of train_seconds, train_flops, train_tokens"):
            parse(FigureSpec, {"kind": "curves", "costs": costs}, "figure")


def test_names_beside_a_panel_do_not_cover_each_other_and_stay_inside():
    heights = [0.2, 0.1, 0.3, 0.2]
    centres = spread([0.02, 0.5, 0.51, 0.99], heights)
    edges = [(centre - height / 2, centre + height / 2) for centre, height in zip(centres, heights, strict=True)]
    assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(edges))
    assert edges[-1][1] <= 1 + 1e-9


def test_the_page_of_everything_has_every_seed_and_the_ties(make):
    runs = [
        run_of(m, seed, flat(v)) for m, vs in (("s4d", (0.1, 0.2)), ("h3", (0.5, 0.6))) for seed, v in enumerate(vs)
    ]
    report = report_of(make, *runs, costs=(MINUTES, OPERATIONS))
    kernels = storage.SCHEMA.empty_table().to_pandas()
    (found,) = page_data(Board("overview", (report,), (), kernels))["onTheWay"]
    assert (found["column"], found["value"]) == ("text", "validation accuracy")
    (minutes, curves), (operations, _) = found["costs"]
    assert (minutes, operations) == ("minutes", "operations (10^15)")
    assert [(row, len(seeds), middle[-1], tie) for row, seeds, middle, tie in curves] == [
        ("h3", 2, [3.0, 55.0], True),
        ("s4d", 2, [3.0, 15.0], False),
    ]


@pytest.mark.slow
@needs_browser
def test_the_page_draws_every_seed_and_has_the_ends_as_a_table(make, tmp_path):
    runs = [
        run_of(m, seed, flat(v)) for m, vs in (("s4d", (0.0, 0.2)), ("h3", (0.5, 0.6))) for seed, v in enumerate(vs)
    ]
    board = Board(
        "overview", (report_of(make, *runs, costs=(MINUTES, OPERATIONS)),), (), storage.SCHEMA.empty_table().to_pandas()
    )
    file = render(board, "html", tmp_path / "page.html")
    with browser(tmp_path) as tab:
        tab.open(file, "#experiment?name=demo/table2")
        assert tab.js("window.errors") == []
        svg = "one.querySelectorAll('polyline').length"
        lines = "find((one) => one.caption?.textContent.endsWith('end, text'))"
        charts = f"[...document.querySelectorAll('.charts svg')].map((one) => [one.ariaLabel, {svg}])"
        marks = "[...document.querySelectorAll('.legend path')].map((one) => one.getAttribute('d'))"
        assert tab.js(f"new Set({marks}).size") == 2, "a mark of each row, also at the ends of the medians"
        assert tab.js(f"document.querySelectorAll('.charts path[d=\"' + {marks}[0] + '\"]').length") == 2
        assert tab.js(charts) == [
            ["validation accuracy against minutes, text", 6],
            ["validation accuracy against operations (10^15), text", 6],
        ]
        assert not tab.js("/NaN|Infinity/.test(document.querySelector('.charts').outerHTML)"), "a zero on a log axis"
        rows = f"[...[...document.querySelectorAll('table')].{lines}.tBodies[0].rows]"
        assert tab.js(f"{rows}.map((line) => [...line.cells].map((cell) => cell.textContent))") == [
            ["h3", "55.00", "50.00, 60.00", "yes", "3", "1.8"],
            ["s4d", "10.00", "0.000, 20.00", "", "3", "1.8"],
        ]
