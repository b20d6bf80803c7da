"""The command line as a user meets it: fast to list, strict at second 0, safe to interrupt."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from suite import storage

HOME = Path(__file__).resolve().parents[2]
TRAIN = ("--set", "train.steps=60", "--set", "train.eval_every=20")


def call(*arguments, cwd=None, **options):
    command = [sys.executable, str(HOME / "run_suite.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd or HOME, timeout=240, env=environment, **options
    )


@pytest.mark.parametrize("arguments", [("--help",), ("list",), ("list", "models"), ("run", "--help")])
def test_help_and_list_do_not_import_torch(arguments):
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['run_suite.py', *{list(arguments)!r}]\n"
        "try:\n    runpy.run_path('run_suite.py', run_name='__main__')\nexcept SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_list_names_everything():
    out = call("list").stdout
    for name in ("mqar", "transformer++", "dss-exp-no-scale", "h3/table2"):
        assert name in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "h3/tabel2"), ["unknown experiment 'h3/tabel2'", "did you mean 'h3/table2'"]),
        (("report", "quikstart"), ["unknown experiment 'quikstart'", "'quickstart'"]),
        (("run", "quickstart", "--scale", "huge"), ["unknown scale 'huge'"]),
        (("run", "quickstart", "--set", "train.stepz=3"), ["stepz", "did you mean 'steps'"]),
        (("run", "quickstart", "--set", "model.name=gsaa"), ["unknown model 'gsaa'", "'gsa'"]),
        (("run", "quickstart", "--set", "task.num_kv_pairs=1000"), ["num_kv_pairs=1000", "length"]),
        (("run", "quickstart", "--set", "task.length=sixty"), ["length", "sixty"]),
        (("run", "quickstart", "--set", "model.init_std=.nan"), ["--set", "model.init_std=.nan", "finite number"]),
        (("run", "quickstart", "--only", "model.name=rwkv"), ["--only model.name=rwkv", "no run has it"]),
        (("run", "quickstart", "--device", "tpu"), ["--device"]),
        (("run", "quickstart", "--device", "cuda:99"), ["--device"]),
        (("show", "ffffffff"), ["ffffffff"]),
        (("run", "speech-commands/sample", "--data", "nowhere"), ["nowhere"]),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(tmp_path, arguments, words):
    if arguments[0] in ("run", "report"):
        arguments = (*arguments, "--results", tmp_path)
    done = call(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    for word in words:
        assert word in line
    assert not list(tmp_path.rglob("*.parquet"))


def test_heads_that_do_not_divide_are_refused_before_any_run(tmp_path):
    arguments = ("run", "quickstart", "--only", "model.name=gla", "--set", "model.num_heads=3", "--results", tmp_path)
    done = call(*arguments)
    assert done.returncode == 2
    assert "num_heads=3" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    done = call("run", "h3/table2", "--dry-run", "--results", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("to do") == 25
    assert "train.lr = 0.0005" in done.stdout
    assert not list(tmp_path.iterdir())


def quick(results, *more):
    one = ("run", "quickstart", "--only", "model.name=linear-attention", "--seeds", 1, "--device", "cpu", *TRAIN)
    return (*one, "--results", results, *more)


def rows(results):
    frame = storage.read(storage.files([results], "quickstart"))
    frame = frame[frame["metric"].isin(["accuracy", "loss"])]
    return frame[["run_id", "metric", "split", "slice", "step", "value"]].to_dict("records")


@pytest.mark.slow
def test_a_grid_runs_is_skipped_reported_and_shown(tmp_path):
    done = call(*quick(tmp_path))
    assert done.returncode == 0, done.stderr
    again = call(*quick(tmp_path))
    assert "already stored" in again.stdout
    report = call("report", "quickstart", "--results", tmp_path)
    assert report.returncode == 0, report.stderr
    assert "Linear attention" in report.stdout
    run_id = rows(tmp_path)[0]["run_id"]
    shown = call("show", run_id[:8], "--results", tmp_path)
    assert run_id in shown.stdout
    assert "accuracy" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_grid_continues_with_the_same_numbers(tmp_path, number):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert call(*quick(whole)).returncode == 0
    command = [sys.executable, str(HOME / "run_suite.py"), *map(str, quick(broken))]
    process = subprocess.Popen(command, cwd=HOME, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
    time.sleep(6)
    process.send_signal(number)
    process.wait(timeout=60)
    if number == signal.SIGINT and not list(broken.rglob("*.parquet")):
        assert process.returncode == 130
    assert call(*quick(broken)).returncode == 0
    assert rows(broken) == rows(whole)


def test_runs_side_by_side_give_the_rows_of_runs_in_sequence(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    options = ("--set", "train.steps=3", "--set", "train.eval_every=3", "--set", "train.batch_size=4")
    base = ("run", "quickstart", "--only", "model.name=linear-attention", "--device", "cpu", *options, "--seeds", 2)
    assert call(*base, "--results", one).returncode == 0
    done = call(*base, "--results", two, "--jobs", 2)
    assert done.returncode == 0, done.stderr
    assert sorted(map(str, rows(one))) == sorted(map(str, rows(two)))


def test_results_of_another_schema_are_refused_by_name(tmp_path):
    path = tmp_path / "quickstart" / "paper" / "0123.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not parquet")
    done = call("report", "quickstart", "--results", tmp_path)
    assert done.returncode == 2
    assert "0123.parquet" in done.stderr


def test_doctor_says_what_works_and_why_the_rest_does_not():
    done = call("doctor")
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    assert "GPU" in done.stdout
