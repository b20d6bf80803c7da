"""Jobs of a scheduler carry out every run once, also when they are preempted or their command is gone."""

import contextlib
import dataclasses
import importlib.util
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from subquad.suite.executors.contract import LeftRunningError, Settings, choose
from subquad.suite.executors.local import run_all
from subquad.suite.executors.slurm import _watch, collect
from subquad.suite.runner import execute
from subquad.suite.store.claims import find_claims
from subquad.suite.store.jobs import Job, find_jobs, forget_job, keep_job, states
from subquad.suite.store.status import standings
from tests.suite.one_node_slurm import missing, one_node_slurm
from tests.suite.test_enough import enough_of, keep, select
from tests.suite.test_workers import Recording, ending, values
from tests.suite.toy import make_run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="needs submitit; pip install -e '.[slurm]'"
)
CPU = Settings(device="cpu")


def wait_until(true):
    deadline = time.monotonic() + 180
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def processes(*options):
    return choose("slurm", ["cluster=local,minutes=5", *options])


def test_two_grids_with_a_run_in_common_have_a_job_each(tmp_path):
    run = make_run()
    other = dataclasses.replace(run, experiment="another/grid")
    assert other.run_id == run.run_id
    job = Job(run.run_id, "4711_3", "slurm", "log", None)
    keep_job(tmp_path, run, job)
    assert find_jobs(tmp_path, [run]) == {run.run_id: job}
    assert find_jobs(tmp_path, [other]) == {}
    forget_job(tmp_path, other)
    assert find_jobs(tmp_path, [run]) == {run.run_id: job}
    forget_job(tmp_path, run)
    assert find_jobs(tmp_path, [run]) == {}


def test_a_scheduler_that_does_not_answer_for_a_while_ends_no_wait(tmp_path, monkeypatch):
    run = make_run()
    job = Job(run.run_id, "4711_3", "slurm", "log", None)
    execute(run, tmp_path, torch.device("cpu"))

    def no_answer(jobs):
        raise OSError("Socket timed out")

    monkeypatch.setattr("subquad.suite.executors.slurm.states", no_answer)
    (finished,) = _watch([run], {run.run_id: job}, tmp_path, Recording(), threading.Event(), None, late_s=0.0)
    assert finished.status == "ok"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Writes programs that stand for those of Slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(**texts):
        for name, text in {"srun": "exit 0", **texts}.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o700)

    return write


def test_no_variable_hides_a_job_and_no_line_of_the_cluster_is_taken_for_one(programs, monkeypatch):
    programs(squeue='echo "CLUSTER: ours"; echo "4711_0|RUNNING"; test -n "$SQUEUE_STATES" || echo "4711_1|PENDING"')
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    found = states([Job("a", "4711_0", "slurm", "log", None)])
    assert found == {"4711_0": "RUNNING", "4711_1": "PENDING"}
    programs(squeue='echo "no controller" >&2; exit 1')
    with pytest.raises(OSError, match=r"^squeue: no controller$"):
        states([Job("a", "4711_0", "slurm", "log", None)])


def test_jobs_that_the_cluster_refuses_are_an_error_in_its_words(programs, tmp_path):
    programs(sbatch='echo "sbatch: error: Invalid job array specification" >&2; exit 1')
    runs = [make_run(seed=seed) for seed in range(2)]
    with pytest.raises(ValueError, match=r"sbatch takes no array of 2 jobs \(sbatch: error: Invalid job array"):
        choose("slurm")(runs, tmp_path, Recording(), CPU)
    assert not find_jobs(tmp_path, runs)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content, run_id: b"[" * 100_000,
        lambda content, run_id: b"\xff",
        lambda content, run_id: b"{}",
        lambda content, run_id: content.replace(run_id.encode(), b"another run"),
    ],
)
def test_a_record_that_cannot_be_read_or_of_another_run_is_that_of_no_job(tmp_path, damage):
    run = make_run()
    keep_job(tmp_path, run, Job(run.run_id, "4711_3", "slurm", "log", None))
    assert find_jobs(tmp_path, [run])[run.run_id].job_id == "4711_3"
    (path,) = tmp_path.rglob("*.json")
    path.write_bytes(damage(path.read_bytes(), run.run_id))
    assert find_jobs(tmp_path, [run]) == {}


@pytest.mark.slow
def test_jobs_go_on_without_the_command_and_are_submitted_once(tmp_path):
    runs = [make_run(model={"fault": "slow"}, train={"epochs": 20}, seed=seed) for seed in range(2)]
    with pytest.raises(LeftRunningError, match="2 jobs submitted, 0 were there") as left:
        processes("wait=false")(runs, tmp_path, Recording(), CPU)
    assert left.value.exit_code == 0
    assert {standing.state for standing in standings(runs, tmp_path)} <= {"queued", "running"}
    with pytest.raises(LeftRunningError, match="0 jobs submitted, 2 were there"):
        processes("wait=false")(runs, tmp_path, Recording(), CPU)
    display = Recording()
    ended = processes()(runs, tmp_path, display, CPU)
    assert sorted(display.ended) == sorted(run.run_id for run in runs)
    assert [finished.status for finished in ended] == ["ok", "ok"]
    assert not find_jobs(tmp_path, runs)


@pytest.mark.slow
def test_a_job_that_is_warned_saves_and_continues(tmp_path):
    run = make_run(model={"fault": "slow"}, train={"epochs": 60})
    with pytest.raises(LeftRunningError):
        processes("wait=false")([run], tmp_path, Recording(), CPU)
    job = find_jobs(tmp_path, [run])[run.run_id]
    wait_until(lambda: standings([run], tmp_path)[0].state == "running")
    time.sleep(1)
    (claim,) = find_claims(tmp_path, run.experiment)
    os.kill(claim.pid, signal.SIGUSR2)
    wait_until(lambda: list(tmp_path.rglob("*.checkpoint")))
    (finished,) = processes()([run], tmp_path, Recording(), CPU)
    assert finished.status == "ok"
    assert job.job_id in finished.found
    logs = [path.read_text() for path in Path(job.log).parent.glob(f"{job.job_id}*log*")]
    assert any("Requeued job" in log for log in logs)


@pytest.mark.slow
def test_a_run_whose_job_died_gets_a_row_by_collect(tmp_path):
    run, good = make_run(model={"fault": "killed"}), make_run()
    with pytest.raises(LeftRunningError):
        processes("wait=false")([run, good], tmp_path, Recording(), CPU)
    wait_until(lambda: not states(find_jobs(tmp_path, [run, good]).values()))
    assert "has ended without rows" in standings([run], tmp_path)[0].detail
    assert {finished.status for finished in collect([run, good], tmp_path, late_s=0.5)} == {"ok", "failed"}
    status, error = ending(tmp_path, run)
    assert status == "failed"
    assert "ended without rows" in error
    assert collect([run, good], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_a_job_that_is_not_needed_when_it_starts_ends_without_a_trace(tmp_path, wait):
    runs = [make_run(train={"lr": lr}) for lr in (0.01, 0.003, 0.001)]
    keep(runs[0], tmp_path, 0.95)
    settings = dataclasses.replace(CPU, enough=enough_of(runs, tmp_path, select(0.9)))
    if wait:
        ended = processes()(runs[1:], tmp_path, Recording(), settings)
        assert [finished.status for finished in ended] == ["unneeded", "unneeded"]
    else:
        with pytest.raises(LeftRunningError, match="2 jobs submitted"):
            processes("wait=false")(runs[1:], tmp_path, Recording(), settings)
        jobs = find_jobs(tmp_path, runs)
        wait_until(lambda: not states(jobs.values()))
        assert collect(runs[1:], tmp_path, late_s=0.5) == []
    assert not find_jobs(tmp_path, runs)
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    assert not find_claims(tmp_path, runs[0].experiment)


def test_runs_that_another_process_stored_need_no_job(tmp_path):
    assert processes()([], tmp_path, Recording(), CPU) == []


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A one-node Slurm cluster."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path / "slurm"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            configuration = stack.enter_context(one_node_slurm(folder))
        except RuntimeError as error:
            pytest.skip(str(error))
        monkeypatch.setenv("SLURM_CONF", str(configuration))
        yield


@pytest.mark.slow
# Slurm lets a job that was put back wait for two minutes
@pytest.mark.timeout(900)
def test_a_preempted_job_of_a_real_cluster_saves_and_continues(slurm, tmp_path):
    results = tmp_path / "results"
    runs = [make_run(model={"fault": "slow"}, train={"epochs": 100}, seed=seed) for seed in range(2)]
    runs.append(make_run(model={"fault": "error"}))
    with pytest.raises(LeftRunningError, match="3 jobs submitted"):
        choose("slurm", ["partition=low,minutes=10,wait=false"])(runs, results, Recording(), CPU)
    wait_until(lambda: any(standing.state == "running" for standing in standings(runs, results)))
    assert sum(standing.state == "queued" for standing in standings(runs, results)) == 2
    (before,) = find_claims(results, runs[0].experiment)
    time.sleep(1)
    urgent = subprocess.Popen(["srun", "--partition=high", "--time=1", "sleep", "3"])
    wait_until(lambda: list(results.rglob("*.checkpoint")))
    assert urgent.wait(timeout=60) == 0
    ended = choose("slurm", ["partition=low,minutes=10"])(runs, results, Recording(), CPU)
    assert sorted(finished.status for finished in ended) == ["failed", "ok", "ok"]
    assert ending(results, runs[-1])[0] == "failed"
    assert {path.stem for path in results.rglob("*.parquet")} == {run.run_id for run in runs}
    (preempted,) = (run for run in runs if run.run_id == before.run_id)
    alone = tmp_path / "alone"
    run_all([preempted], alone, torch.device("cpu"), Recording())
    assert values(results, [preempted]) == values(alone, [preempted])
