"""`status` tells where every run stands, and `run --retry-failed` repeats those that ended with an error."""

import re

import pytest
import torch

from subquad.suite.environment import REPOSITORY, with_extra
from subquad.suite.executors.contract import PACKAGES, choose
from subquad.suite.options import options_in
from subquad.suite.runner import execute
from subquad.suite.store import endings, storage
from subquad.suite.store.claims import Claims, claim_path
from subquad.suite.store.status import standings, summary
from tests.suite.toy import make_run

CPU = torch.device("cpu")


def test_every_run_has_one_state(tmp_path):
    ok, failed, running, interrupted = (
        make_run(),
        make_run(model={"fault": "error"}),
        make_run(seed=1),
        make_run(seed=2),
    )
    to_do, abandoned = make_run(seed=3), make_run(seed=4)
    runs = [ok, failed, running, interrupted, to_do, abandoned]
    for run in (ok, failed):
        execute(run, tmp_path, CPU)
    with pytest.raises(KeyboardInterrupt):
        execute(interrupted, tmp_path, CPU, stop=lambda: True)
    # the claim of a process that ended long ago, on a machine that is not there any more
    path = claim_path(tmp_path, abandoned.experiment, abandoned.scale, abandoned.run_id)
    path.write_text('{"host": "node9", "pid": 1, "expiry_s": 0.0}')
    with Claims(tmp_path) as claims:
        assert claims.take(running, "cuda:1") is None
        found = standings(runs, tmp_path)
    assert [standing.state for standing in found] == ["ok", "failed", "running", "interrupted", "to do", "to do"]
    assert found[1].detail == "RuntimeError: planted fault"
    assert "cuda:1, since 20" in found[2].detail
    assert summary(found) == "1 running, 1 ok, 1 failed, 1 interrupted, 2 to do"


def test_a_repeated_run_is_running_although_it_is_stored(tmp_path):
    run = make_run()
    execute(run, tmp_path, CPU)
    with Claims(tmp_path) as claims:
        claims.take(run)
        assert [standing.state for standing in standings([run], tmp_path)] == ["running"]
    assert [standing.state for standing in standings([run], tmp_path)] == ["ok"]


FEW = ("train.steps=2", "train.eval_every=2", "train.batch_size=4", "task.num_train=8", "task.num_test=8")
ONE = ("quickstart", "--only", "model.name=linear-attention", "--only", "model.d_model=8", "--seeds", 2)


def test_only_runs_that_failed_are_retried(command_line, tmp_path):
    asked = (*ONE, *(word for setting in FEW for word in ("--set", setting)), "--results", tmp_path)
    assert command_line("run", *asked, "--only", "seed=0", "--device", "cpu").returncode == 0
    (path,) = tmp_path.rglob("*.parquet")
    rows = storage.read([path]).to_dict("records")
    (row,) = (row for row in rows if row["metric"] == "run")
    row.update(samples=None, status="oom", error="planted: out of memory")
    storage.write(path, [row])
    shown = command_line("status", *asked).stdout
    assert "2 runs, 1 oom, 1 to do" in shown
    assert "planted: out of memory" in shown
    planned = command_line("run", *asked, "--retry-failed", "--dry-run", "--device", "cpu").stdout
    assert "1 run, 1 to do" in planned
    assert "1 of 2 runs" in command_line("run", *asked, "--retry-failed", "--device", "cpu").stdout
    assert "2 runs, 1 ok, 1 to do" in command_line("status", *asked).stdout
    again = command_line("run", *asked, "--retry-failed", "--device", "cpu")
    assert again.returncode == 0
    assert "0 of 2 runs" in again.stdout


def test_the_plan_and_the_status_tell_an_interrupted_run_alike(command_line, tmp_path):
    asked = (*ONE, *(word for setting in FEW for word in ("--set", setting)), "--results", tmp_path)
    planned = command_line("run", *asked, "--dry-run", "--device", "cpu").stdout
    (first, _) = re.findall(r"^([0-9a-f]{16})  to do  ", planned, re.MULTILINE)
    path = storage.checkpoint_path(tmp_path, "quickstart", "paper", first)
    path.parent.mkdir(parents=True)
    path.touch()
    planned = command_line("run", *asked, "--dry-run", "--device", "cpu").stdout
    assert f"{first}  interrupted  " in planned
    assert "2 runs, 2 to do, 1 interrupted" in planned
    assert "2 runs, 1 interrupted, 1 to do" in command_line("status", *asked).stdout
    anew = command_line("run", *asked, "--dry-run", "--force", "--device", "cpu").stdout
    assert f"{first}  to do  " in anew


def test_an_option_that_is_given_twice_is_refused():
    with pytest.raises(ValueError, match="--executor-options address is given twice; give it once"):
        choose("ray", ["address=a", "address=b"])
    with pytest.raises(ValueError, match="--set num_train is given twice"):
        options_in(["num_train=5", "num_train=7"], "--set")


@pytest.fixture
def without_clusters(monkeypatch):
    """An environment in which the packages of the executors are not installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.parametrize("executor", PACKAGES)
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(command_line, without_clusters, executor):
    done = command_line("run", "quickstart", "--executor", executor)
    assert done.returncode == 2
    assert re.fullmatch(
        rf"error: --executor {executor} needs .* pip install -e '\.\[{executor}\]'\.", done.stderr.strip()
    )


def test_a_checkout_elsewhere_is_named_by_the_command_that_installs_its_extras(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert with_extra("ray") == f"pip install -e '{REPOSITORY}[ray]'"


def test_a_damaged_file_is_listed_by_status_stops_run_and_is_replaced_by_force(command_line, tmp_path):
    asked = (*ONE, *(word for setting in FEW for word in ("--set", setting)), "--results", tmp_path)
    run = ("run", *asked, "--only", "seed=0", "--device", "cpu")
    assert command_line(*run).returncode == 0
    (path,) = tmp_path.rglob("*.parquet")
    other = path.with_stem("0" * 16)
    path.rename(other)
    path.write_bytes(other.read_bytes()[:-9])
    done = command_line("status", *asked)
    assert done.returncode == 0
    assert re.search(rf"^damaged .*{path}: damaged or not a parquet file", done.stdout, re.MULTILINE)
    assert "2 runs, 1 damaged, 1 to do" in done.stdout
    # a file that is no run of the grid is none of its business, but of the estimate's
    assert done.stderr == f"skipped: {other}: its rows are those of the run {path.stem}; move the file away\n"
    done = command_line(*run)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {path}: damaged or not a parquet file")
    assert command_line(*run, "--force").returncode == 0
    assert endings.ending(path).status == "ok"
