"""The number of runs on a GPU follows its memory and their speed, and no run ends out of memory for its neighbours."""

import contextlib
import os
import stat
from dataclasses import dataclass

import pytest
import torch

from subquad.suite.executors import local, packing
from subquad.suite.executors.contract import Settings
from subquad.suite.executors.local import run_all
from subquad.suite.executors.packing import MOST, SETTLED, Load, Room, multi_process_service
from subquad.suite.executors.workers import kind_of
from subquad.suite.store import storage
from tests.suite.test_workers import Recording, ending
from tests.suite.toy import make_run

GIB = 1 << 30


@dataclass
class Worker:
    """A worker as the room sees it."""

    kind: str = "a"
    load: Load | None = None


def fill(memory_gib, run_gib, speed_of=lambda count: 100.0, kind_of=lambda index: "a"):
    """Returns the number of runs on a GPU, if each needs `run_gib` and makes speed_of(number of runs) steps a second.

    The second number is how many it goes on with, once one run after the other has ended.
    """
    room, there = Room(), []

    def measure():
        free = int((memory_gib - run_gib * len(there)) * GIB)
        for worker in there:
            worker.load = Load(int(run_gib * GIB), free, speed_of(len(there)))

    while True:
        while room.allows("cuda:0", there):
            there.append(Worker(kind_of(len(there))))
        most = len(there)
        for _ in range(SETTLED):
            measure()
            grows = room.allows("cuda:0", there)
        if not grows:
            break
        there.append(Worker(kind_of(len(there))))
    while there and not room.allows("cuda:0", there[1:], again=True):
        there.pop(0)
    return most, len(there)


def test_small_runs_fill_the_memory_with_a_margin():
    # a run takes 10 GiB, and one more is started while 12.5 are free
    assert fill(140, 10) == (13, 13)
    assert fill(15, 10) == (1, 1)
    assert fill(10_000, 1) == (MOST, MOST)


def test_the_number_of_runs_doubles_until_the_gpu_makes_no_more_steps():
    assert fill(140, 1, lambda count: 100.0 / count) == (2, 2)
    assert fill(140, 1, lambda count: min(1200.0, 2940.0 / count)) == (4, 4)
    # measured on an H200: runs of one kind, 24 of which make fewer steps in all than 7
    rates = {1: 1200.0, 2: 840.0, 4: 620.0, 8: 367.0, 16: 142.0}
    assert fill(140, 1, lambda count: rates.get(count, 1.0)) == (8, 8)


def test_a_doubling_that_makes_a_gpu_slower_is_taken_back():
    assert fill(140, 1, lambda count: 100.0 if count <= 4 else 100.0 / count) == (8, 4)


def settle(room, there, steps_per_s):
    """Whether one more run has room after all have measured their speed."""
    for _ in range(SETTLED):
        for worker in there:
            worker.load = Load(GIB, 100 * GIB, steps_per_s)
        answer = room.allows("cuda:0", there)
    return answer


def test_the_speed_of_runs_of_another_kind_says_nothing():
    room = Room()
    assert settle(room, [Worker("a")], 100.0)
    assert settle(room, [Worker("b"), Worker("c")], 1.0)
    room = Room()
    assert settle(room, [Worker("a")], 100.0)
    assert not settle(room, [Worker("b"), Worker("a")], 1.0)


def test_a_number_found_with_one_kind_of_runs_does_not_bind_another():
    room, there = Room(), [Worker("a")]
    assert settle(room, there, 100.0)
    there.append(Worker("a"))
    assert not settle(room, there, 50.0), "two runs make no more steps than one"
    there = [Worker("b"), Worker("a")]
    assert not settle(room, there, 100.0), "one run of the first kind is left"
    there = [Worker("b"), Worker("b")]
    assert settle(room, there, 100.0)
    there += [Worker("b"), Worker("b")]
    assert settle(room, there, 90.0)
    there += [Worker("b") for _ in range(4)]
    assert not settle(room, there, 20.0)
    assert not settle(room, there[:4], 90.0), "eight were slower than four"
    assert room.allows("cuda:0", there[:3], again=True)


def test_runs_of_one_kind_differ_in_seed_and_learning_rate_alone():
    kind = kind_of(make_run(train={"lr": 0.1}))
    assert kind_of(make_run(seed=5, train={"lr": 0.2})) == kind
    assert kind_of(make_run(train={"lr": 0.1, "batch_size": 3})) != kind


def test_workers_that_have_just_started_are_counted_with_the_memory_they_will_take():
    room = Room()
    there = [Worker(load=Load(10 * GIB, 30 * GIB, 100.0))]
    assert not room.allows("cuda:0", there), "its speed alone has not settled"
    there[0].load = Load(10 * GIB, 30 * GIB, 100.0)
    assert room.allows("cuda:0", there)
    assert room.allows("cuda:0", [*there, Worker()][:1])
    assert not room.allows("cuda:0", [*there, Worker(), Worker()])


def test_a_process_that_has_its_memory_needs_no_more():
    room, there = Room(), [Worker(load=Load(10 * GIB, GIB, 100.0)) for _ in range(2)]
    for _ in range(SETTLED):
        room.allows("cuda:0", there[:1])
        there[0].load = Load(10 * GIB, GIB, 100.0)
    assert not room.allows("cuda:0", there[:1])
    assert room.allows("cuda:0", there[:1], again=True)


@pytest.mark.slow
def test_a_run_that_is_out_of_memory_beside_others_is_tried_once_more_alone(tmp_path):
    once = make_run(model={"fault": "oom once", "fault_file": str(tmp_path / "failed")})
    always = make_run(model={"fault": "oom"})
    slow = make_run(model={"fault": "slow"}, train={"epochs": 30})
    display = Recording()
    ended = run_all([slow, once, always], tmp_path, torch.device("cpu"), display, jobs=2)
    assert len(ended) == 3
    assert {run_id for run_id, _ in display.repeats} == {once.run_id, always.run_id}
    assert ending(tmp_path, once)[0] == "ok"
    assert ending(tmp_path, always)[0] == "oom"
    frame = storage.read(storage.files([tmp_path], once.experiment))
    assert frame["device"].str.endswith(", 2 runs at a time").all()


@pytest.mark.parametrize("works", [True, False])
def test_the_multi_process_service_is_started_where_it_works_and_ends_with_the_context(tmp_path, monkeypatch, works):
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n"
        '[ "$1" ] || { read word; echo $word > word; kill $(cat pid); exit; }\n'
        "echo $$ > pid; exec sleep 60\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(packing, "PROBE", "import time; time.sleep(0.3)" if works else "raise SystemExit(1)")
    with multi_process_service() as shared:
        assert shared == works
        assert ("CUDA_MPS_PIPE_DIRECTORY" in os.environ) == works
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    if works:
        assert (tmp_path / "word").read_text() == "quit\n"
        assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text().strip()}")


@pytest.mark.parametrize(
    ("device", "jobs", "packed", "started"),
    [
        ("cuda", 2, False, False),  # one run on each of two GPUs
        ("cuda", 3, False, True),
        ("cuda", 2, True, True),  # `--jobs auto`, which may give a GPU several
        ("cuda:1", 2, False, True),
        ("cpu", 4, False, False),
    ],
)
def test_the_service_is_started_where_a_gpu_gets_several_runs(tmp_path, monkeypatch, device, jobs, packed, started):
    services = []

    @contextlib.contextmanager
    def service():
        services.append(True)
        yield True

    def stop(*args, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(local, "multi_process_service", service)
    monkeypatch.setattr(local, "run_in_workers", stop)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    runs = [make_run(seed=seed) for seed in range(4)]
    with pytest.raises(ZeroDivisionError):
        local.run_all(runs, tmp_path, torch.device(device), Recording(), Settings(packed=packed), jobs=jobs)
    assert bool(services) == started


def test_a_run_has_a_worker_even_where_it_is_alone(tmp_path, monkeypatch):
    """This process cannot end a run that hangs in it."""
    monkeypatch.setattr(local, "run_all", lambda *args, jobs, **options: jobs)
    assert local.Local()([], tmp_path, Recording(), Settings(device="cpu")) == 1


def test_auto_is_a_number_of_jobs(command_line):
    assert command_line("run", "quickstart", "--jobs", "auto", "--dry-run").returncode == 0
    done = command_line("run", "quickstart", "--jobs", "many", "--dry-run")
    assert done.returncode == 2
    assert "expected a whole number, or auto" in done.stderr
    done = command_line("run", "mamba/figure8-scan", "--jobs", "auto", "--dry-run")
    assert done.returncode == 2
    assert "times operators" in done.stderr
