"""Metrics while a run trains: each step once, whatever interrupts the run, and never at the price of the run."""

import importlib.machinery
import json
import os
import sys
import types

import pytest
import torch

from subquad.suite.runner import execute
from subquad.suite.runs import Progress
from subquad.suite.store import storage
from subquad.suite.training import live
from tests.suite.toy import interrupted, make_run

CPU = torch.device("cpu")
TIMES = ("seconds", "train/steps_per_s")


def toy(**model):
    return make_run(train={"steps": 8, "epochs": None, "eval_every": 2, "keep": "best", "test_last": True}, model=model)


def lines(root, run):
    path = storage.log_path(root, run.experiment, run.scale, run.run_id)
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(found):
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def test_the_lines_are_the_rows(tmp_path):
    run = toy()
    execute(run, tmp_path, CPU)
    found = lines(tmp_path, run)
    rows = storage.load(storage.result_path(tmp_path, run.experiment, run.scale, run.run_id)).to_pylist()
    for split in ("train", "valid", "test", "test-last"):
        stored = [row for row in rows if row["split"] == split and row["metric"] == "loss" and not row["slice"]]
        written = [(line["step"], line[f"{split}/loss"]) for line in found if f"{split}/loss" in line]
        assert written == [(row["step"], row["value"]) for row in stored]
        assert stored, split
    assert [line["step"] for line in found if "valid/accuracy" in line] == [2, 4, 6, 8]
    assert {line["lr"] for line in found if "lr" in line} == {0.01}
    assert [line["seconds"] for line in found] == sorted(line["seconds"] for line in found)


@pytest.mark.parametrize("stop_at", [0, 3, 5, 8, 9])
def test_an_interrupted_run_has_every_line_once(tmp_path, stop_at):
    run = toy()
    execute(run, tmp_path / "whole", CPU)
    with interrupted(stop_at) as stop:
        execute(run, tmp_path / "broken", CPU, stop=stop)
    # a killed process leaves steps after its checkpoint, and a part of a line
    with storage.log_path(tmp_path / "broken", run.experiment, run.scale, run.run_id).open("a") as file:
        file.write('{"step": 10, "seconds": 1.0, "train/loss": 9.0}\n{"step": 12, "sec')
    execute(run, tmp_path / "broken", CPU)
    assert without_times(lines(tmp_path / "broken", run)) == without_times(lines(tmp_path / "whole", run))


def test_a_repeated_run_starts_a_new_file(tmp_path):
    run = toy()
    for _ in range(2):
        execute(run, tmp_path, CPU, fresh=True)
    assert sum("test/loss" in line for line in lines(tmp_path, run)) == 1


def test_the_lines_of_a_place_without_growing_files_are_written_whole(tmp_path):
    upath = pytest.importorskip("upath")
    run, path = toy(), upath.UPath("memory://live/a.jsonl")
    with live.Log(run, path) as log:
        for step, metrics in ((0, {}), (1, {"train/loss": 0.5}), (2, {"train/loss": 0.25})):
            log.add(Progress(step, 2, "", metrics))
    with live.Log(run, path) as log:
        log.add(Progress(1, 2, "", {}))
        log.add(Progress(2, 2, "", {"train/loss": 0.125}))
    assert [json.loads(line)["train/loss"] for line in path.read_text().splitlines()] == [0.5, 0.125]


def test_a_run_without_metrics_has_no_file(tmp_path):
    with live.Log(toy(), tmp_path / "a.jsonl") as log:
        log.add(Progress(1, 2, "B=1"))
    assert not list(tmp_path.iterdir())


def test_lines_that_cannot_be_written_do_not_fail_the_run(tmp_path):
    run = toy()
    path = storage.log_path(tmp_path, run.experiment, run.scale, run.run_id)
    path.mkdir(parents=True)
    with pytest.warns(UserWarning, match="live metrics end here"):
        assert execute(run, tmp_path, CPU).status == "ok"


def test_a_pipe_in_the_place_of_the_lines_is_named_and_nobody_waits(tmp_path):
    run = toy()
    path = storage.log_path(tmp_path, run.experiment, run.scale, run.run_id)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.warns(UserWarning, match=r"\.jsonl: live metrics end here .*no regular file; remove it"):
        assert execute(run, tmp_path, CPU).status == "ok"


def test_tensorboard_hides_what_came_after_the_checkpoint(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, path = toy(), tmp_path / "a.jsonl"
    for first, values in ((0, (0.5, 0.25)), (1, (0.125,))):
        with live.Log(run, path, ["tensorboard"]) as log:
            log.add(Progress(first, 2, "", {}))
            for step, value in enumerate(values, first + 1):
                log.add(Progress(step, 2, "", {"train/loss": value}))
    events = EventAccumulator(str(tmp_path / "a.tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.125)]


class Wandb(types.ModuleType):
    """Stands for the package, and records the calls."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="here")
        self.calls = []

    def init(self, **options):
        self.calls.append({key: options[key] for key in ("id", "group", "resume")})
        return self

    def log(self, metrics, step):
        if self.fails:
            raise ConnectionError("no network")
        self.calls.append((step, sorted(metrics)))

    def finish(self):
        self.calls.append("finished")

    fails = False


@pytest.fixture
def wandb(monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_weights_and_biases_gets_a_run_of_the_same_id(wandb, tmp_path):
    run = toy()
    execute(run, tmp_path, CPU, log=["wandb"])
    assert wandb.calls[0] == {"id": run.run_id, "group": "toy/test", "resume": None}
    assert (2, ["valid/accuracy", "valid/loss"]) in wandb.calls
    assert wandb.calls[-1] == "finished"


class Trackio(types.ModuleType):
    """Stands for the package, whose functions refuse what its version 0.43 refuses, and records the calls."""

    def __init__(self):
        super().__init__("trackio")
        self.__spec__ = importlib.machinery.ModuleSpec("trackio", None, origin="here")
        self.runs = []

    def init(self, project, name=None, group=None, config=None, resume="never"):
        assert resume in ("must", "allow", "never")
        assert not any(key.startswith("_") for key in config)
        self.runs.append({"project": project, "name": name, "group": group, "resume": resume, "config": config})
        self.runs[-1] |= {"steps": [], "finished": False}
        return self

    def log(self, metrics, step=None):
        assert not {"project", "run", "timestamp", "step", "time", "metrics"} & set(metrics)
        self.runs[-1]["steps"].append((step, metrics))

    def finish(self):
        self.runs[-1]["finished"] = True


@pytest.fixture
def trackio(monkeypatch):
    module = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_trackio_gets_a_run_of_the_same_name(trackio, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    run = toy()
    with interrupted(3) as stop:
        execute(run, tmp_path, CPU, stop=stop, log=["trackio"])
    execute(run, tmp_path, CPU, log=["trackio"])
    first, second = trackio.runs
    assert (first["project"], first["name"], first["group"]) == ("mine", run.run_id, "toy/test")
    assert (first["resume"], second["resume"]) == ("never", "allow")
    assert first["config"]["train.lr"] == 0.01
    assert [one["finished"] for one in trackio.runs] == [True, True]
    known = [step for step, metrics in [*first["steps"], *second["steps"]] if "valid/accuracy" in metrics]
    assert known == [2, 4, 6, 8]


def test_trackio_gets_stored_rows_as_runs(trackio, command_line, tmp_path):
    run = toy()
    execute(run, tmp_path, CPU)
    done = command_line("export", tmp_path, "--to", "trackio", "--only", "metric=accuracy,loss,run")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gave 1 run to trackio\n"
    (found,) = trackio.runs
    assert (found["name"], found["finished"]) == (run.run_id, True)
    rows = storage.load(storage.result_path(tmp_path, run.experiment, run.scale, run.run_id)).to_pylist()
    wanted = [row for row in rows if row["metric"] in ("accuracy", "loss")]
    assert sum(len(metrics) for _, metrics in found["steps"]) == len(wanted)
    last = next(row["value"] for row in wanted if (row["metric"], row["split"], row["slice"]) == ("loss", "test", ""))
    assert dict(found["steps"])[8]["test/loss"] == last
    assert [step for step, _ in found["steps"]] == [2, 4, 6, 8]


def test_a_viewer_that_fails_does_not_fail_the_run(wandb, tmp_path):
    wandb.fails = True
    run = toy()
    with pytest.warns(UserWarning, match="no network"):
        assert execute(run, tmp_path, CPU, log=["wandb"]).status == "ok"
    assert lines(tmp_path, run)


def test_a_viewer_that_cannot_be_used_is_refused_before_anything_is_trained(command_line, tmp_path, monkeypatch):
    monkeypatch.setattr(live.importlib.util, "find_spec", lambda name: None)
    for name, words in (
        ("tensorbord", "did you mean 'tensorboard'"),
        ("wandb", "needs the package wandb; install the extra: pip install -e '.[wandb]'"),
    ):
        done = command_line("run", "quickstart", "--log", name, "--results", tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
    assert not list(tmp_path.iterdir())
