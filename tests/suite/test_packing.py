"""As many runs share a GPU as its memory and their speed allow, and no run ends out of memory for its neighbours."""

import os
import stat
from dataclasses import dataclass

import pytest
import torch

from suite.executors import packing
from suite.executors.local import run_all
from suite.executors.packing import MOST, Load, Room, multi_process_service
from suite.store import storage
from tests.suite.test_workers import Recording, ending
from tests.suite.toy import make_run

GIB = 1 << 30


@dataclass
class Worker:
    """A worker as the room sees it."""

    run: str
    load: Load | None = None


def fill(memory_gib, run_gib, speed_of=lambda count: 100.0):
    """How many workers a GPU gets, if each needs `run_gib` and makes speed_of(number of workers) steps a second."""
    room, there = Room(), []
    while room.allows("cuda:0", there):
        there.append(Worker(f"run {len(there)}"))
        # the first two are measured before others start
        assert len(there) > 2 or not room.allows("cuda:0", there)
        free = int((memory_gib - run_gib * len(there)) * GIB)
        for worker in there:
            worker.load = Load(int(run_gib * GIB), free, speed_of(len(there)))
    return len(there)


def test_small_runs_fill_the_memory_with_a_margin():
    # a run takes 10 GiB, and one more is started while 12.5 are free
    assert fill(140, 10) == 13
    assert fill(15, 10) == 1
    assert fill(10_000, 1) == MOST


def test_runs_that_fill_a_gpu_get_no_more_than_one_neighbour():
    assert fill(140, 1, lambda count: 100.0 / count) == 2
    assert fill(140, 10, lambda count: 100.0 / (1 + 0.1 * count)) == 13


def test_the_speed_of_another_run_says_nothing():
    room, first = Room(), Worker("a", Load(GIB, 100 * GIB, 100.0))
    assert room.allows("cuda:0", [first])
    first.run, first.load = "b", Load(GIB, 100 * GIB, 1.0)
    assert room.allows("cuda:0", [first, Worker("c", Load(GIB, 100 * GIB, 1.0))])


def test_workers_that_have_just_started_are_counted_with_the_memory_they_will_take():
    room = Room()
    there = [Worker(str(i), Load(10 * GIB, 30 * GIB, 100.0)) for i in range(3)]
    assert room.allows("cuda:0", there)
    assert not room.allows("cuda:0", [*there, Worker("new"), Worker("newer")])


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


def test_auto_is_a_number_of_jobs(command_line):
    assert command_line("run", "quickstart", "--jobs", "auto", "--dry-run").returncode == 0
    done = command_line("run", "quickstart", "--jobs", "many", "--dry-run")
    assert done.returncode == 2
    assert "expected a whole number, or auto" in done.stderr
    done = command_line("run", "mamba/figure8-scan", "--jobs", "auto", "--dry-run")
    assert done.returncode == 2
    assert "times operators" in done.stderr
