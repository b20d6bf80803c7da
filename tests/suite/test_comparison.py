"""`compare`: what counts as a difference between two sets of rows, and what is never compared."""

import math
import statistics
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.run_suite import REPOSITORY
from subquad.suite.commands.compare import number
from subquad.suite.store import storage
from subquad.suite.store.comparison import collect, compare, permutation_p
from subquad.suite.store.noise import error_of_median
from tests.stored import store

LOW, HIGH = [0.5, 0.52, 0.48, 0.51], [0.9, 0.88, 0.91, 0.93]


def write(root, values, *, version=1, metric="accuracy", unit="fraction", lr=0.1, **columns):
    """Stores one run a seed with one measurement each."""
    for seed, value in enumerate(values):
        config = {"task": {"name": "mqar", "version": version, "data": str(root)}, "train": {"lr": lr}, "seed": seed}
        # a metric is that of a run of its own, whose settings differ in what `compare` leaves out
        config |= {"model": {"name": "gla", "version": version}, "plugins": {"model": f"mine {version} {metric}"}}
        row = {"metric": metric, "unit": unit, "value": value, "split": "test", "slice": "", **columns}
        store(root, [row], config, experiment="toy/x", device="NVIDIA H200")


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1471300.0, 5, "1.4713M"),
        (999_999.0, 4, "1M"),
        (-25_000_000_000.0, 2, "-25G"),
        (99_999.4, 5, "99999"),
        (0.5, 5, "0.5"),
        (-2.5e-5, 2, "-0.000025"),
        (0.0, 5, "0"),
    ],
)
def test_a_number_of_a_comparison_has_no_exponent(value, digits, text):
    assert number(value, digits) == text


@given(st.floats(-1e17, 1e17).filter(lambda value: abs(value) > 1e-9), st.integers(2, 6))
def test_a_number_of_a_comparison_keeps_its_digits(value, digits):
    text = number(value, digits)
    assert "e" not in text
    scale = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}.get(text[-1], 1.0)
    # half of the last of its digits, and of the decimals that are printed at most
    assert math.isclose(float(text.rstrip("KMGTP")) * scale, value, rel_tol=6 * 10.0**-digits, abs_tol=1e-12)


@pytest.fixture
def sides(tmp_path):
    return tmp_path / "a", tmp_path / "b"


def compared(sides):
    return compare(*(collect(list(side.rglob("*.parquet")), every_metric=False) for side in sides))


@pytest.mark.parametrize(("n", "m"), [(3, 3), (4, 4), (4, 6), (2, 5)])
def test_p_is_that_of_scipy(n, m):
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(n * m)
    a, b = random.normal(size=n), random.normal(0.8, size=m)
    theirs = stats.permutation_test(
        (a, b), lambda x, y: abs(np.mean(x) - np.mean(y)), alternative="greater", n_resamples=np.inf
    )
    assert permutation_p(a, b) == pytest.approx(theirs.pvalue)


def test_many_seeds_are_tested_by_random_splits():
    random = np.random.default_rng(0)
    a, b = random.normal(size=30), random.normal(size=30)
    # the split that was observed is one of those, so p is never 0
    assert 0 < permutation_p(a, b + 2) < 1e-3
    assert permutation_p(a, b - statistics.fmean(b) + statistics.fmean(a)) > 0.9


def test_equal_sides_seldom_differ():
    random = np.random.default_rng(0)
    found = [permutation_p(*random.choice([0.1, 1.0], size=(2, 5))) for _ in range(400)]
    assert np.mean(np.array(found) <= 0.05) <= 0.07


def test_runs_with_equal_settings_belong_together_whatever_their_versions(command_line, sides):
    write(sides[0], LOW)
    write(sides[1], HIGH, version=2, device="NVIDIA H200, 2 runs at a time")
    done = command_line("compare", *sides)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.lstrip().startswith("toy/x"))
    assert line.split()[-4:] == ["4", "0.029", "0.029", "better"]
    assert "+0.4025" in line
    assert "task_version: 1 in A, 2 in B" in done.stdout
    assert "device: NVIDIA H200 in A, NVIDIA H200, 2 runs at a time in B" in done.stdout
    assert "worse" in command_line("compare", *reversed(sides)).stdout


def test_of_two_runs_of_one_seed_the_last_value_of_the_newer_one_counts(sides):
    write(sides[0], [0.5], started_at="2026-03-01", step=30)
    write(sides[1], [0.7], version=2, started_at="2026-03-02", step=20)
    (older,), (newer,) = (list(side.rglob("*.parquet")) for side in sides)
    (row,) = storage.load(newer).to_pylist()
    storage.write(newer, [row, {**row, "step": 10, "value": 0.6}])
    for paths in ([older, newer], [newer, older]):
        (seeds,) = collect(paths, every_metric=False).values.values()
        assert {seed: value.value for seed, value in seeds.items()} == {0: 0.7}


def test_other_settings_do_not(command_line, sides):
    write(sides[0], LOW)
    write(sides[1], HIGH, lr=0.2)
    done = command_line("compare", *sides)
    assert done.returncode == 2
    assert "no measurement of" in done.stderr


def test_three_seeds_are_too_few_and_equal_values_are_identical(command_line, sides):
    write(sides[0], LOW[:3])
    write(sides[1], HIGH[:3])
    assert "too few seeds" in command_line("compare", *sides).stdout
    done = command_line("compare", sides[0], sides[0], "--format", "md")
    assert "- not shown: 1 identical values" in done.stdout
    assert "| identical |" in command_line("compare", sides[0], sides[0], "--format", "md", "--all").stdout


@pytest.mark.parametrize("only", [(), ("--only", "metric=accuracy"), ("--only", "train.lr=0.1")])
def test_seeds_that_are_left_after_failures_are_not_compared(command_line, sides, only):
    """Four of eight runs diverged, and the others were good: such a mixer is not the better one of two."""
    write(sides[0], LOW)
    write(sides[1], HIGH)
    for seed in range(4, 8):
        config = {"task": {"name": "mqar", "version": 1}, "train": {"lr": 0.1}, "seed": seed}
        config |= {"model": {"name": "gla", "version": 1}}
        row = {"metric": "run", "value": None, "status": "diverged", "split": "", "slice": ""}
        store(sides[1], [row], config, experiment="toy/x", device="NVIDIA H200")
    done = command_line("compare", *sides, *only)
    assert "1 seeds lost" in done.stdout, done.stderr
    assert "4 runs of B ended with an error" in done.stdout
    assert "better" not in done.stdout
    assert "0.029" not in done.stdout


def test_a_loss_that_falls_is_better(command_line, sides):
    write(sides[0], HIGH, metric="loss", unit="nats")
    write(sides[1], LOW, metric="loss", unit="nats")
    assert "better" in command_line("compare", *sides).stdout


def test_a_rate_that_grows_is_better_whatever_its_name(command_line, sides):
    write(sides[0], [1.0], metric="train_steps", unit="steps/s", samples=[1.0] * 9)
    write(sides[1], [2.0], metric="train_steps", unit="steps/s", samples=[2.0] * 9)
    assert "better" in command_line("compare", *sides, "--only", "metric=train_steps").stdout


def test_a_metric_of_unknown_direction_only_differs(command_line, sides):
    write(sides[0], LOW, metric="surprise", unit="")
    write(sides[1], HIGH, metric="surprise", unit="")
    (line,) = (
        line for line in command_line("compare", *sides).stdout.splitlines() if line.lstrip().startswith("toy/x")
    )
    assert line.split()[-4:] == ["4", "0.029", "0.029", "differs"]


@pytest.mark.parametrize(
    ("factor", "jitter", "verdict"),
    [(1.05, 0.001, "worse"), (0.95, 0.001, "better"), (1.02, 0, "same"), (1.05, 0.3, "same")],
)
def test_speeds_differ_beyond_three_percent_and_their_noise(command_line, sides, factor, jitter, verdict):
    random = np.random.default_rng(0)
    for side, time in zip(sides, (2.0, 2.0 * factor), strict=True):
        samples = (time * (1 + jitter * random.standard_normal(50))).tolist()
        write(side, [time], metric="time", unit="ms", samples=samples)
    done = command_line("compare", *sides, "--format", "md")
    assert f"| x {factor:.3f} | 1 |  |  | {verdict} |" in done.stdout


@pytest.mark.parametrize(("noisy", "verdict"), [(None, "worse"), (0, "same"), (1, "same")])
def test_the_noise_of_a_speed_is_also_that_between_the_runs_of_either_side(sides, noisy, verdict):
    for side, time in enumerate((1.0, 1.05)):
        spread = 0.3 if side == noisy else 0.0
        write(sides[side], [time - spread, time, time + spread], metric="time", unit="ms", samples=[time] * 9)
    (line,) = compared(sides).lines
    assert line.verdict == verdict


def test_one_run_out_of_line_makes_no_speed_better(sides):
    """Three of four runs are as fast as before; the fourth had the device for itself."""
    write(sides[0], [271.0], metric="train_throughput", unit="tokens/s", samples=[271.0] * 9)
    write(sides[1], [280.0, 823.0, 281.0, 279.0], metric="train_throughput", unit="tokens/s", samples=[280.0] * 9)
    (line,) = compared(sides).lines
    assert (line.means[1] > 1.5 * line.means[0], line.verdict) == (True, "same")


def test_speeds_of_a_processor_are_those_of_its_threads(sides):
    for side, threads in zip(sides, (1, 2), strict=True):
        write(side, [1.0], metric="time", unit="ms", device="a processor (2 cores)", threads=threads)
    found = compared(sides)
    assert found.lines == []
    assert found.other_devices == [({"a processor (2 cores), 1 threads"}, {"a processor (2 cores), 2 threads"})]


def test_what_was_tested_and_what_one_side_has_alone_is_counted(sides):
    for side, values in zip(sides, (LOW, HIGH), strict=True):
        write(side, values)
        write(side, LOW, metric="loss", unit="nats")
        write(side, values[:3], metric="error")
        write(side, values, metric="time", unit="ms")
    for side, metric in ((0, "f1"), (1, "recall"), (1, "precision")):
        write(sides[side], LOW, metric=metric)
    found = compared(sides)
    # values that are equal, too few or speeds are not tested
    assert (len(found.lines), len(found.tested), found.only_a, found.only_b) == (4, 1, 1, 2)
    assert found.corrected == {line.measure: line.p for line in found.tested}


def test_slices_and_ratios_are_compared_only_where_all_metrics_are_asked_for(sides):
    root, _ = sides
    write(root, LOW)
    write(root, LOW, metric="loss", unit="nats", slice="length=6")
    write(root, LOW, metric="entropy", unit="ratio")
    write(root, [None], metric="run", unit="", status="n/a")
    paths = sorted(root.rglob("*.parquet"))
    found = collect(paths, every_metric=False)
    assert {one.metric for one in found.values} == {"accuracy"}
    assert {one.metric for one in collect(paths, every_metric=True).values} == {"accuracy", "loss", "entropy"}
    assert found.failed == 0, "what cannot run on a device has not failed"


def test_speeds_of_two_devices_are_never_compared(command_line, sides):
    write(sides[0], [1.0], metric="time", unit="ms")
    write(sides[1], [2.0], metric="time", unit="ms", device="another GPU")
    done = command_line("compare", *sides)
    assert done.returncode == 2
    assert "NVIDIA H200" in done.stderr
    assert "another GPU" in done.stderr
    for side, values in zip(sides, (LOW, HIGH), strict=True):
        write(side, values)
    done = command_line("compare", *sides)
    assert done.returncode == 0
    assert "not compared: 1 speeds" in done.stdout
    assert " time " not in done.stdout


def test_rows_of_a_revision_are_read_from_git(command_line, sides, tmp_path):
    home = tmp_path / "home"
    write(home / "mine", LOW)
    git = ["git", "-C", str(home), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "rows"]):
        subprocess.run([*git, *command], check=True)
    repository = replace(REPOSITORY, reports=home / "reports", reference=home / "mine")
    write(sides[1], HIGH)
    for side in ("HEAD:mine", "HEAD"):
        assert "better" in command_line("compare", side, sides[1], repository=repository).stdout
    for side, words in (
        ("HEAD:yours", "has no folder yours"),
        ("nowhere", "neither a folder of results nor a revision"),
    ):
        done = command_line("compare", side, sides[1], repository=repository)
        assert done.returncode == 2
        assert words in done.stderr


def test_a_side_without_rows_is_reported_before_the_other_is_read(command_line, sides):
    a, b = sides
    write(a, LOW)
    (a / "damaged.parquet").write_text("nothing")
    b.mkdir()
    done = command_line("compare", a, b)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: compare: no rows below {b}; `run EXPERIMENT --results {b}` makes some\n"
    assert "neither a folder of results nor a revision" in command_line("compare", a, b / "none").stderr
    write(b, HIGH)
    done = command_line("compare", a, b)
    # it is named and left out
    assert done.stderr.startswith(f"skipped: {a}/damaged.parquet: damaged or not a parquet file")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "better" in done.stdout


def test_every_file_is_read_once_also_with_filters(sides, monkeypatch):
    write(sides[0], LOW)
    write(sides[0], HIGH, metric="loss", unit="nats", split="valid")
    write(sides[0], [None], metric="run", unit="", status="failed")
    paths, read, pieces = sorted(sides[0].rglob("*.parquet")), [], storage.pieces
    monkeypatch.setattr(storage, "pieces", lambda path, *rest: read.append(path) or pieces(path, *rest))
    found = collect(paths, every_metric=False)
    assert sorted(read) == paths
    assert ([one.metric for one in found.values], found.failed) == (["accuracy"], 1)
    assert found.facts["device"] == {"NVIDIA H200": 9}
    found = collect(paths, ["split=valid", "train.lr=0.1"], every_metric=True)
    assert sorted(read) == sorted(paths * 2)
    assert [one.metric for one in found.values] == ["loss"]
    with pytest.raises(ValueError, match=r"--only split=tset: no row has it \(did you mean 'test'\?\)"):
        collect(paths, ["split=tset"], every_metric=True)


def test_progress_is_told_and_does_not_depend_on_how_many_files_are_read_together(sides, monkeypatch):
    write(sides[0], LOW)
    write(sides[0], HIGH, lr=0.2, device="NVIDIA H100")
    paths, done = sorted(sides[0].rglob("*.parquet")), []
    whole = collect(paths, every_metric=False)
    monkeypatch.setattr(storage, "FILES_AT_ONCE", 3)
    assert collect(paths, every_metric=False, watch=done.append) == whole
    assert done == [3, 6, 8]
    assert whole.facts["device"] == {"NVIDIA H200": 4, "NVIDIA H100": 4}


def test_the_error_of_a_median_shrinks_with_the_root_of_the_count():
    assert error_of_median([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.2533 * 1.4826 / math.sqrt(5))
