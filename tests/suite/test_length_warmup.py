"""Stages of growing length before the run proper: as many tokens a batch, one schedule, resumable anywhere."""

import functools

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.registry import Entry, Registry
from subquad.suite.runs import RunEnded
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import expand
from subquad.suite.settings.resolver import Resolver
from subquad.suite.training.data import FreshOrder, StagedOrder
from subquad.suite.training.trainer import Trainer
from tests.runs import one_run
from tests.suite.toy import TASKS as TOYS
from tests.suite.toy import Parity, interrupted, numbers

CPU = torch.device("cpu")
STAGES = [{"length": 4, "steps": 3}, {"length": 8, "steps": 5}]


class Reshuffled(Parity):
    """A stream that is 40 rows in ever new order."""

    @property
    def epoch_rows(self):
        return 40


TASKS = Registry("task", {**TOYS.entries, "reshuffled": Entry("tests.suite.test_length_warmup:Reshuffled", "")})


def make(stages=STAGES, train=None, **task):
    return one_run(
        {"name": "parity", "length": 16, "endless": True, **task},
        {"name": "s4d", "num_layers": 1, "d_model": 8, "d_state": 4},
        {"steps": 4, "batch_size": 4, "eval_batch_size": 40, "length_warmup": stages, **(train or {})},
        tasks=TASKS,
    )


def trained(run, **options):
    trainer = Trainer(run, CPU, **options)
    shapes, rates = [], []
    step = trainer._train_step

    def watched(batch):
        shapes.append(tuple(batch.inputs.shape))
        rates.append(trainer.ready.optimizer.param_groups[-1]["lr"])
        step(batch)

    trainer._train_step = watched
    return trainer(), shapes, rates


def test_lengths_grow_and_every_batch_has_as_many_tokens():
    outcome, shapes, _ = trained(make())
    assert shapes == [(16, 4)] * 3 + [(8, 8)] * 5 + [(4, 16)] * 4
    assert outcome.step == 12


def test_a_stage_may_name_its_own_batch_size():
    _, shapes, _ = trained(make([{"length": 5, "steps": 2, "batch_size": 3}]))
    assert shapes == [(3, 5)] * 2 + [(4, 16)] * 4


def test_the_rate_has_one_schedule_over_all_stages():
    _, _, rates = trained(make(train={"schedule": "linear", "lr": 0.12, "warmup_fraction": 0.5}))
    up = [0.12 * step / 6 for step in range(6)]
    assert rates == pytest.approx([*up, *(0.12 * (1 - step / 6) for step in range(6))])


def test_an_epoch_of_a_finite_task_is_every_row_of_that_length_once():
    # 70 rows: batches of 16, 8 and 4
    _, shapes, _ = trained(make([{"length": 4, "epochs": 2}, {"length": 8, "epochs": 1}], endless=False))
    assert shapes == 2 * ([(16, 4)] * 4 + [(6, 4)]) + [(8, 8)] * 8 + [(6, 8)] + [(4, 16)] * 4


def test_an_epoch_of_a_stream_is_its_rows_or_else_the_steps_it_is_given():
    options = {"steps": None, "epochs": 2}
    known = make([{"length": 8, "epochs": 1}], options, name="reshuffled")
    _, shapes, _ = trained(known)
    assert shapes == [(8, 8)] * 5 + [(4, 16)] * 20
    _, shapes, _ = trained(make([{"length": 8, "epochs": 2}], options | {"epoch_steps": 3}))
    assert shapes == [(8, 8)] * 6 + [(4, 16)] * 6
    with pytest.raises(ValueError, match=r"parity draws fresh data; give steps or epoch_steps"):
        make([{"length": 8, "epochs": 2}])


@functools.cache
def uninterrupted(endless):
    run = make(train={"schedule": "cosine", "eval_every": 2, "keep": "best"}, endless=endless)
    return run, trained(run)


@pytest.mark.parametrize(("endless", "stop_at"), [(True, 3), (True, 6), (True, 10), (False, 1), (False, 3), (False, 8)])
def test_an_interrupted_run_continues_in_the_stage_it_was_in(tmp_path, endless, stop_at):
    run, whole = uninterrupted(endless)
    path = tmp_path / "a.checkpoint"
    with interrupted(stop_at) as stop:
        trained(run, checkpoint=path, stop=stop)
    torch.manual_seed(99)
    outcome, shapes, rates = trained(run, checkpoint=path)
    assert numbers(outcome.rows) == numbers(whole[0].rows)
    assert shapes == whole[1][stop_at:]
    assert rates == whole[2][stop_at:]


def test_validation_is_at_the_full_length_from_the_first_stage_on():
    outcome, _, _ = trained(make(train={"eval_every": 1}))
    slices = {row["slice"] for row in outcome.rows if row["split"] == "valid" and row["slice"]}
    assert slices == {"length=16"}
    assert {row["step"] for row in outcome.rows if row["split"] == "valid"} == set(range(1, 13))


@pytest.mark.parametrize(("share", "step"), [(0.6, 4), (1.0, 8)])
def test_a_budget_that_ends_within_the_stages_fails_the_run(share, step):
    """Its rows would be those of a network that has seen no row of the length that they name."""
    first = [row["value"] for row in trained(make(train={"eval_every": 8}))[0].rows if row["metric"] == "train_flops"]
    within = {"steps": None, "budget": {"flops": share * first[0] + 1}}
    with pytest.raises(RunEnded, match=rf"train\.budget ended at step {step}, within the 8 of train\.length_warmup"):
        trained(make(train=within))
    trained(make(train={"steps": None, "budget": {"flops": 1.5 * first[0]}}))


def test_the_digest_covers_the_rows_of_the_stages():
    digests = {trained(make(stages))[0].data_digest for stages in ([], STAGES[:1], STAGES)}
    assert len(digests) == 3


def test_a_run_without_stages_keeps_the_id_it_had_before_there_were_any():
    plain = make(())
    assert "length_warmup" not in plain.resolved["train"]
    assert make().run_id != plain.run_id
    assert make().resolved["train"]["length_warmup"][0]["length"] == 4
    assert make([{**STAGES[0], "steps": 4}, STAGES[1]]).run_id != make().run_id


def test_only_the_stage_at_hand_is_open():
    task, opened, closed = Parity(endless=True), [], []

    class Watched(FreshOrder):
        def close(self):
            closed.append(self.number)
            super().close()

    def opener(number):
        def call():
            order = Watched(task, 2, 0, 2, CPU)
            order.number = number
            opened.append(number)
            return order

        return call

    order = StagedOrder(
        [(opener(0), lambda _: 2), (opener(1), lambda order: order.epoch_steps)], FreshOrder(task, 4, 0, 1, CPU)
    )
    assert order.stage_steps == 4
    opened.clear(), closed.clear()
    for step in range(6):
        order.locate(step)
        assert len(opened) - len(closed) <= (step < 4)
    assert opened == [0, 1]
    order.close()
    assert len(closed) == len(opened) + 1


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{"length": 8, "steps": 1}, {"length": 4, "steps": 1}], "the lengths must grow, got 8, 4"),
        ([{"length": 8, "steps": 1}, {"length": 8, "steps": 1}], "the lengths must grow"),
        ([{"length": 16, "steps": 1}], "length 16 is not below the task's 16"),
        ([{"length": 5, "steps": 1}], "holds no whole number of rows of length 5; give the stage a batch_size"),
        ([{"length": 4}], "exactly one of steps and epochs"),
        ([{"length": 4, "steps": 1, "epochs": 1}], "exactly one of steps and epochs"),
        ([{"length": 4, "step": 1}], "unknown key"),
    ],
)
def test_stages_that_cannot_work_are_refused_before_any_run(stages, words):
    with pytest.raises(ValueError, match=words):
        make(stages)


def test_what_a_task_cannot_do_at_a_length_is_the_tasks_own_error():
    config = ExperimentConfig(
        title="stages",
        baseline={
            "task": {"name": "mqar"},
            "model": {"name": "s4d"},
            "train": {"steps": 1, "length_warmup": [{"length": 4, "steps": 1}]},
        },
    )
    from subquad.tasks import TASKS as REAL

    with pytest.raises(ValueError, match=r"length_warmup: length 4: mqar: .* needs length >= 256"):
        expand("stages/test", config, Resolver(REAL, MODELS))


def test_a_schedule_in_epochs_goes_with_no_stages():
    with pytest.raises(ValueError, match="take schedule_unit: step"):
        make(train={"schedule_unit": "epoch"})


def test_a_task_whose_rows_have_one_length_has_no_stages():
    from subquad.suite.training.config import Stage, TrainConfig
    from subquad.suite.training.run import stage_of
    from subquad.tasks.lra.image import LRAImage

    with pytest.raises(ValueError, match="no option `length`; leave the stages out"):
        stage_of(LRAImage(), TrainConfig(steps=1), Stage(length=4, steps=1))
