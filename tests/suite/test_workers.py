"""A grid in worker processes loses no run, whatever happens to its workers and to its parent."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from suite.executors import local
from suite.executors.local import OutOfTimeError, StopSignals, run_all
from suite.executors.processes import CONTEXT, ended, start
from suite.executors.queue import RunQueue
from suite.executors.workers import _Worker, run_in_workers
from suite.store import storage
from suite.store.claims import Claims
from tests.suite.toy import make_run

CPU = torch.device("cpu")


def test_a_process_does_not_carry_out_the_script_that_starts_it(tmp_path, monkeypatch):
    script, there = tmp_path / "without_guard.py", tmp_path / "there"
    script.write_text(f"open({str(tmp_path / 'again')!r}, 'w')\n")
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    process = start(there.touch)
    assert ended(process) == "the process ended with exit code 0"
    assert sorted(tmp_path.iterdir()) == [there, script]
    assert sys.modules["__main__"] is main


class Recording:
    """A display that keeps what it is told."""

    def __init__(self):
        self.repeats, self.stops, self.ended = [], 0, []

    def started(self, run): ...

    def progressed(self, run, progress): ...

    def finished(self, finished):
        self.ended.append(finished.run.run_id)

    def stopping(self):
        self.stops += 1

    def repeated(self, run, reason):
        self.repeats.append((run.run_id, reason))

    def waiting(self, num_runs, holders): ...


@contextlib.contextmanager
def queue_of(runs, root, display):
    """A queue of runs that this process alone works on."""
    with Claims(root) as claims:
        yield RunQueue(runs, root, claims, display, repeat=False)


def ending(root, run):
    """Status and error that a run stored."""
    frame = storage.read([storage.result_path(root, run.experiment, run.scale, run.run_id)])
    (row,) = frame[frame["metric"] == "run"].to_dict("records")
    return row["status"], row["error"]


def values(root, runs):
    """Returns the measurements of the runs, without times."""
    frame = storage.read([storage.result_path(root, run.experiment, run.scale, run.run_id) for run in runs])
    frame = frame[frame["metric"].isin(["accuracy", "loss", "num_parameters"])]
    return frame[["run_id", "metric", "split", "slice", "step", "value"]].to_dict("records")


@pytest.mark.slow
def test_a_killed_worker_costs_one_try_of_one_run(tmp_path):
    dies_once = make_run(model={"fault": "killed once", "fault_file": str(tmp_path / "died")})
    dies, good = make_run(model={"fault": "killed"}), [make_run(seed=seed) for seed in range(3)]
    display = Recording()
    runs = [dies, dies_once, *good]
    ended = run_all(runs, tmp_path, CPU, display, jobs=2)
    assert (
        sorted(finished.run.run_id for finished in ended) == sorted(run.run_id for run in runs) == sorted(display.ended)
    )
    assert {run_id for run_id, _ in display.repeats} == {dies.run_id, dies_once.run_id}
    assert ending(tmp_path, dies) == ("failed", "failed (killed, signal 9)")
    for run in (dies_once, *good):
        assert ending(tmp_path, run)[0] == "ok"


def lost(device):
    """A device that no process can use any more."""
    return f"{device} is lost"


@pytest.mark.slow
def test_a_run_whose_device_is_lost_is_tried_again_even_if_it_is_the_last(tmp_path):
    fails, good = make_run(model={"fault": "error"}), make_run()
    display = Recording()
    stop = CONTEXT.Event()
    with queue_of([good, fails], tmp_path, display) as queue:
        run_in_workers(queue, tmp_path, ["cpu", "cpu"], stop, {}, fault_of=lost)
    assert display.repeats == [(fails.run_id, "cpu is lost")]
    assert {finished.run.run_id: finished.status for finished in queue.ended} == {
        good.run_id: "ok",
        fails.run_id: "failed",
    }


def test_a_grid_whose_time_is_up_continues_later(tmp_path):
    runs = [make_run(model={"fault": "slow"}, train={"epochs": 4}, seed=seed) for seed in range(3)]
    display = Recording()
    with pytest.raises(OutOfTimeError):
        run_all(runs, tmp_path, CPU, display, within_s=0.3)
    assert display.stops == 1
    assert len(display.ended) < 3
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 1
    rest = [run for run in runs if run.run_id not in display.ended]
    ended = run_all(rest, tmp_path, CPU, display)
    assert [finished.status for finished in ended] == ["ok"] * len(rest)


@pytest.mark.slow
def test_workers_that_are_asked_to_stop_save_their_runs(tmp_path):
    stop = CONTEXT.Event()

    class Stopping(Recording):
        """A display that asks for an end once both runs have trained."""

        seen = frozenset()

        def progressed(self, run, progress):
            self.seen |= {run.run_id}
            if len(self.seen) == 2:
                stop.set()

    runs = [make_run(model={"fault": "slow"}, train={"epochs": 400}, seed=seed) for seed in range(3)]
    with queue_of(runs, tmp_path, Stopping()) as queue:
        run_in_workers(queue, tmp_path, ["cpu", "cpu"], stop, {})
    assert queue.ended == []
    assert {path.stem for path in tmp_path.rglob("*.checkpoint")} == {run.run_id for run in runs[:2]}


def children(pid):
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def servers(pid):
    """The servers that a process has started, from which its workers are forked."""
    return [child for child in children(pid) if b"multiprocessing.forkserver" in cmdline(child)]


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_a_lost_server_costs_one_try_of_the_current_runs_and_its_workers_end(tmp_path):
    class Killing(Recording):
        """A display that kills the server once both runs have trained."""

        seen = frozenset()
        workers = ()

        def progressed(self, run, progress):
            self.seen |= {run.run_id}
            if len(self.seen) == 2 and not self.workers:
                (server,) = servers(os.getpid())
                self.workers = children(server)
                os.kill(server, signal.SIGKILL)

    runs = [make_run(model={"fault": "slow"}, train={"epochs": 40}, seed=seed) for seed in range(3)]
    display = Killing()
    ended = run_all(runs, tmp_path, CPU, display, jobs=2)
    assert sorted(display.ended) == sorted(run.run_id for run in runs)
    assert [finished.status for finished in ended] == ["ok"] * 3
    assert {run_id for run_id, _ in display.repeats} == display.seen - {runs[2].run_id}
    assert len(display.workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in display.workers)


@pytest.mark.slow
def test_workers_end_within_seconds_of_their_parent(tmp_path):
    script = tmp_path / "grid.py"
    script.write_text(
        "import sys, torch; from pathlib import Path\n"
        "from suite.executors.local import run_all\n"
        "from tests.suite.test_workers import Recording; from tests.suite.toy import make_run\n"
        "if __name__ == '__main__':\n"
        "    runs = [make_run(model={'fault': 'slow'}, train={'epochs': 500}, seed=seed) for seed in range(2)]\n"
        f"    run_all(runs, Path({str(tmp_path)!r}), torch.device('cpu'), Recording(), jobs=2)\n"
    )
    home = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(script)], cwd=home, env={**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 60
    workers: list[int] = []
    while len(workers) < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
        # the process that tracks shared resources, the server, and the two workers, which are its children
        workers = [process for child in children(parent.pid) for process in (child, *children(child))]
    time.sleep(1)
    parent.kill()
    parent.wait()
    # their runs would take 50 seconds
    deadline = time.monotonic() + 30
    alive = workers
    while alive and time.monotonic() < deadline:
        time.sleep(0.2)
        alive = [pid for pid in alive if Path(f"/proc/{pid}").exists()]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert len(workers) == 4
    assert not alive


def test_a_signal_to_all_processes_reaches_no_worker(tmp_path):
    stop = CONTEXT.Event()
    worker = _Worker(stop, "cpu", tmp_path, {}, CONTEXT.Value("i", 1, lock=False))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(worker.process.pid, number)
    run = make_run()
    worker.give(run)
    worker.pipe.send(None)
    worker.process.join(timeout=60)
    assert worker.process.exitcode == 0
    assert ending(tmp_path, run)[0] == "ok"


@pytest.mark.parametrize("later_s", [0.0, 0.9])
def test_signals_within_a_second_ask_once_for_an_end(monkeypatch, later_s):
    clock = [100.0]
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    asked = []

    def announce():
        # the second signal of `timeout` may come while the first is handled
        asked.append(clock[0])
        signal.raise_signal(signal.SIGINT)

    event = threading.Event()
    with StopSignals(event, announce, None) as stop:
        signal.raise_signal(signal.SIGTERM)
        clock[0] += later_s
        signal.raise_signal(signal.SIGINT)
    assert event.is_set()
    assert asked == [100.0]
    assert stop.reason is KeyboardInterrupt


def test_a_signal_a_second_after_the_first_ends_at_once(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with StopSignals(threading.Event(), lambda: None, None):
        signal.raise_signal(signal.SIGINT)
        clock[0] += local.SAME_S
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
