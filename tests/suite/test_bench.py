"""Claims about the benchmark itself, on operators made for the purpose and on the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from subquad.kernels import OPERATORS
from subquad.kernels.causal_conv1d.workloads import WORKLOAD
from subquad.kernels.workload import Cost, Implementation
from subquad.run_suite import REPOSITORY
from subquad.suite.bench import measure
from subquad.suite.bench import run as bench_run
from subquad.suite.bench.cases import Case, cases, label
from subquad.suite.bench.compare import SIDES, Comparison
from subquad.suite.bench.run import Verdict, time_cases
from subquad.suite.store import storage
from tests.suite import toy_operators

HOME = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TARGETS = {name: target for name, (target, _) in OPERATORS.items()}


def call(*arguments, home=HOME):
    command = [sys.executable, str(home / "run_suite.py"), *map(str, arguments)]
    # a user has no GPU here, so the Triton paths have no time
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(command, capture_output=True, text=True, cwd=home, timeout=240, env=environment)


def with_implementation(load):
    """One shape of the short convolution, with `planted` as its only implementation."""
    shapes = {"quick": WORKLOAD.shapes["quick"][:1]}
    return replace(WORKLOAD, implementations=(Implementation("planted", "ours", load),), shapes=shapes)


def timings(workload, shapes="short", kind="ours"):
    limits = measure.Ceilings(copy=[1e10], matmul={"bfloat16": [1e11]})
    found = list(time_cases(cases(workload, [shapes], [kind]), lambda op: workload, TARGETS, CPU, limits))
    assert [timing.case.backward for timing in found] == [False, True]
    return found


def right(**inputs):
    return WORKLOAD.reference(**inputs)


def test_a_right_implementation_is_timed_with_raw_samples_and_a_floor():
    forward, both = timings(with_implementation(lambda: right))
    assert forward.status == both.status == "ok"
    assert len(forward.samples_ms) >= 3
    assert min(forward.samples_ms) > 0
    assert both.median_ms > forward.median_ms
    assert forward.floor_ms == pytest.approx(1e3 * forward.num_bytes / 1e10)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda **inputs: right(**inputs) * 1.05,
        lambda **inputs: right(**inputs) * 0,
        lambda **inputs: right(**inputs).roll(1, dims=1),
    ],
)
def test_a_wrong_implementation_has_no_time(wrong):
    for timing in timings(with_implementation(lambda: wrong)):
        assert timing.status == "failed"
        assert f"wrong at {timing.case.label}: " in timing.reason
        assert timing.median_ms is None


def test_a_wrong_gradient_costs_only_the_backward_time():
    def detached(**inputs):
        y = right(**inputs)
        return y + (y - y.detach()) * 0.5

    forward, both = timings(with_implementation(lambda: detached))
    assert forward.status == "ok"
    assert both.status == "failed"
    assert "gradient" in both.reason


def test_a_missing_peer_is_a_reason_and_not_a_failure():
    def load():
        raise ImportError("no module named 'peer'")

    for timing in timings(with_implementation(load)):
        assert (timing.status, timing.reason) == ("n/a", "ImportError: no module named 'peer'")


@pytest.mark.parametrize(("kind", "status"), [("ours", "failed"), ("peer", "n/a")])
def test_our_own_crash_is_a_failure_and_a_peers_is_not(kind, status):
    def crash(**inputs):
        raise RuntimeError("misaligned address")

    planted = with_implementation(lambda: crash)
    (implementation,) = planted.implementations
    workload = replace(planted, implementations=(replace(implementation, kind=kind),))
    for timing in timings(workload, kind=kind):
        assert (timing.status, timing.reason) == (status, "RuntimeError: misaligned address")


def test_a_triton_kernel_without_a_gpu_is_a_reason_and_not_a_failure():
    def launch(**inputs):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    for timing in timings(with_implementation(lambda: launch)):
        assert (timing.status, timing.reason) == ("n/a", "its Triton kernel needs a GPU")


def test_a_result_that_is_not_finite_at_full_size_has_no_time():
    workload = replace(
        with_implementation(lambda: lambda **inputs: right(**inputs) / (inputs["x"].shape[1] != 300)),
        shapes={"quick": ({"B": 1, "T": 300, "D": 4, "W": 4},)},
    )
    found = timings(workload, "quick")
    assert [timing.status for timing in found] == ["failed", "failed"]
    assert "not finite at full size" in found[0].reason


def test_a_copy_reads_and_writes_each_byte_and_a_product_adds_and_multiplies(monkeypatch):
    results = []

    def one_millisecond(call, device):
        results.append(call())
        return [1.0]

    monkeypatch.setattr(measure, "COPY_BYTES", 16 * 1000)
    monkeypatch.setattr(measure, "sample", one_millisecond)
    found = measure.ceilings(CPU)
    assert found.copy == [2 * 1000 / 1e-3]
    assert results[0].numel() * results[0].element_size() == 1000
    assert found.matmul == {"bfloat16": [2 * 512**3 / 1e-3], "float32": [2 * 512**3 / 1e-3]}
    assert [result.dtype for result in results[1:]] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("dtype", "rate"), [("bfloat16", 4e3), ("float16", 4e3), ("float32", 1e3), ("float64", 1e3)])
def test_the_floor_is_the_slowest_of_bytes_products_and_exponentials(dtype, rate):
    limits = measure.Ceilings(
        copy=[50.0, 100.0, 900.0], matmul={"bfloat16": [1.0, 4e3, 9e3], "float32": [1e3]}, exponentials=10.0
    )
    assert limits.floor_ms(Cost(200, 4000, matrix=True), dtype) == 1e3 * max(2.0, 4000 / rate)
    assert limits.floor_ms(Cost(200, 40_000, matrix=True), dtype) == 1e3 * 40_000 / rate
    assert limits.floor_ms(Cost(200, 40_000, matrix=False), dtype) == 1e3 * 2.0
    assert limits.floor_ms(Cost(200, 40, matrix=False, num_exponentials=30), dtype) == 1e3 * 3.0


def test_the_time_of_a_sleep_is_the_sleep():
    slept = []

    def call():
        start = time.perf_counter()
        time.sleep(0.01)
        slept.append(1e3 * (time.perf_counter() - start))

    times = measure.sample(call, CPU, budget_ms=60)
    # on a busy machine, a sleep takes longer than was asked for
    assert len(times) == len(slept) - 1
    assert min(times) >= 10
    assert 0 <= min(found - real for found, real in zip(times, slept[1:], strict=True)) < 1


def test_a_case_survives_the_way_to_a_worker():
    (case, *_) = cases(WORKLOAD, ["paper"], ["ours"])
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    assert case.slice == "B=8,T=2048,D=2048,W=4,dtype=bfloat16,pass=forward"
    assert label({"B": 8, "decay": "key"}) == "B8 key"


@pytest.fixture
def slower_checkout(tmp_path):
    """A checkout of its own in which the plain convolution sleeps."""
    home = tmp_path / "checkout"
    for name in ("kernels", "suite", "tasks", "models", "reports"):
        shutil.copytree(HOME / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(HOME / "run_suite.py", home / "run_suite.py")
    path = home / "kernels" / "causal_conv1d" / "chunked.py"
    text = path.read_text()
    begin = "    length, taps = x.shape[1], weight.shape[1]\n"
    assert begin in text
    path.write_text(text.replace(begin, begin + "    __import__('time').sleep(0.01)\n"))
    return home


@pytest.mark.slow
def test_compare_fails_where_this_tree_is_the_slower_one(slower_checkout, tmp_path):
    done = call(
        "bench", "causal_conv1d", "--device", "cpu", "--compare", HOME, "--results", tmp_path, home=slower_checkout
    )
    assert done.returncode == 1, done.stdout + done.stderr
    short = label(WORKLOAD.short(WORKLOAD.shapes["quick"][0]))
    (line,) = (
        line for line in done.stdout.splitlines() if re.split(" {2,}", line)[:2] == [f"{short} bf16 fwd", "torch"]
    )
    assert "slower" in line
    frame = storage.read(storage.files([tmp_path], "kernels"))
    ratios = frame[(frame["metric"] == "ratio") & (frame["model"] == "torch")]
    assert all(ratios["value"] > 2)
    assert set(frame["metric"]) == {"time", "ratio"}


@pytest.mark.parametrize(("ratio", "word", "code"), [(2.0, "slower", 1), (0.5, "faster", 0), (1.0, "same", 0)])
def test_compare_fails_for_slower_cases_alone(command_line, monkeypatch, tmp_path, ratio, word, code):
    found = Comparison(ratio, ratio, ratio, 0.01, {side: [1.0, 1.0] for side in SIDES}, [ratio])
    monkeypatch.setattr(bench_run, "compare_trees", lambda wanted, *_, **__: (Verdict(case, found) for case in wanted))
    done = command_line("bench", "causal_conv1d", "--device", "cpu", "--compare", HOME, "--results", tmp_path)
    assert done.returncode == code, done.stderr
    assert word in done.stdout


def test_bench_writes_rows_that_the_report_shows(command_line, tmp_path):
    repository = replace(REPOSITORY, operators=toy_operators.OPERATORS)
    done = command_line(
        "bench", "running_sum", "--device", "cpu", "--against", "peers", "--results", tmp_path, repository=repository
    )
    # one of the implementations is wrong on purpose
    assert done.returncode == 1, done.stderr
    frame = storage.read(storage.files([tmp_path], "kernels"))
    times = frame[(frame["metric"] == "time") & (frame["task"] == "running_sum")].set_index("model")["status"]
    assert times.groupby("model").first().to_dict() == {
        "absent": "n/a",
        "cumsum": "ok",
        "elsewhere": "n/a",
        "hungry": "ok",
        "late": "failed",
    }
    assert {"copy_bandwidth", "matmul_rate", "floor_time"} <= set(frame["metric"])
    # these operators are none of the kernels folder
    assert set(frame[frame["status"] == "ok"]["operators"].dropna()) == {"{}"}
    measured = frame[(frame["metric"] == "time") & (frame["status"] == "ok")]
    assert all(len(samples) >= 3 for samples in measured["samples"])
    report = command_line("report", "kernels", "--results", tmp_path)
    assert report.returncode == 0, report.stderr
    assert f"{measured['value'].iloc[0]:.4f}" in report.stdout


@pytest.mark.slow
def test_bench_times_a_real_operator_beside_its_peers(command_line, tmp_path):
    done = call("bench", "causal_conv1d", "--device", "cpu", "--against", "peers", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    frame = storage.read(storage.files([tmp_path], "kernels"))
    times = frame[frame["metric"] == "time"]
    assert set(times["status"]) == {"ok", "n/a"}
    measured = times[times["status"] == "ok"]
    assert all(len(samples) >= 3 for samples in measured["samples"])
    assert {"copy_bandwidth", "matmul_rate", "floor_time"} <= set(frame["metric"])
    report = command_line("report", "kernels", "--results", tmp_path)
    assert report.returncode == 0, report.stderr
    assert f"{measured['value'].iloc[0]:.4f}" in report.stdout
    assert "No module named 'causal_conv1d'" in report.stdout


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_timed(command_line, tmp_path):
    (tmp_path / "file").touch()
    done = command_line("bench", "causal_conv1d", "--results", tmp_path / "file" / "results")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --results {tmp_path}/file/results: cannot be written (")
    assert "cases on" not in done.stdout
