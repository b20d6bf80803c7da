"""One loop for every task: the same seed gives the same losses, whatever interrupts it."""

import contextlib
import dataclasses
import functools
import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from subquad.suite import environment
from subquad.suite.contracts import IGNORE, ParamGroup, Segment
from subquad.suite.metrics import check_direction, smaller_is_better
from subquad.suite.runner import execute, outdated, plan
from subquad.suite.runs import Outcome, RunEnded
from subquad.suite.store import endings, storage
from subquad.suite.training import data, trainer
from subquad.suite.training.config import TrainConfig
from subquad.suite.training.data import FiniteOrder, FreshOrder, HostOrder, digest, finite_order, load_splits
from subquad.suite.training.numerics import numerics
from subquad.suite.training.scores import add_rows
from subquad.suite.training.selection import Selection
from tests.suite.toy import MEASURED, Parity, ToyModel, interrupted, make_run, numbers

CPU = torch.device("cpu")


def train(run, **options):
    return trainer.Trainer(run, CPU, **options)()


def test_the_same_seed_gives_bitwise_equal_losses():
    run = make_run(train={"deterministic": True})
    first, second = train(run), train(run)
    assert numbers(first.rows) == numbers(second.rows)
    assert numbers(first.rows) != numbers(train(make_run(train={"deterministic": True}, seed=1)).rows)


def test_a_deterministic_run_fails_where_its_process_was_only_to_warn():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with numerics("fp32", deterministic=True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_record_joins_accuracy_speed_memory_parameters_and_state():
    metrics = {row["metric"] for row in train(make_run()).rows}
    assert metrics >= MEASURED - {"peak_memory"} | {"accuracy", "loss", "num_parameters", "state_size"}


def test_training_learns():
    options = {"epochs": 20, "batch_size": 64, "lr": 0.03}
    rows = train(make_run(task={"num_train": 640}, train=options, model={"dropout": 0.0})).rows
    (accuracy,) = (
        row["value"] for row in rows if row["split"] == "test" and row["metric"] == "accuracy" and not row["slice"]
    )
    assert accuracy > 0.95


@functools.cache
def uninterrupted(endless):
    options = {"schedule": "cosine", "warmup_steps": 3, "keep": "best", "eval_every": 1, "clip": 0.5, "test_last": True}
    run = make_run(task={"endless": endless}, train=options | ({"epoch_steps": 5} if endless else {}))
    return run, train(run)


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("stop_at", [1, 7, 13, 20, 21], ids=["early", "middle", "late", "at the test", "between tests"])
def test_an_interrupted_run_ends_with_the_numbers_of_an_uninterrupted_one(tmp_path, endless, stop_at):
    run, whole = uninterrupted(endless)
    path = tmp_path / "a.checkpoint"
    with interrupted(stop_at) as stop:
        train(run, checkpoint=path, stop=stop)
    torch.manual_seed(99)
    continued = train(run, checkpoint=path)
    assert numbers(continued.rows) == numbers(whole.rows)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "a.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        train(make_run(), checkpoint=path, stop=lambda: True)
    # other rows, and the same rows under another setting
    for other in (make_run(seed=1), make_run(train={"weight_decay": 0.5})):
        with pytest.raises(RunEnded, match="belongs to another run"):
            train(other, checkpoint=path)


@pytest.mark.parametrize(
    ("fault", "status"),
    [("nan", "diverged"), ("error", "failed"), ("oom", "oom"), ("interrupt", "failed"), ("exit", "failed")],
)
def test_a_run_that_ends_badly_is_a_row_with_its_reason(tmp_path, fault, status):
    run = make_run(model={"fault": fault})
    # nobody asked it to stop
    finished = execute(run, tmp_path, CPU, stop=lambda: False)
    assert finished.status == status
    frame = storage.read(storage.files([tmp_path], run.experiment))
    (ending,) = frame[frame["metric"] == "run"].to_dict("records")
    assert ending["status"] == status
    assert ending["error"]
    assert ending["run_id"] == run.run_id
    # an exception may have been the machine's; the others would happen again
    (planned,) = plan([run], [tmp_path])
    assert planned.todo == (status == "failed")


@pytest.mark.parametrize(
    ("split", "left", "words"),
    [
        ("train", 0, "no rows in its split 'train'"),
        ("test", 0, "no rows in its split 'test'"),
        ("test", None, "no rows in its split 'test'"),
        ("test", 40, "no labels in its split 'test'"),
        ("train", 70, "no labels in its split 'train'"),
    ],
)
def test_a_task_that_has_nothing_to_measure_is_a_failed_run(tmp_path, monkeypatch, split, left, words):
    given = Parity.segments

    def segments(self, name, seed):
        (segment,) = given(self, name, seed)
        if name != split:
            yield segment
        elif left is not None:
            unlabelled = torch.full_like(segment.targets, IGNORE)
            yield Segment(segment.inputs[:left], unlabelled[:left], segment.positions[:left])

    monkeypatch.setattr(Parity, "segments", segments)
    monkeypatch.setattr(data, "_latest", {})
    finished = execute(make_run(), tmp_path, CPU)
    assert (finished.status, finished.error) == ("failed", f"task parity has {words}")


def test_divergence_names_the_step(tmp_path):
    run = make_run(model={"fault": "nan"})
    assert "step 0" in execute(run, tmp_path, CPU).error


def test_a_batch_without_a_label_is_not_called_a_divergence(tmp_path, monkeypatch):
    given = Parity.segments

    def segments(self, name, seed):
        (segment,) = given(self, name, seed)
        if name == "train":
            segment.targets[1:] = IGNORE
        yield segment

    monkeypatch.setattr(Parity, "segments", segments)
    monkeypatch.setattr(data, "_latest", {})
    finished = execute(make_run(train={"batch_size": 7, "shuffle": False}), tmp_path, CPU)
    assert finished.status == "failed"
    assert "the batch of step 1 has no label" in finished.error


def test_a_run_gives_a_sign_of_life_at_every_step_batch_and_phase(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY_S", 0.0)
    signs = []
    run = make_run(train={"epochs": 1, "eval_every": 1, "eval_batch_size": 20})
    execute(run, tmp_path, CPU, alive=lambda *sign: signs.append(sign))
    assert [(*sign, len(list(same))) for sign, same in itertools.groupby(signs)] == [
        ("preparing data and model", 0, 1),
        ("reading a checkpoint", 0, 1),
        *(("training", step, 1) for step in range(5)),
        ("evaluating", 5, 2),
        ("writing a checkpoint", 5, 2),
        ("testing", 5, 2),
        ("evaluating", 5, 2),
        ("measuring", 5, 1),
        ("writing rows", 5, 1),
    ]


def test_a_stored_run_is_done_and_its_checkpoint_gone(tmp_path):
    run = make_run()
    assert plan([run], [tmp_path])[0].todo
    execute(run, tmp_path, CPU)
    assert not plan([run], [tmp_path])[0].todo
    assert plan([run], [tmp_path], force=True)[0].todo
    assert not list(tmp_path.rglob("*.checkpoint"))


def test_rows_name_the_commit_at_which_their_run_began(tmp_path, monkeypatch):
    environment.commit.cache_clear()
    environment.code.cache_clear()
    monkeypatch.setenv("SUBQUAD_COMMIT", "a" * 40)
    # the checkout moves on while the run lasts
    execute(make_run(), tmp_path, CPU, alive=lambda *_: monkeypatch.setenv("SUBQUAD_COMMIT", "b" * 40))
    environment.commit.cache_clear()
    environment.code.cache_clear()
    assert set(storage.read(storage.files([tmp_path], make_run().experiment))["commit"]) == {"a" * 40}


def test_every_row_carries_its_provenance(tmp_path):
    run = make_run()
    execute(run, tmp_path, CPU)
    frame = storage.read(storage.files([tmp_path], run.experiment))
    for column in ("device", "torch", "python", "precision", "data_digest", "started_at", "config"):
        assert frame[column].astype(bool).all(), column
    assert (frame["duration_s"] > 0).all()


@contextlib.contextmanager
def planted_operators(version=1):
    used = {}
    yield used
    used["scan"] = {"version": version, "backend": "torch"}


def test_a_row_records_the_operators_that_the_run_used(tmp_path):
    run = make_run()
    execute(run, tmp_path, CPU, record=planted_operators)
    execute(run, tmp_path / "unrecorded", CPU)
    frame = storage.read(storage.files([tmp_path], run.experiment))
    assert set(frame["operators"]) == {'{"scan": {"backend": "torch", "version": 1}}'}
    frame = storage.read(storage.files([tmp_path / "unrecorded"], run.experiment))
    assert frame["operators"].isna().all()


def test_a_stored_run_whose_operators_are_older_than_todays_is_kept_and_named(tmp_path):
    run, other = make_run(), make_run(seed=1)
    execute(run, tmp_path, CPU, record=planted_operators)
    execute(other, tmp_path, CPU, record=planted_operators)
    assert outdated(plan([run], [tmp_path], versions={"scan": 1})) is None
    assert outdated(plan([run], [tmp_path])) is None
    planned = plan([run, other, make_run(seed=2)], [tmp_path], versions={"scan": 3, "conv": 2})
    assert [item.todo for item in planned] == [False, False, True]
    assert outdated(planned) == (
        f"kept, but stored with older operators (scan 1 (now 3): {run.run_id}, {other.run_id}); --force repeats them"
    )
    assert outdated(plan([run], [tmp_path], force=True, versions={"scan": 3})) is None


def test_the_data_digest_is_the_same_whatever_the_model():
    small, large = make_run(), make_run(model={"d_model": 32})
    assert train(small).data_digest == train(large).data_digest
    assert train(make_run(seed=1)).data_digest != train(small).data_digest


def test_the_digest_covers_every_byte():
    task = Parity()
    rows = list(task.segments("train", 0))
    before = digest(rows)
    rows[0].targets[3, 0] ^= 1
    assert digest(rows) != before


def test_rows_are_read_again_once_the_files_have_changed(monkeypatch):
    task = Parity(length=4)
    before = load_splits(task, 0)
    assert load_splits(task, 0) is before
    monkeypatch.setattr(Parity, "fingerprint", lambda self: "other files")
    assert load_splits(task, 0) is not before


def test_a_split_without_one_of_its_parts_has_no_mean(monkeypatch):
    def two_parts(self, split, seed):
        for part in ("half=1", "half=2") if split == "test" else ("",):
            yield dataclasses.replace(self._rows(split, 70, seed), slice=part)

    evaluate = trainer.Trainer._evaluate

    def without_memory(self, segment):
        if segment.slice == "half=2":
            raise torch.OutOfMemoryError("planted: out of memory")
        return evaluate(self, segment)

    monkeypatch.setattr(Parity, "segments", two_parts)
    monkeypatch.setattr(trainer.Trainer, "_evaluate", without_memory)
    rows = [row for row in train(make_run()).rows if row["metric"] == "accuracy" and row["split"] == "test"]
    assert [(row["slice"], row["status"], row["value"] is None) for row in rows] == [
        ("half=2", "oom", True),
        ("half=1", "ok", False),
        ("", "oom", True),
    ]
    assert rows[-1]["error"] == "half=2: planted: out of memory"


@pytest.mark.parametrize(
    ("metric", "smaller"),
    [("loss", True), ("perplexity", True), ("bits_per_base", True), ("word_error", True), ("exact", False)],
)
def test_the_name_of_a_metric_says_whether_less_is_better(metric, smaller):
    assert smaller_is_better(metric) is smaller
    check_direction(metric)


def test_a_choice_by_a_metric_whose_name_says_nothing_is_refused(monkeypatch):
    score = Parity.score
    monkeypatch.setattr(Parity, "score", lambda self, *given: {"wer": score(self, *given)["loss"]})
    with pytest.raises(ValueError, match="the name 'wer' does not say whether a smaller value is better"):
        make_run(train={"keep": "best", "keep_metric": "wer"})


def test_an_early_stop_ends_the_run_at_its_threshold():
    outcome = train(make_run(train={"epochs": 50, "eval_every": 1, "early_stop": {"threshold": 0.0}}))
    assert outcome.step == 5


def test_an_early_stop_waits_for_its_patience():
    options = {"epochs": 50, "eval_every": 1, "lr": 1e-12, "early_stop": {"patience": 3}}
    assert train(make_run(train=options)).step == 5 * 4


@pytest.mark.parametrize(
    ("metric", "best"), [("accuracy", 2.0), ("loss", 1.0), ("bits_per_byte", 1.0), ("mean_absolute_error", 1.0)]
)
def test_keep_best_knows_of_which_metrics_less_is_better(metric, best):
    selection = Selection(TrainConfig(steps=1, batch_size=1, keep="best", keep_metric=metric))
    for value in (1.5, 1.0, 2.0):
        weights = {"weight": torch.tensor(value)}
        selection.update({metric: value}, lambda weights=weights: weights)
    assert float(selection.weights["weight"]) == best


def test_keep_best_tests_the_weights_of_the_best_validation():
    # after the first evaluation the rate is destructive, so the best weights are not the last
    options = {"epochs": 6, "eval_every": 1, "lr": 3.0, "keep": "best"}
    rows = train(make_run(train=options, seed=3)).rows
    valid = [r["value"] for r in rows if r["metric"] == "accuracy" and r["split"] == "valid" and not r["slice"]]
    assert len(set(valid)) > 1
    kept = trainer.Trainer(make_run(train=options, seed=3), CPU)
    kept()
    again = kept._evaluate(kept.ready.valid[0])["accuracy"]
    assert again[0] / again[1] == max(valid)


def test_the_last_weights_can_be_tested_beside_the_best():
    options = {"epochs": 6, "eval_every": 1, "lr": 3.0}

    def accuracy(split: str, **more) -> float:
        rows = train(make_run(train=options | more, seed=3)).rows
        return next(r["value"] for r in rows if (r["metric"], r["split"], r["slice"]) == ("accuracy", split, ""))

    best, last = accuracy("test", keep="best"), accuracy("test", keep="last")
    assert best != last
    assert accuracy("test", keep="best", test_last=True) == best
    assert accuracy("test-last", keep="best", test_last=True) == last
    assert "test_last" not in TrainConfig(steps=1).model_dump()
    with pytest.raises(ValueError, match="test_last has no meaning with keep=last"):
        TrainConfig(steps=1, test_last=True)


def test_rows_are_seen_once_an_epoch_and_never_mix_segments():
    segments = (
        *Parity(length=4, num_train=10).segments("train", 0),
        *Parity(length=6, num_train=7).segments("train", 0),
    )
    order = FiniteOrder(segments, 4, 0, True, CPU)
    assert order.epoch_steps == 5
    seen = {0: [], 1: []}
    for step in range(5):
        source, rows = order.locate(step)
        seen[order.sources.index(source)] += rows.tolist()
    assert sorted(seen[0]) == list(range(10))
    assert sorted(seen[1]) == list(range(7))
    assert order.locate(5)[1].tolist() != order.locate(0)[1].tolist()


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_kept_on_the_host_come_in_the_same_batches(shuffle):
    segments = (
        *Parity(length=4, num_train=10).segments("train", 0),
        *Parity(length=6, num_train=7).segments("train", 0),
    )
    near, far = FiniteOrder(segments, 4, 0, shuffle, CPU), HostOrder(segments, 4, 0, shuffle, CPU)
    assert near.epoch_steps == far.epoch_steps
    # onwards over the end of an epoch, back, and far ahead
    for step in (0, 1, 2, 3, 4, 5, 6, 2, 3, 90):
        (a, rows), (b, same) = near.locate(step), far.locate(step)
        for name in ("inputs", "targets", "positions"):
            assert torch.equal(getattr(a, name)[rows], getattr(b, name)[same])
        assert len(b) == len(rows)
        assert a.slice == b.slice
    far.close()


@pytest.mark.parametrize(("free", "kind"), [(10**6, FiniteOrder), (500, HostOrder)])
def test_rows_stay_on_the_device_where_they_take_no_more_than_half_of_what_is_free(free, kind):
    segments = tuple(Parity(length=6, num_train=20).segments("train", 0))
    order = finite_order(segments, 4, 0, True, CPU, free_bytes=free)
    order.close()
    assert type(order) is kind


def test_without_shuffling_every_epoch_is_the_stored_order():
    order = FiniteOrder(tuple(Parity(num_train=10).segments("train", 0)), 4, 0, False, CPU)
    assert [order.locate(step)[1].tolist() for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert order.locate(3)[1].tolist() == [0, 1, 2, 3]


def test_fresh_rows_depend_on_the_step_and_not_on_where_one_starts():
    task = Parity(endless=True)
    one, other = FreshOrder(task, 8, 0, 10, CPU), FreshOrder(task, 8, 0, 10, CPU)
    steps = [0, 1, 255, 256, 300]
    forward = [one.locate(step) for step in steps]
    backward = [other.locate(step) for step in reversed(steps)][::-1]
    for (a, rows), (b, same) in zip(forward, backward, strict=True):
        assert torch.equal(a.inputs[rows], b.inputs[same])
    taken = [segment.inputs[rows] for segment, rows in forward]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(taken, 2))
    one.close()
    other.close()


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_good_one(tmp_path, monkeypatch, capsys):
    run = make_run()
    path = tmp_path / "a.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        train(run, checkpoint=path, stop=lambda: True)
    good = path.read_bytes()

    def broken(state, where):
        where.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(trainer.torch, "save", broken)
    with pytest.raises(KeyboardInterrupt):
        train(run, checkpoint=path, stop=lambda: True)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]
    assert f"{run.run_id[:6]}: no checkpoint: disk full" in capsys.readouterr().err


def test_a_failed_run_keeps_its_checkpoint(tmp_path):
    run = make_run(model={"fault": "error"})
    path = storage.checkpoint_path(tmp_path, run.experiment, run.scale, run.run_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"of an earlier call")
    assert execute(run, tmp_path, CPU).status == "failed"
    assert path.read_bytes() == b"of an earlier call"


def test_rows_that_cannot_be_written_are_put_aside_and_may_be_copied(tmp_path, monkeypatch):
    run, results, elsewhere = make_run(), tmp_path / "results", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    results.mkdir()
    (results / "toy").write_bytes(b"a file where a folder is needed")
    finished = execute(run, results, CPU)
    assert finished.status == "failed"
    assert not finished.stored
    (aside,) = elsewhere.iterdir()
    assert f"its rows could not be written (Not a directory) and are in {aside}; free space" in finished.error
    (results / "toy").unlink()
    shutil.copytree(aside, results, dirs_exist_ok=True)
    assert endings.ending(storage.result_path(results, run.experiment, run.scale, run.run_id)).status == "ok"


def test_weights_that_cannot_be_written_are_a_failed_run_whose_rows_say_so(tmp_path):
    run = make_run()
    path = storage.weights_path(tmp_path, run.experiment, run.scale, run.run_id)
    # a folder stands where the file has to be
    (path / "taken").mkdir(parents=True)
    finished = execute(run, tmp_path, CPU, keep_weights=True)
    assert (finished.status, finished.stored) == ("failed", True)
    assert "its weights could not be written" in finished.error
    assert endings.ending(storage.result_path(tmp_path, run.experiment, run.scale, run.run_id)).status == "failed"


def test_rows_that_can_be_written_nowhere_are_a_failure_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "toy"))
    (tmp_path / "toy").write_bytes(b"a file where a folder is needed")
    finished = execute(make_run(), tmp_path, CPU)
    assert (finished.status, finished.stored) == ("failed", False)
    assert "rows could not be written (Not a directory); free space" in finished.error


def watched(run, **options):
    """A trainer, and the list of (step, rate) that it fills whenever it sets its rate."""
    one, seen = trainer.Trainer(run, CPU, **options), []
    set_lr = one._set_lr

    def set_and_note():
        set_lr()
        seen.append((one.step, one.lr))

    one._set_lr = set_and_note
    return one, seen


def test_every_group_trains_with_its_own_rate_and_decay(monkeypatch):
    def two_groups(self, no_decay=()):
        parameters = list(self.parameters())
        return [
            ParamGroup("weight", parameters[:1]),
            ParamGroup("ssm", parameters[1:], lr=2e-4, weight_decay=0.0),
        ]

    monkeypatch.setattr(ToyModel, "param_groups", two_groups)
    warmup = {"schedule": "cosine", "warmup_steps": 2, "warmup_from": 5e-3}
    one = trainer.Trainer(make_run(train={"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), **warmup}), CPU)
    for _, step in one.steps():
        step()
        first, second = one.ready.optimizer.param_groups
    # the first step has half of the rate
    assert (first["lr"], second["lr"]) == (pytest.approx(5e-3), pytest.approx(1e-4))
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert first["betas"] == second["betas"] == (0.8, 0.95)


def test_the_gradient_is_clipped_to_its_largest_norm():
    one = trainer.Trainer(make_run(train={"clip": 1e-3}), CPU)
    for _, step in one.steps():
        step()
        norm = torch.stack([p.grad.norm() for p in one.ready.parameters if p.grad is not None]).norm()
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_a_stalled_validation_lowers_the_rate_of_the_steps_behind_it():
    stalled = {"epochs": 6, "eval_every": 1, "lr": 1e-12}
    plateau = {"schedule": "plateau", "plateau_patience": 1, "plateau_factor": 0.1}
    one, rates = watched(make_run(train={**stalled, **plateau}))
    one()
    assert rates[0][1] == 1e-12
    assert rates[-1][1] < 0.5e-12


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "plateau", "plateau_patience": 1, "plateau_factor": 0.5},
        {"early_stop": {"patience": 3}},
    ],
)
def test_an_interrupted_run_remembers_how_long_validation_has_stalled(tmp_path, options):
    run = make_run(train={"epochs": 8, "eval_every": 1, "lr": 1e-12, **options})
    one, whole = watched(run)
    one()
    end = one.outcome.step
    path, calls = tmp_path / "a.checkpoint", iter(range(1000))
    one, before = watched(run, checkpoint=path, stop=lambda: next(calls) >= 13)
    with contextlib.suppress(KeyboardInterrupt):
        one()
    one, after = watched(run, checkpoint=path)
    one()
    assert before + after == whole
    assert one.outcome.step == end


def test_throughput_counts_the_tokens_of_every_step():
    values = {row["metric"]: row for row in train(make_run(task={"num_train": 64})).rows}
    tokens, steps = (values[metric]["samples"] for metric in ("train_throughput", "train_steps"))
    # a batch has 16 rows of 6 tokens
    assert tokens == pytest.approx([16 * 6 * rate for rate in steps])


def test_inference_throughput_counts_tokens(monkeypatch):
    seen = []
    rate = trainer.measure.rate

    def noted(call, count, device):
        seen.append(count)
        return rate(call, count, device)

    monkeypatch.setattr(trainer.measure, "rate", noted)
    train(make_run(task={"num_train": 64}))
    assert seen == [16 * 6]


def test_a_mean_is_over_labels_and_not_over_slices():
    outcome = Outcome()
    scores = {"a": [{"accuracy": (1.0, 1.0)}], "b": [{"accuracy": (0.0, 2.0)}, {"accuracy": (0.0, 1.0)}]}
    assert add_rows(outcome, Parity(), "test", scores, 7) == {"accuracy": 0.25}
    assert [(row["slice"], row["value"]) for row in outcome.rows] == [("a", 1.0), ("b", 0.0), ("", 0.25)]


def test_bf16_runs_the_linear_maps_in_bf16(monkeypatch):
    seen = set()
    forward = ToyModel.forward

    def noted(self, *inputs):
        # operations are counted on tensors without values, and in one precision
        if type(inputs[0]) is torch.Tensor:
            seen.add(self.inner(torch.zeros(1, self.inner.in_features)).dtype)
        return forward(self, *inputs)

    monkeypatch.setattr(ToyModel, "forward", noted)
    train(make_run(train={"precision": "bf16", "epochs": 1}))
    assert seen == {torch.bfloat16}


def test_rows_hold_no_paths_of_this_machine(tmp_path):
    folder = tmp_path / "someone" / "private" / "texts"
    run = make_run(model={"fault": "error"})
    resolved = {
        **run.resolved,
        "task": {**run.resolved["task"], "data": str(folder), "tokenizer": str(folder / "t.json")},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run), "resolved", property(lambda self: resolved))
        execute(run, tmp_path, CPU)
        path = storage.result_path(tmp_path, run.experiment, run.scale, run.run_id)
    assert run.run_id == path.stem, "the places of data are no part of an identity"
    rows = storage.load(path).to_pylist()
    task = json.loads(rows[-1]["config"])["task"]
    assert (task["data"], task["tokenizer"]) == ("texts", "t.json")
    assert "Traceback" in rows[-1]["error"]
    assert 'File "tests/suite/toy.py"' in rows[-1]["error"]
    places = (tmp_path, Path(__file__).parent, sys.prefix)
    assert not any(str(place) in str(row) for row in rows for place in places)
