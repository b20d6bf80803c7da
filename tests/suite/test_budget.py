"""Training for a number of seconds or operations: when it ends, what its rate and evaluations follow, refusals."""

import itertools
import math

import pytest
import torch

from subquad.suite.runs import RunEnded
from subquad.suite.training import trainer
from subquad.suite.training.config import TrainConfig
from tests.runs import one_run
from tests.suite.toy import interrupted, make_run

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass only where the test lets them."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Timed(trainer.Trainer):
    """Trains with a clock on which a step takes some seconds, the first one of a call 1000 more, an evaluation 500."""

    def __init__(self, *run, clock, seconds=(1.0,), **options):
        super().__init__(*run, clock=clock, **options)
        self.passing, self.taken, self.rates, self.compiled = clock, itertools.cycle(seconds), [], False

    def _train_step(self, batch):
        super()._train_step(batch)
        if not self.compiled:
            self.passing.now += 1000
            self.compiled = True
        self.passing.now += next(self.taken)

    def _set_lr(self):
        super()._set_lr()
        self.rates.append(self.lr)

    def _evaluate(self, segment):
        self.passing.now += 500
        return super()._evaluate(segment)


def run_of(**train):
    """A run whose batches are all of 16 rows."""
    return make_run(task={"num_train": 64}, train={"epochs": None, **train})


def budgeted(budget, **train):
    return run_of(budget=budget, **train)


def of(rows, metric, **columns):
    return [row["value"] for row in rows if row["metric"] == metric and columns.items() <= row.items()]


def test_a_run_trains_for_its_seconds_without_compilation_and_evaluation():
    worker = Timed(budgeted({"seconds": 20}), CPU, clock=Clock())
    outcome = worker()
    assert outcome.step == 20
    assert of(outcome.rows, "train_seconds")[-1] == 20
    assert len(of(outcome.rows, "train_seconds")) == 10, "ten evaluations, at equal parts"
    assert of(outcome.rows, "train_seconds") == [2.0 * part for part in range(1, 11)]


def test_a_step_that_is_longer_than_the_others_ends_the_run_late_by_no_more_than_itself():
    outcome = Timed(budgeted({"seconds": 10}), CPU, clock=Clock(), seconds=[0.7, 0.7, 3.0])()
    assert 10 <= of(outcome.rows, "train_seconds")[-1] < 13


@pytest.mark.parametrize("stop_at", [3, 7, 12])
def test_a_run_that_was_stopped_trains_for_the_same_seconds_in_all(tmp_path, stop_at):
    run, path = budgeted({"seconds": 20}), tmp_path / "checkpoint"
    with interrupted(stop_at) as stop:
        Timed(run, CPU, clock=Clock(), checkpoint=path, stop=stop)()
    resumed = Timed(run, CPU, clock=Clock(), checkpoint=path)()
    assert resumed.step == 20
    assert of(resumed.rows, "train_seconds") == [2.0 * part for part in range(1, 11)]
    whole = Timed(run, CPU, clock=Clock())()
    assert of(resumed.rows, "loss") == of(whole.rows, "loss"), "the rehearsal of a step changes nothing"


@pytest.mark.parametrize("stop_at", [18, 198], ids=["before an evaluation", "before the last one"])
def test_an_evaluation_that_falls_due_while_a_run_stops_is_made_by_the_next_call(tmp_path, stop_at):
    run, path, clock, asked = budgeted({"seconds": 20}), tmp_path / "checkpoint", Clock(), itertools.count()

    def stop():
        if next(asked) < stop_at:
            return False
        # the device has yet to finish what the host has launched
        clock.now += 0.5
        return True

    with pytest.raises(KeyboardInterrupt):
        Timed(run, CPU, clock=clock, seconds=[0.1], checkpoint=path, stop=stop)()
    resumed = Timed(run, CPU, clock=Clock(), seconds=[0.1], checkpoint=path)()
    assert len(of(resumed.rows, "train_seconds")) == 10
    assert of(resumed.rows, "train_seconds")[-1] == pytest.approx(20, abs=0.7)


def test_seconds_are_not_continued_on_another_device(tmp_path, monkeypatch):
    run, path = budgeted({"seconds": 20}), tmp_path / "checkpoint"
    with interrupted(5) as stop:
        Timed(run, CPU, clock=Clock(), checkpoint=path, stop=stop)()
    monkeypatch.setattr(trainer, "device_name", lambda device: "another one")
    with pytest.raises(RunEnded, match="continue the run there"):
        Timed(run, CPU, clock=Clock(), checkpoint=path)()


def test_the_rate_falls_to_its_end_however_long_a_step_takes():
    for seconds in (0.5, 2.0):
        options = {"schedule": "linear", "warmup_fraction": 0.1, "lr": 1.0}
        worker = Timed(budgeted({"seconds": 40}, **options), CPU, clock=Clock(), seconds=[seconds])
        steps = worker().step
        assert steps == 40 / seconds
        expected = [min(s / 4, 1 - (s - 4) / 36) for s in (seconds * step for step in range(steps))]
        assert worker.rates == pytest.approx(expected)


def flops_of_a_step(run=None):
    return of(trainer.Trainer(run or run_of(steps=1), CPU)().rows, "train_flops")[-1]


def test_operations_are_those_of_the_model_and_of_the_task_of_a_run():
    """Runs of equal settings share their counts. These have batches of equal shapes."""
    counts = set()
    for width, vocab_size in ((8, 16), (16, 16), (8, 32)):
        task = {"name": "mqar", "length": 16, "num_kv_pairs": 2, "num_train": 4, "num_test": 4}
        model = {"name": "attention", "d_model": width, "num_layers": 1}
        run = one_run({**task, "vocab_size": vocab_size}, model, {"steps": 1, "batch_size": 4})
        counts.add(flops_of_a_step(run))
    assert len(counts) == 3


def test_steps_follow_from_operations():
    one = flops_of_a_step()
    outcome = trainer.Trainer(budgeted({"flops": 7.5 * one}), CPU)()
    assert outcome.step == 7
    assert of(outcome.rows, "train_flops")[-1] == 7 * one
    # with the steps in place of the operations, the constant rate gives the same values
    plain = trainer.Trainer(run_of(steps=7), CPU)()
    assert of(outcome.rows, "loss", split="test") == of(plain.rows, "loss", split="test")


def test_a_run_of_operations_that_was_stopped_takes_as_many_steps(tmp_path):
    run, path = budgeted({"flops": 12 * flops_of_a_step()}, schedule="cosine"), tmp_path / "checkpoint"
    with interrupted(5) as stop:
        trainer.Trainer(run, CPU, checkpoint=path, stop=stop)()
    resumed, whole = trainer.Trainer(run, CPU, checkpoint=path)(), trainer.Trainer(run, CPU)()
    assert resumed.step == whole.step == 12
    assert of(resumed.rows, "loss") == of(whole.rows, "loss")


def test_fewer_operations_than_a_step_takes_are_refused():
    with pytest.raises(RunEnded, match="one step takes"):
        trainer.Trainer(budgeted({"flops": 10.0}), CPU)()


def test_a_run_is_read_at_operations_on_its_way():
    one = flops_of_a_step()
    marks = [2.5 * one, 4 * one, 100 * one]
    rows = trainer.Trainer(run_of(steps=8, eval_flops=marks), CPU)().rows
    read = [
        (row["slice"], row["step"]) for row in rows if row["slice"].startswith("train_") and row["metric"] == "loss"
    ]
    assert read == [(f"train_flops={marks[0]:g}", 3), (f"train_flops={marks[1]:g}", 4)]
    plain = trainer.Trainer(run_of(steps=8), CPU)().rows
    assert of(rows, "loss", slice="") == of(plain, "loss", slice=""), "they decide nothing"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": {"seconds": 1, "flops": 1}}, "exactly one of seconds and flops"),
        ({"budget": {}}, "exactly one of seconds and flops"),
        ({"budget": {"seconds": -1}}, "greater than 0"),
        ({"budget": {"flops": 0}}, "greater than 0"),
        (
            {"budget": {"seconds": 1}, "steps": 3},
            "steps, epochs and budget, got steps=3, epochs=None, budget={seconds: 1}",
        ),
        ({"budget": {"flops": 1e9}, "epochs": 3}, r"epochs=3, budget=\{flops: 1e\+09\}"),
        ({}, "exactly one of steps, epochs and budget"),
        ({"budget": {"seconds": 1}, "warmup_steps": 3}, "warmup_fraction"),
        ({"budget": {"seconds": 1}, "eval_every": 3}, "budget.evaluations"),
        ({"budget": {"seconds": 1}, "schedule_unit": "epoch"}, "schedule_unit: step"),
    ],
)
def test_budgets_that_cannot_be_meant_are_refused(options, words):
    with pytest.raises(ValueError, match=words.replace("{seconds", r"\{seconds").replace("1}", r"1\}")):
        TrainConfig(**options)


def test_seconds_are_of_one_process_and_operations_of_any():
    with pytest.raises(ValueError, match="one device"):
        budgeted({"seconds": 1}).in_processes(2)
    assert budgeted({"flops": 1e9}).in_processes(2).processes == 2


def test_a_budget_is_part_of_the_identity_and_its_absence_is_not():
    assert budgeted({"seconds": 1}).run_id != budgeted({"seconds": 2}).run_id
    assert "budget" not in make_run().resolved["train"]
    assert math.isclose(budgeted({"seconds": 2}).resolved["train"]["budget"]["seconds"], 2)
