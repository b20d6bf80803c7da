"""`collect` gives a row to a run whose job ended without one, and to no other; the scheduler is a stand-in."""

import os
import shutil

import pyarrow.parquet as pq
import pytest
import torch

from subquad.suite.executors import slurm
from subquad.suite.executors.slurm import collect
from subquad.suite.runner import execute
from subquad.suite.store import parts, storage
from subquad.suite.store.claims import Claims
from subquad.suite.store.jobs import Job, find_jobs, job_folder, keep_job, row_stamp, states
from tests.suite.test_workers import ending
from tests.suite.toy import make_run

CPU = torch.device("cpu")

SQUEUE = """#!/bin/sh
cat "$QUEUE"
if [ -s "$QUEUE.refused" ]; then cat "$QUEUE.refused" >&2; exit 1; fi
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """The file whose lines squeue prints, of a cluster that has no other program, sacct among them."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "squeue").write_text(SQUEUE)
    (programs / "squeue").chmod(0o755)
    (tmp_path / "queue").touch()
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("QUEUE", str(tmp_path / "queue"))
    return tmp_path / "queue"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "results"


def runs_of(count):
    return [make_run(seed=seed) for seed in range(count)]


def submit(runs, root):
    for i, run in enumerate(runs):
        log = job_folder(root) / f"4711_{i}_0_log.err"
        keep_job(root, run, Job(run.run_id, f"4711_{i}", "slurm", str(log), row_stamp(root, run)))


def rows_of(run, root):
    return pq.read_table(storage.result_path(root, run.experiment, run.scale, run.run_id)).to_pylist()


def collected(runs, root):
    return [(finished.run.run_id, finished.status) for finished in collect(runs, root, late_s=0.0)]


def test_of_an_array_only_the_elements_that_are_gone_without_rows_get_one_row(queue, root):
    """Whether a node failed, the user cancelled, or memory or time ran out: the scheduler knows the job no more."""
    runs = runs_of(4)
    submit(runs, root)
    execute(runs[3], root, CPU)
    queue.write_text("4711_0|RUNNING\n4711_2|PENDING\n")
    assert collected(runs, root) == [(runs[1].run_id, "failed"), (runs[3].run_id, "ok")]
    (row,) = rows_of(runs[1], root)
    assert "job 4711_1 ended without rows; log: " in row["error"]
    assert set(find_jobs(root, runs)) == {runs[0].run_id, runs[2].run_id}
    assert collected(runs, root) == []
    assert len(list(root.rglob("*.parquet"))) == 2


def test_a_job_that_is_put_back_into_the_queue_gets_no_row(queue, root, monkeypatch):
    """A job that was preempted, or whose node failed, may be missing for a moment."""
    (run,) = runs_of(1)
    submit([run], root)
    answers = iter([{}, {"4711_0": "PENDING"}])
    monkeypatch.setattr(slurm, "states", lambda jobs: next(answers))
    assert collected([run], root) == []
    assert set(find_jobs(root, [run])) == {run.run_id}


def test_rows_of_an_earlier_end_are_not_replaced_by_a_failure(queue, root):
    """The job was to repeat the run (`--force`)."""
    (run,) = runs_of(1)
    execute(run, root, CPU)
    before = rows_of(run, root)
    submit([run], root)
    (finished,) = collect([run], root, late_s=0.0)
    assert (finished.status, finished.stored) == ("failed", False)
    assert "the rows that were stored stay" in finished.error
    assert rows_of(run, root) == before
    assert collected([run], root) == []


def test_rows_that_were_put_into_a_part_are_not_joined_by_a_failure(queue, root, tmp_path):
    """A command that did not wait for the job has left its record."""
    (run,) = runs_of(1)
    submit([run], root)
    execute(run, tmp_path / "own", CPU)
    (part,) = parts.unpublished(tmp_path / "own", root)[0]
    parts.write(part)
    collect([run], root, late_s=0.0)
    assert not storage.result_path(root, run.experiment, run.scale, run.run_id).exists()


def test_a_run_that_is_carried_out_elsewhere_gets_no_row(queue, root):
    (run,) = runs_of(1)
    submit([run], root)
    with Claims(root) as claims:
        assert claims.take(run) is None
        assert collected([run], root) == []
    assert set(find_jobs(root, [run])) == {run.run_id}
    assert collected([run], root) == [(run.run_id, "failed")]


def test_rows_that_appear_at_the_last_moment_stay(queue, root, monkeypatch):
    (run,) = runs_of(1)
    submit([run], root)
    take = Claims.take

    def late(claims, run):
        found = take(claims, run)
        execute(run, root, CPU)
        return found

    monkeypatch.setattr(Claims, "take", late)
    assert collected([run], root) == [(run.run_id, "ok")]
    assert ending(root, run)[0] == "ok"


def test_rows_that_a_job_wrote_where_the_folder_was_are_named(queue, root, tmp_path):
    runs = runs_of(2)
    submit(runs, root)
    shutil.move(root, tmp_path / "moved")
    execute(runs[1], root, CPU)
    with pytest.raises(ValueError, match=f"jobs wrote their rows into {root}; copy them here"):
        collect(runs, tmp_path / "moved", late_s=0.0)
    assert not list((tmp_path / "moved").rglob("*.parquet"))
    shutil.copytree(root, tmp_path / "moved", dirs_exist_ok=True)
    assert collected(runs, tmp_path / "moved") == [(runs[0].run_id, "failed"), (runs[1].run_id, "ok")]


def test_a_scheduler_that_refuses_or_is_not_there_is_one_sentence(queue, root, monkeypatch):
    (run,) = runs_of(1)
    submit([run], root)
    (queue.parent / "queue.refused").write_text("slurm_load_jobs error:\n Socket timed out\n")
    with pytest.raises(ValueError, match=r"cannot be asked \(squeue: slurm_load_jobs error: Socket timed out\)"):
        collect([run], root, late_s=0.0)
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(ValueError, match=r"cannot be asked .*squeue"):
        collect([run], root, late_s=0.0)
    assert not list(root.rglob("*.parquet"))


def test_the_jobs_of_this_user_are_asked_for_whatever_the_environment_calls_him(queue, root, monkeypatch):
    (run,) = runs_of(1)
    submit([run], root)
    (queue.parent / "programs" / "squeue").write_text('#!/bin/sh\necho "4711_0|$*"\n')
    monkeypatch.setenv("LOGNAME", "somebody-else")
    (said,) = states(find_jobs(root, [run]).values()).values()
    assert said.endswith(f"--user {os.getuid()}")
