"""Any number of processes share a folder of results: every run is carried out once, and that of a lost one again."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from subquad.suite.executors.contract import Settings
from subquad.suite.executors.local import OutOfTimeError, run_all
from subquad.suite.executors.processes import start
from subquad.suite.executors.queue import RunQueue
from subquad.suite.runner import Finished
from subquad.suite.store import storage
from subquad.suite.store.claims import Claims, claim_path
from subquad.suite.training.trainer import Trainer
from tests.processes import until, with_subquad
from tests.suite.test_workers import Recording, ending
from tests.suite.toy import interrupted, make_run

CPU = torch.device("cpu")
HOME = Path(__file__).resolve().parents[2]


class Noting(Recording):
    """A display that also keeps what was started here and for whom it waited."""

    def __init__(self):
        super().__init__()
        self.begun, self.waits, self.found = [], [], {}
        self.waits_now = threading.Event()

    def started(self, run):
        self.begun.append(run.run_id)

    def finished(self, finished):
        super().finished(finished)
        self.found[finished.run.run_id] = finished.found

    def waiting(self, num_runs, holders):
        self.waits.append((num_runs, holders))
        self.waits_now.set()


def store(run, root, status="ok"):
    """The rows of a run, as another process writes them."""
    row = {"run_id": run.run_id, "experiment": run.experiment, "scale": run.scale, "metric": "run", "status": status}
    storage.write(storage.result_path(root, run.experiment, run.scale, run.run_id), [row])


def test_a_run_that_cannot_be_claimed_ends_with_the_reason_and_the_grid_goes_on(tmp_path, monkeypatch):
    good, lost = make_run(seed=0), make_run(seed=1)
    take = Claims.take

    def take_one(self, run, place=""):
        if run.run_id == lost.run_id:
            raise OSError(28, "No space left on device")
        return take(self, run, place)

    monkeypatch.setattr(Claims, "take", take_one)
    ended = run_all([lost, good], tmp_path, CPU, Recording())
    assert [(finished.run.run_id, finished.status, finished.stored) for finished in ended] == [
        (lost.run_id, "failed", False),
        (good.run_id, "ok", True),
    ]
    assert "its claim could not be written (No space left on device)" in ended[0].error
    assert ending(tmp_path, good)[0] == "ok"


def test_runs_of_others_are_left_to_them_and_awaited(tmp_path):
    runs = [make_run(seed=seed) for seed in range(3)]
    display = Noting()
    with Claims(tmp_path) as others:
        others.take(runs[0])

        def finish():
            # the first run of a process takes seconds of imports, so no fixed time would do
            display.waits_now.wait(60)
            store(runs[0], tmp_path)
            others.release(runs[0])

        other = threading.Thread(target=finish)
        other.start()
        ended = run_all(runs, tmp_path, CPU, display)
        other.join()
    assert display.begun == [run.run_id for run in runs[1:]]
    assert [finished.run.run_id for finished in ended] == [run.run_id for run in (*runs[1:], runs[0])]
    assert display.found[runs[0].run_id] == "stored by another process"
    ((count, holder),) = display.waits
    assert count == 1
    assert f"process {os.getpid()}" in holder


def test_runs_of_others_can_be_left(tmp_path):
    run = make_run()
    with Claims(tmp_path) as others:
        others.take(run)
        with pytest.raises(OutOfTimeError):
            run_all([run], tmp_path, CPU, Noting(), Settings(within_s=0.3))
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("fresh", [False, True])
def test_a_stored_run_is_repeated_from_its_checkpoint_unless_that_is_ignored(tmp_path, fresh):
    run, steps = make_run(), []
    path = storage.checkpoint_path(tmp_path, run.experiment, run.scale, run.run_id)
    with interrupted(5) as stop:
        Trainer(run, CPU, checkpoint=path, stop=stop)()
    store(run, tmp_path, "failed")
    display = Noting()
    display.progressed = lambda run, progress: steps.append(progress.step)
    (finished,) = run_all([run], tmp_path, CPU, display, Settings(repeat=True, fresh=fresh))
    assert finished.status == "ok"
    assert min(steps) == (0 if fresh else 5)
    assert not path.exists()


@pytest.mark.parametrize(("repeat", "status"), [(False, "ok"), (False, "failed"), (True, "ok")])
def test_a_run_that_another_process_stored_since_is_not_repeated(tmp_path, repeat, status):
    run = make_run()
    display = Noting()
    if repeat:
        store(run, tmp_path)
    with Claims(tmp_path) as claims:
        queue = RunQueue([run], tmp_path, claims, display, repeat=repeat)
        store(run, tmp_path, status)
        assert queue.next() is None
        assert not queue.left
    assert queue.ended == [Finished(run, status, "", 0.0, "stored by another process")]
    assert not list(tmp_path.rglob("*.claim"))


def test_a_run_of_a_lost_machine_is_taken_over_once_its_claim_has_expired(tmp_path):
    run = make_run()
    path = claim_path(tmp_path, run.experiment, run.scale, run.run_id)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"host": "node7", "pid": 1, "token": "t", "expiry_s": 1.0}))
    display = Noting()
    began = time.monotonic()
    run_all([run], tmp_path, CPU, display)
    # by its default, the claim would expire after three minutes
    assert 0.5 < time.monotonic() - began < 120
    assert display.waits == [(1, "node7, process 1")]
    assert ending(tmp_path, run)[0] == "ok"
    assert not list(tmp_path.rglob("*.claim*"))


class Writing(Noting):
    """A display that writes each run that its process starts into a file of the process."""

    def __init__(self, root):
        super().__init__()
        self.file = root.parent / f"{os.getpid()}.started"

    def started(self, run):
        with self.file.open("a") as file:
            file.write(run.run_id + "\n")


def carry_out(root, jobs, num_runs, epochs):
    """Carries out a grid of slow runs."""
    runs = [make_run(model={"fault": "slow"}, train={"epochs": epochs}, seed=seed) for seed in range(num_runs)]
    assert len(run_all(runs, root, CPU, Writing(root), jobs=jobs)) == num_runs


def started(root):
    """The runs that each process began, by its id."""
    return {int(path.stem): path.read_text().split() for path in root.parent.glob("*.started")}


@pytest.mark.slow
def test_two_processes_with_two_workers_each_carry_out_every_run_of_a_grid_once(tmp_path):
    root = tmp_path / "results"
    code = "import sys; from pathlib import Path; from tests.suite.test_shared_folder import carry_out\n"
    code += "carry_out(Path(sys.argv[1]), jobs=2, num_runs=20, epochs=2)"
    environment = with_subquad(HOME)
    both = [subprocess.Popen([sys.executable, "-c", code, root], cwd=HOME, env=environment) for _ in range(2)]
    assert [one.wait(timeout=240) for one in both] == [0, 0]
    begun = [run_id for runs in started(root).values() for run_id in runs]
    assert len(begun) == len(set(begun)) == 20
    assert len(started(root)) == 2
    assert len(list(root.rglob("*.parquet"))) == 20
    assert not list(root.rglob("*.claim*"))


def carry_out_these(runs, root):
    run_all(runs, root, CPU, Recording())


def test_the_run_of_a_killed_process_is_finished_by_the_other(tmp_path):
    root, there = tmp_path / "results", tmp_path / "hangs"
    runs = [make_run(model={"fault": "hang once", "fault_file": str(there)}), make_run()]
    other, display = start(carry_out_these, runs, root), Noting()
    display.waiting = lambda num_runs, holders: other.kill()
    try:
        assert until(there.exists, seconds=200)
        # the claim would expire after three minutes
        ended = run_all(runs, root, CPU, display, Settings(within_s=120))
    finally:
        other.kill()
    assert [finished.run for finished in ended] == runs[::-1]
    assert ending(root, runs[0])[0] == "ok"
