"""A grid that times operators, end to end on an operator made for it: stored, skipped, reported as any other."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch
import yaml

from subquad.run_suite import REPOSITORY
from subquad.suite.bench.config import TimingRun
from subquad.suite.bench.series import OperatorTimer
from subquad.suite.registry import Entry
from subquad.suite.runner import WORKERS, execute, plan
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import expand
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store import storage
from tests.suite import toy_operators
from tests.suite.toy import MODELS, TASKS, interrupted
from tests.suite.toy_operators import BIG, OPERATORS, SUM

CPU = torch.device("cpu")
SHAPE = {"B": 1, "D": 2, "kind": "plain"}
LENGTHS = [16, 32, BIG, 128]
GRID = {
    "title": "sums",
    "baseline": {"bench": {"op": "running_sum", "dtype": "float32", "lengths": LENGTHS, "shape": SHAPE}},
    "sweep": {"bench.implementation": ["cumsum", "hungry"]},
    "table": {
        "rows": {name: {"bench.implementation": name} for name in ("cumsum", "hungry")},
        "columns": {f"T={length}": {"slice": f"length={length}"} for length in LENGTHS},
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
        "split": "",
        "percent": False,
    },
}
CLAIMS = """claim,left,comparison,right,source
a sum is not a thousand times its equal,cumsum | T=16 / hungry | T=16,<,1000,here
no memory is no time,hungry | T=128,>,0,here
"""


def one(**bench):
    """The one resolved run of a grid without a sweep."""
    values = {**GRID["baseline"]["bench"], "implementation": "cumsum", **bench}
    config = ExperimentConfig(title="sums", baseline={"bench": values})
    (run,) = expand("demo/sums", config, Resolver(TASKS, MODELS, OPERATORS))
    return run


@dataclass(frozen=True)
class Brief(TimingRun):
    """A run that is given a few milliseconds for the samples of each length."""


brief_timer = partial(OperatorTimer, budget_ms=5.0)
WORKERS[Brief] = Entry("tests.suite.test_timing_runs:brief_timer", "times an operator for a short time")


def brief(run):
    return Brief(**{field.name: getattr(run, field.name) for field in fields(run)})


def rows(root):
    return storage.read(storage.files([root], "demo/sums")).to_dict("records")


def timed(root, **bench):
    """The finished run, and its rows by metric and slice."""
    finished = execute(brief(one(**bench)), root, CPU)
    return finished, {(row["metric"], row["slice"]): row for row in rows(root)}


def test_a_series_is_one_run_with_a_time_for_each_length(tmp_path):
    finished, found = timed(tmp_path)
    assert finished.status == "ok"
    for length in LENGTHS:
        row = found["time", f"length={length}"]
        assert (row["status"], row["unit"], row["task"], row["model"]) == ("ok", "ms", "running_sum", "cumsum")
        assert len(row["samples"]) >= 3
        assert min(row["samples"]) <= row["value"] <= max(row["samples"])
        assert row["precision"] == "float32"
    assert found["run", ""]["status"] == "ok"
    # a timing takes all the threads that torch has
    assert found["run", ""]["threads"] == torch.get_num_threads()
    assert json.loads(found["run", ""]["config"])["bench"]["lengths"] == LENGTHS


def test_a_length_without_memory_is_a_row_and_the_series_goes_on(tmp_path):
    finished, found = timed(tmp_path, implementation="hungry", lengths=[128, 16, BIG, 32])
    assert finished.status == "ok"
    assert "oom at length=128, length=64" in finished.found
    ends = {length: found["time", f"length={length}"]["status"] for length in LENGTHS}
    assert ends == {16: "ok", 32: "ok", 64: "oom", 128: "oom"}
    assert math.isnan(found["time", "length=128"]["value"])


def test_a_wrong_result_has_no_time_and_fails_the_run(tmp_path):
    finished, found = timed(tmp_path, implementation="late")
    assert finished.status == "failed"
    assert "wrong at" in finished.error
    assert all(found["time", f"length={length}"]["status"] == "failed" for length in LENGTHS)
    assert plan([one(implementation="late")], [tmp_path])[0].todo


@pytest.mark.parametrize(
    ("name", "reason"), [("elsewhere", "ValueError: needs a CUDA device"), ("absent", "ImportError: no module")]
)
def test_what_cannot_run_here_says_so_in_its_rows_and_is_tried_again(tmp_path, name, reason):
    finished, found = timed(tmp_path, implementation=name)
    assert finished.status == found["run", ""]["status"] == "n/a"
    for length in LENGTHS:
        row = found["time", f"length={length}"]
        assert row["status"] == "n/a"
        assert reason in row["error"]
    assert plan([one(implementation=name)], [tmp_path])[0].todo


def test_backward_is_another_run_and_costs_more_than_forward(tmp_path):
    forward, both = (timed(tmp_path / str(b), backward=b, lengths=[4096]) for b in (False, True))
    assert forward[0].run.run_id != both[0].run.run_id
    assert both[1]["time", "length=4096"]["value"] > forward[1]["time", "length=4096"]["value"]


def test_an_interrupted_run_leaves_nothing_and_starts_anew(tmp_path):
    with interrupted(2) as stop:
        execute(brief(one()), tmp_path, CPU, stop=stop)
    assert not list(tmp_path.rglob("*.*"))
    _, found = timed(tmp_path)
    assert ("time", "length=16") in found


def test_progress_counts_lengths():
    seen, signs = [], []
    OperatorTimer(one(), CPU, report=seen.append, alive=lambda *sign: signs.append(sign), budget_ms=5.0)()
    assert signs == [(f"timing {progress.note}", progress.step) for progress in seen]
    assert [(p.step, p.total_steps, p.note) for p in seen] == [(i, 4, f"length={n}") for i, n in enumerate(LENGTHS)]


def test_a_raised_version_of_the_workload_is_a_new_run(monkeypatch):
    before = one().run_id
    # a default written out is the same run
    assert one(backward=False).run_id == before
    monkeypatch.setattr(toy_operators, "SUM", replace(SUM, version=2))
    assert one().run_id != before


@pytest.mark.parametrize(
    ("bench", "words"),
    [
        ({"op": "runing_sum"}, ["bench.op", "unknown operator 'runing_sum'", "did you mean 'running_sum'"]),
        ({"implementation": "cumsums"}, ["implementation", "'cumsums'", "did you mean 'cumsum'", "hungry"]),
        ({"shape": {"B": 1, "D": 2, "N": 3}}, ["shape", "takes B, D, kind", "got B, D, N"]),
        ({"shape": {**SHAPE, "T": 3}}, ["shape", "T is in lengths"]),
        ({"shape": {**SHAPE, "kind": "fancy"}}, ["shape", "kind", "one of plain", "'fancy'"]),
        ({"shape": {**SHAPE, "D": 0}}, ["shape", "D", "size of 1 or more", "got 0"]),
        ({"shape": {**SHAPE, "D": "wide"}}, ["shape", "D", "'wide'"]),
        ({"dtype": "bf16"}, ["dtype", "'bfloat16'", "'bf16'"]),
        ({"lengths": []}, ["lengths"]),
        ({"lengths": [16, 16]}, ["lengths", "different"]),
        ({"legnths": [16]}, ["legnths: unknown key", "did you mean 'lengths'"]),
        ({"op": "step", "shape": {"B": 1, "D": 2}}, ["op", "step has no length to sweep"]),
        ({"op": "step", "shape": {"B": 1, "D": 2}, "backward": True}, ["backward", "step has no gradient"]),
    ],
)
def test_what_the_operator_does_not_have_is_one_line_at_second_0(bench, words):
    with pytest.raises(ValueError, match=r"grid\.yaml: bench") as caught:
        one(**bench)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_grid_trains_or_times():
    both = ExperimentConfig(title="x", baseline={"bench": {}, "task": {"name": "parity"}})
    with pytest.raises(ValueError, match=r"baseline\.task: a grid with bench times operators"):
        expand("x", both, Resolver(TASKS, MODELS, OPERATORS))


@pytest.fixture
def call(tmp_path, command_line):
    """The command line on a folder of experiments that holds only ours: (exit code, what it printed)."""
    folder = tmp_path / "reports" / "demo" / "sums"
    folder.mkdir(parents=True)
    (folder / "grid.yaml").write_text(yaml.safe_dump(GRID, sort_keys=False))
    (folder / "claims.csv").write_text(CLAIMS)
    repository = replace(REPOSITORY, reports=tmp_path / "reports", operators=OPERATORS)

    def run(*arguments):
        done = command_line(*arguments, "--results", tmp_path / "results", repository=repository)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_run_that_times_an_operator_can_be_sent_to_a_process():
    """A workload cannot, because its functions have no names of their own."""
    run = one()
    assert pickle.loads(pickle.dumps(run)) == run


@pytest.mark.slow
def test_a_grid_of_timings_is_planned_run_skipped_reported_and_shown(call, tmp_path):
    results = tmp_path / "results"
    code, out = call("run", "demo/sums", "--dry-run")
    assert code == 0
    assert out.count("to do") == 3
    assert '"hungry"' in out
    assert not results.exists()
    assert call("run", "demo/sums", "--device", "cpu", "--only", "bench.implementation=hungry")[0] == 0
    code, out = call("run", "demo/sums", "--device", "cpu")
    assert code == 0
    assert "1 of 2 runs are already stored" in out
    written = {path: path.stat().st_mtime_ns for path in results.rglob("*.parquet")}
    assert len(written) == 2
    assert "2 of 2 runs are already stored" in call("run", "demo/sums", "--device", "cpu")[1]
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*.parquet")} == written
    code, out = call("run", "demo/sums", "--device", "cpu", "--force", "--only", "bench.implementation=hungry")
    assert "already stored" not in out
    assert sum(path.stat().st_mtime_ns > before for path, before in written.items()) == 1
    code, out = call("report", "demo/sums", "--full")
    assert code == 0, out
    lines = {tuple(line.split()[:2]): line for line in out.splitlines()}
    assert lines["hungry", "T=16"].endswith("%")
    assert any(line.split() == ["T=128", "oom"] for line in out.splitlines())
    assert "ours (ms)" in out
    # a mark after the verdict says that the repetitions of a time lie far apart, as they can on a busy machine
    assert next(line for line in out.splitlines() if "thousand times" in line).startswith("holds")
    assert next(line for line in out.splitlines() if "no memory is no time" in line).startswith("not run")
    code, out = call("show", next(iter(written)).stem)
    assert code == 0
    assert "length=128" in out


@pytest.mark.slow
def test_the_figure_of_timings_says_what_ran_out_of_memory(call, tmp_path):
    assert call("run", "demo/sums", "--device", "cpu")[0] == 0
    code, out = call("report", "demo/sums", "--format", "png")
    assert code == 0, out
    assert ">oom past 32<" in (tmp_path / "results" / "demo" / "sums" / "figure.svg").read_text()


@pytest.mark.slow
def test_a_wrong_result_is_exit_code_1_and_one_that_cannot_run_here_is_0(call):
    assert call("run", "demo/sums", "--device", "cpu", "--set", "bench.implementation=late")[0] == 1
    assert call("run", "demo/sums", "--device", "cpu", "--set", "bench.implementation=absent")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "bench.op=sum"), ["unknown operator 'sum'"]),
        (("--set", "bench.implementation=cumsums"), ["'cumsums'"]),
        (("--set", "bench.dtype=half"), ["dtype", "'half'"]),
        (("--set", "bench.shape={B: 1, D: 2, M: 3}"), ["got B, D, M"]),
        (("--set", "train.steps=3"), ["'train.steps'", "starts with bench"]),
        (("--only", "bench.implementation=hugry"), ["no run has it", "'hungry'"]),
        (("--jobs", "2"), ["--jobs 2", "disturb each other"]),
        (("--seeds", "3"), ["seeds: timings have none"]),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(call, tmp_path, arguments, words):
    code, out = call("run", "demo/sums", *arguments)
    assert code == 2
    (line,) = out.strip().splitlines()
    for word in words:
        assert word in line
    assert not (tmp_path / "results").exists()
