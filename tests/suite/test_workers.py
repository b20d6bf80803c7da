"""A grid in worker processes loses no run, whatever happens to its workers and to its parent."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from subquad.suite.executors import local, processes
from subquad.suite.executors.contract import Settings
from subquad.suite.executors.local import OutOfTimeError, StopSignals, run_all
from subquad.suite.executors.processes import CONTEXT, LOST_SERVER, SERVER_LOST, StopFlag, children, ended, start
from subquad.suite.executors.queue import RunQueue
from subquad.suite.executors.team import Team
from subquad.suite.executors.workers import LOST_SERVERS, TRIES, _Pool, _Worker, run_in_workers
from subquad.suite.store import storage
from subquad.suite.store.claims import Claims
from tests.processes import until, with_subquad
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
    stop = StopFlag()
    with queue_of([good, fails], tmp_path, display) as queue:
        run_in_workers(queue, tmp_path, ["cpu", "cpu"], stop, {}, fault_of=lost)
    assert display.repeats == [(fails.run_id, "cpu is lost")]
    assert {finished.run.run_id: finished.status for finished in queue.ended} == {
        good.run_id: "ok",
        fails.run_id: "failed",
    }


def test_a_grid_whose_time_is_up_continues_later(tmp_path, clock):
    runs = [make_run(train={"eval_every": 1}, seed=seed) for seed in range(3)]

    class Late(Recording):
        """A display that lets the time pass in the middle of the second run, and waits until that is noticed."""

        def progressed(self, run, progress):
            if run is runs[1] and progress.step == 5:
                clock.now += 60
                assert until(lambda: self.stops, seconds=60)

    display = Late()
    with pytest.raises(OutOfTimeError):
        run_all(runs, tmp_path, CPU, display, Settings(within_s=60))
    assert display.stops == 1
    assert display.ended == [runs[0].run_id]
    assert [path.stem for path in tmp_path.rglob("*.checkpoint")] == [runs[1].run_id]
    rest = [run for run in runs if run.run_id not in display.ended]
    ended = run_all(rest, tmp_path, CPU, display)
    assert [finished.status for finished in ended] == ["ok"] * len(rest)


@pytest.mark.slow
def test_workers_that_are_asked_to_stop_save_their_runs(tmp_path):
    stop = StopFlag()

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


def servers(pid):
    """The servers that a process has started, from which its workers are forked."""
    return [child for child in children(pid) if b"multiprocessing.forkserver" in cmdline(child)]


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def has_ended(pid):
    with contextlib.suppress(OSError):
        # nobody may read how an orphan ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.mark.slow
def test_lost_servers_cost_no_try_and_their_workers_end(tmp_path):
    class Killing(Recording):
        """A display that kills as many servers as a run has tries, each once the run trains in one of its processes."""

        workers = ()

        def progressed(self, run, progress):
            if progress.step and len(self.repeats) == len(self.workers) < TRIES:
                (server,) = servers(os.getpid())
                self.workers += tuple(children(server))
                os.kill(server, signal.SIGKILL)

    run, display = make_run(model={"fault": "slow"}, train={"epochs": 40}), Killing()
    (finished,) = run_all([run], tmp_path, CPU, display, jobs=1)
    assert finished.status == "ok"
    assert display.repeats == [(run.run_id, LOST_SERVER)] * TRIES
    assert len(display.workers) == TRIES
    assert until(lambda: all(map(has_ended, display.workers)), seconds=60)


def test_a_run_that_always_ends_its_server_is_not_repeated_for_ever():
    pool = _Pool(None, Path(), {}, None, 1.0, None)
    run, tries, repeated = make_run(), 0, True
    while repeated and tries < 100:
        tries += 1
        pool.tries[run.run_id] += 1
        repeated = pool._may_repeat(run, f"process 1: {LOST_SERVER}")
    assert tries == LOST_SERVERS + TRIES - 1


def test_a_process_that_exits_with_the_code_of_a_lost_server_counts_as_ended():
    assert ended(start(os._exit, SERVER_LOST)) == f"the process ended with exit code {SERVER_LOST}"


def wait_for_another(pipe):
    """Body of a process that starts another one and waits for it."""
    with subprocess.Popen(["sleep", "1000"]) as other:
        pipe.send(other.pid)


def test_a_process_is_killed_with_what_it_has_started():
    mine, theirs = CONTEXT.Pipe()
    process = start(wait_for_another, theirs)
    pids = process.pid, mine.recv()
    processes.kill(process)
    assert until(lambda: all(map(has_ended, pids)), seconds=30)


def last_sign(worker):
    return f"{worker.signs.phase.decode()}, step {worker.signs.step}"


@pytest.mark.timeout(150)
def test_a_run_that_hangs_fails_with_its_last_sign_and_the_others_go_on(tmp_path, monkeypatch):
    hanging = {
        "training, step 0": make_run(model={"fault": "hang"}),
        "evaluating, step 5": make_run(model={"fault": "hang in evaluation"}, train={"epochs": 1, "eval_every": 1}),
        "preparing data and model, step 0": make_run(task={"labels": "hang"}),
    }
    good, display, is_alive = make_run(), Recording(), _Worker.is_alive

    def is_alive_later(worker, passed_s):
        """Lets more than the limit pass at a look at a worker that hangs, and no time for the others."""
        hangs = hanging.get(last_sign(worker)) is worker.run and " in hang" in worker.stack()
        return is_alive(worker, 16.0 * hangs)

    monkeypatch.setattr(_Worker, "is_alive", is_alive_later)
    run_all([*hanging.values(), good], tmp_path, CPU, display, jobs=3, silence_s=15.0)
    assert ending(tmp_path, good) == ("ok", "")
    assert display.repeats == []
    for sign, run in hanging.items():
        status, error = ending(tmp_path, run)
        sentence, call, *_ = error.splitlines()
        assert (status, sentence) == (
            "failed",
            f"failed (it gave no sign of life for 0.25 minutes, and its last one was: {sign}; "
            "--executor-options hang_minutes=0.5 would wait longer",
        )
        assert re.fullmatch(r' *File "tests/suite/toy.py", line [0-9]+ in hang', call)
    assert not list(tmp_path.rglob("*.claim"))


@pytest.mark.slow
def test_a_run_that_hangs_beside_its_team_leaves_no_process(tmp_path):
    run_all([make_run(model={"fault": "hang"})], tmp_path, CPU, Recording(), team=Team(2), silence_s=15.0)
    (server,) = servers(os.getpid())
    assert until(lambda: all(map(has_ended, children(server))), seconds=30)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("fault", ["hang", "hang in saving"])
def test_a_worker_that_does_not_heed_a_signal_is_killed_after_the_grace(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(local, "SAME_S", 0.1)
    monkeypatch.setattr(local, "GRACE_S", 0.5)

    class Interrupting(Recording):
        workers = ()

        def started(self, run):
            (server,) = servers(os.getpid())
            self.workers = children(server)
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    display = Interrupting()
    # a server that still loads its modules would start the worker only after the end
    assert ended(start(os.getpid)) == "the process ended with exit code 0"
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_all([make_run(model={"fault": fault}, train={"epochs": 10_000})], tmp_path, CPU, display, jobs=1)
    # without the shorter grace, it would take a minute
    assert time.monotonic() - before < 30
    assert not list(tmp_path.rglob("*.claim"))
    (server,) = servers(os.getpid())
    assert until(lambda: all(map(has_ended, children(server))), seconds=30)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["slow", "hang"])
def test_workers_end_within_seconds_of_their_parent(tmp_path, fault):
    script = tmp_path / "grid.py"
    script.write_text(
        "import sys, torch; from pathlib import Path\n"
        "from subquad.suite.executors.local import run_all\n"
        "from tests.suite.test_workers import Recording; from tests.suite.toy import make_run\n"
        "if __name__ == '__main__':\n"
        f"    settings = {{'model': {{'fault': {fault!r}}}, 'train': {{'epochs': 2000}}}}\n"
        "    runs = [make_run(**settings, seed=seed) for seed in range(2)]\n"
        f"    run_all(runs, Path({str(tmp_path)!r}), torch.device('cpu'), Recording(), jobs=2)\n"
    )
    home = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=home,
        env=with_subquad(home) | {"OMP_NUM_THREADS": "1"},
    )
    workers: list[int] = []

    def all_are_there():
        # the process that tracks shared resources, the server, and the two workers, which are its children
        workers[:] = [process for child in children(parent.pid) for process in (child, *children(child))]
        return len(workers) == 4

    there = until(all_are_there, seconds=200)
    time.sleep(1)
    parent.kill()
    parent.wait()
    # their runs would take three minutes
    over = until(lambda: all(map(has_ended, workers)), seconds=60)
    for pid in workers:
        if not has_ended(pid):
            os.kill(pid, signal.SIGKILL)
    assert there
    assert over


def test_a_signal_to_all_processes_reaches_no_worker(tmp_path):
    stop = StopFlag()
    worker = _Worker(stop, "cpu", tmp_path, {}, CONTEXT.Value("i", 1, lock=False))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(worker.process.pid, number)
    run = make_run()
    worker.give(run)
    worker.pipe.send(None)
    worker.process.join(timeout=60)
    assert worker.process.exitcode == 0
    assert ending(tmp_path, run)[0] == "ok"


class Clock(SimpleNamespace):
    """The module `time` with a clock that a test sets."""

    def __init__(self):
        super().__init__(now=100.0, sleep=time.sleep)

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(local, "time", clock)
    return clock


@pytest.mark.parametrize("later_s", [0.0, 0.9])
def test_signals_within_a_second_ask_once_for_an_end(clock, later_s):
    asked = []
    flag = StopFlag()
    with StopSignals(flag, lambda: asked.append(clock.now), None) as stop:
        signal.raise_signal(signal.SIGTERM)
        clock.now += later_s
        signal.raise_signal(signal.SIGINT)
        assert flag.is_set()
        assert until(lambda: asked, seconds=5)
    assert len(asked) == 1
    assert stop.reason is KeyboardInterrupt


def test_a_signal_a_second_after_the_first_ends_at_once(clock):
    with StopSignals(StopFlag(), lambda: None, None):
        signal.raise_signal(signal.SIGINT)
        clock.now += local.SAME_S
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("numbers", "grace"),
    [
        ([signal.SIGINT], local.GRACE_S),
        ([signal.SIGTERM], local.SIGTERM_GRACE_S),
        ([signal.SIGINT, signal.SIGTERM], local.SIGTERM_GRACE_S),
        ([signal.SIGTERM, signal.SIGHUP], local.SIGTERM_GRACE_S),
    ],
)
def test_the_shortest_grace_of_several_signals_counts(numbers, grace):
    flag = StopFlag()
    with StopSignals(flag, lambda: None, None):
        for number in numbers:
            signal.raise_signal(number)
    assert 0 <= flag.over_s + grace < 5


def stuck(pipe):
    """Body of a process that gets a signal while it waits in C for a lock that nobody opens."""
    local.SIGTERM_GRACE_S, local.STUCK_S = 0.2, 0.3
    signal.pthread_sigmask(signal.SIG_UNBLOCK, local.SIGNALS)
    with StopSignals(StopFlag(), lambda: None, None, give_up=lambda: pipe.send("gave up")):
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        pipe.send("stuck")
        library.pthread_mutex_lock(mutex)


def test_a_process_that_is_stuck_in_foreign_code_ends_after_sigterm():
    mine, theirs = CONTEXT.Pipe()
    process = start(stuck, theirs)
    theirs.close()
    assert mine.recv() == "stuck"
    os.kill(process.pid, signal.SIGTERM)
    process.join(timeout=30)
    code = process.exitcode
    process.kill()
    assert code == 130
    assert mine.recv() == "gave up"
