"""A run computes on the same number of CPU threads wherever it runs, so that its numbers are the same."""

import pytest
import torch

from subquad.suite.executors.local import run_all
from subquad.suite.runner import execute
from subquad.suite.store import storage
from subquad.suite.training import numerics
from tests.runs import one_run
from tests.suite.toy import MEASURED, TASKS, ToyModel, make_run

CPU = torch.device("cpu")


class Silent:
    """A display that shows nothing."""

    def started(self, run): ...

    def progressed(self, run, progress): ...

    def finished(self, finished): ...

    def stopping(self): ...

    def repeated(self, run, reason): ...


def large(seed=0):
    """A run with sums so long that two threads give other last digits than one thread (observed on two cores)."""
    return one_run(
        {"name": "parity", "length": 64, "num_train": 128},
        {"name": "s4d", "num_layers": 1},
        {"epochs": 1, "batch_size": 64, "lr": 0.01},
        seed,
        tasks=TASKS,
    )


def metrics(root, run):
    """Values that must not depend, to the bit, on the process in which the run is carried out."""
    frame = storage.read([storage.result_path(root, run.experiment, run.scale, run.run_id)])
    frame = frame[~frame["metric"].isin(MEASURED)]
    return frame[["metric", "split", "slice", "step", "value", "data_digest", "threads"]].to_dict("records")


@pytest.fixture
def two_threads():
    """A process that computes on two threads, as one with two cores does unless it is told otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_run_has_the_same_metrics_here_and_in_a_worker(tmp_path, two_threads):
    run, other = large(), large(seed=1)
    run_all([run], tmp_path / "alone", CPU, Silent(), jobs=1)
    run_all([run], tmp_path / "left", CPU, Silent(), jobs=2)
    run_all([run, other], tmp_path / "worker", CPU, Silent(), jobs=2)
    alone, left, worker = (str(metrics(tmp_path / name, run)) for name in ("alone", "left", "worker"))
    assert alone == left == worker
    assert "'threads': 1" in alone


def test_a_row_says_how_many_threads_its_run_had(tmp_path, two_threads):
    for count in (1, 3):
        execute(make_run(seed=count), tmp_path, CPU, threads=count)
        assert {row["threads"] for row in metrics(tmp_path, make_run(seed=count))} == {count}


def changing(monkeypatch, call):
    """Lets every forward pass of the toy model call a function."""
    forward = ToyModel.forward

    def changed(model, *inputs):
        call()
        return forward(model, *inputs)

    monkeypatch.setattr(ToyModel, "forward", changed)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: torch.set_float32_matmul_precision("high"), "float32 matmul precision from highest to high"),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms from False to True"),
        (lambda: torch.set_default_dtype(torch.float64), "default dtype from torch.float32 to torch.float64"),
        (lambda: torch.set_num_threads(2), "number of CPU threads from 1 to 2"),
    ],
)
def test_code_that_changes_how_torch_computes_fails_its_run_and_no_other(tmp_path, monkeypatch, call, words):
    before, (changes, other) = numerics._settings(), (make_run(seed=seed) for seed in range(2))
    changing(monkeypatch, call)
    finished = execute(changes, tmp_path, CPU)
    assert finished.status == "failed"
    assert f"the code changed torch's {words}, so its numbers are not" in finished.error
    assert numerics._settings() == before
    monkeypatch.undo()
    assert execute(other, tmp_path, CPU).status == "ok"


def test_a_run_computes_in_float32_whatever_the_default_was_before(tmp_path):
    run = make_run()
    execute(run, tmp_path / "usual", CPU)
    with numerics.default_dtype(torch.float64):
        execute(run, tmp_path / "set", CPU)
    losses = [[row for row in metrics(tmp_path / name, run) if row["metric"] == "loss"] for name in ("usual", "set")]
    assert losses[0] == losses[1] != []
