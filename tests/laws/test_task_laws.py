"""Every law of tasks fails for a task that breaks it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from subquad.suite.contracts import IGNORE, Segment, TaskSpec
from subquad.suite.laws import tasks as task_laws
from subquad.suite.runs import RunEnded
from subquad.suite.training import data
from subquad.suite.training.trainer import Trainer
from subquad.tasks.induction_heads import InductionHeads
from subquad.tasks.selective_copying import SelectiveCopying
from tests.suite.toy import Parity, make_run


class Small(InductionHeads):
    num_train: int = 100
    num_test: int = 50


class SameRows(Small):
    def segments(self, split, seed):
        return super().segments(split, 0)


class Seeded(Small):
    def segments(self, split, seed):
        for segment in super().segments(split, seed):
            yield replace(segment, inputs=segment.inputs.roll(int(torch.randint(1000, ())), dims=0))


class Drawing(Small):
    def segments(self, split, seed):
        np.random.rand()  # noqa: NPY002 - what the law forbids
        return super().segments(split, seed)


class Leaking(Small):
    def segments(self, split, seed):
        return super().segments("train", seed)


class Deaf(Small):
    """It ignores the split policy."""

    def drawn_split(self, split):
        return split


class Wide(Small):
    def segments(self, split, seed):
        for segment in super().segments(split, seed):
            yield replace(segment, inputs=segment.inputs + self.vocab_size)


class Constant(Small):
    def segments(self, split, seed):
        for segment in super().segments(split, seed):
            yield replace(segment, targets=torch.where(segment.targets == IGNORE, IGNORE, 3))


class Longer(Small):
    @property
    def spec(self):
        return replace(super().spec, max_length=999)


class Restless(SelectiveCopying):
    """Every block has rows of its own."""

    length: int = 32
    num_data: int = 4

    def block(self, seed, index, num_rows):
        return super().block(seed + num_rows, index, num_rows)


class Unequal(Small):
    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


class Mean(Small):
    """A metric that is a mean and no sum."""

    def score(self, logits, targets):
        return {name: (total / count, count) for name, (total, count) in super().score(logits, targets).items()}


class Shifted(Small):
    def score(self, logits, targets):
        return super().score(logits.roll(1, dims=-1), targets)


class Lenient(Small):
    """It takes logits that are NaN for zeros."""

    def score(self, logits, targets):
        return super().score(logits.nan_to_num(), targets)


class Pooled(Small):
    """It announces one prediction a row, and has labels at every position."""

    @property
    def spec(self):
        return replace(super().spec, readout="sequence")


class Flat(Small):
    def segments(self, split, seed):
        for segment in super().segments(split, seed):
            yield replace(segment, targets=segment.targets[:, -1], positions=None)


class Nowhere(Small):
    """Its readout is at positions, and it has none."""

    @property
    def spec(self):
        return replace(super().spec, readout="last")

    def segments(self, split, seed):
        for segment in super().segments(split, seed):
            yield replace(segment, positions=None)


class Unmeasured(Small):
    def score(self, logits, targets):
        return {}


class Fickle(Small):
    """Test batches have another metric."""

    num_test: int = 40

    def score(self, logits, targets):
        scores = super().score(logits, targets)
        return scores if len(targets) == 50 else {"accuracy": scores["accuracy"]}


class Rowwise(Small):
    def score(self, logits, targets):
        return {"accuracy": ((logits.argmax(-1) == targets).sum(1), (targets != IGNORE).sum(1))}


class Infinite(Small):
    def score(self, logits, targets):
        return {name: (total / 0, count) for name, (total, count) in super().score(logits, targets).items()}


class Perplexed(Small):
    @property
    def exponentials(self):
        return {"perplexity": "nats"}


class Unversioned(Small):
    version = None


class Guessing(Small):
    def solve(self, segment):
        return torch.zeros_like(segment.targets)


class Peeking(Small):
    def solve(self, segment):
        return segment.targets


@pytest.mark.parametrize(
    ("law", "task", "words"),
    [
        (task_laws.rows_follow_the_seed, SameRows, "seeds 0 and 1 give the same rows of train"),
        (task_laws.global_generators_are_left_alone, Seeded, "change the rows|draws from the global"),
        (task_laws.global_generators_are_left_alone, Drawing, "draws from the global generators"),
        (task_laws.splits_are_apart, Leaking, "100.0 % of the rows of valid"),
        (task_laws.policy_paper_validates_on_test, Deaf, "valid does not have the test rows"),
        (task_laws.segments_are_well_formed, Wide, "vocab_size is 20"),
        (task_laws.segments_are_well_formed, Constant, "one constant answer"),
        (task_laws.segments_are_well_formed, Longer, "spec says 999"),
        (task_laws.blocks_are_parts_of_one_stream, Restless, "have other inputs"),
        (task_laws.settings_build_the_task_again, Unequal, "not equal"),
        (task_laws.metrics_are_sums, Mean, "of two halves"),
        (task_laws.metrics_are_sums, Lenient, "accuracy of logits that are NaN adds up to 5.0"),
        (task_laws.metrics_are_sums, Shifted, "right answers score 0 of 50"),
        (task_laws.labels_fit_the_readout, Pooled, "`sequence` gives one prediction a row"),
        (task_laws.labels_fit_the_readout, Flat, r"gives predictions \[100, P\], targets are \[100\]"),
        (task_laws.labels_fit_the_readout, Nowhere, "readout `last` needs positions"),
        (task_laws.metrics_fit_every_batch, Unmeasured, "a batch of train has no metric"),
        (task_laws.metrics_fit_every_batch, Fickle, "a batch of valid has the metrics"),
        (task_laws.metrics_fit_every_batch, Rowwise, "is no pair of numbers"),
        (task_laws.metrics_fit_every_batch, Infinite, "the sum of accuracy of train is"),
        (task_laws.metrics_fit_every_batch, Perplexed, "is the exponential of nats, which is no metric"),
        (task_laws.has_a_version, Unversioned, "version is None"),
        (task_laws.oracle_is_always_right, Guessing, "labels of train"),
        (task_laws.oracle_is_always_right, Peeking, "labels of train"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_task_that_breaks_the_law_is_told_so(law, task, words):
    with pytest.raises(AssertionError, match=words):
        law(task())


@pytest.mark.parametrize("law", [task_laws.blocks_are_parts_of_one_stream, task_laws.oracle_is_always_right])
def test_a_law_that_says_nothing_about_a_task_gives_the_reason(law):
    with pytest.raises(task_laws.NotApplicable):
        law(Small())


def test_a_signal_that_is_drawn_follows_the_seed():
    class Noise(Small):
        @property
        def spec(self):
            return replace(super().spec, input="signal", channels=1, vocab_size=0, num_classes=20)

        def segments(self, split, seed):
            for segment in super().segments(split, 0):
                noise = np.random.default_rng([seed, len(split)]).normal(size=(*segment.inputs.shape, 1))
                yield replace(segment, inputs=torch.from_numpy(noise).float())

    task_laws.rows_follow_the_seed(Noise())
    task_laws.segments_are_well_formed(Noise())


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("targets", lambda x: x + 1, "target 2 is too large: num_classes is 2"),
        ("targets", lambda x: x - 1, "target -1 is below 0 and not -100, no label"),
        ("targets", lambda x: x.float(), "targets must be integers, got torch.float32"),
        ("inputs", lambda x: x + 1, "input token 2 is too large: vocab_size is 2"),
        ("positions", lambda x: x + 1, "position 6 is too large: sequences have 6 positions"),
        ("positions", lambda x: x - 6, "position -1 is below 0"),
        ("targets", lambda x: x.expand(-1, 2), "targets and positions have different shapes"),
    ],
)
def test_rows_that_a_gpu_would_look_up_beyond_its_tables_end_a_run(monkeypatch, name, change, words):
    """A number of a wrong row is read there without an error, or the process ends, and so do its later runs."""
    rows = Parity._rows

    def wrong(self, purpose, *where):
        found = rows(self, purpose, *where)
        return replace(found, **{name: change(getattr(found, name))}) if purpose == split else found

    monkeypatch.setattr(Parity, "_rows", wrong)
    for split, endless in (("train", False), ("block", True), ("test", False)):
        data._latest.clear()
        run = make_run(task={"endless": endless}, train={"epoch_steps": 5} if endless else {})
        with pytest.raises(RunEnded) as ended:
            Trainer(run, torch.device("cpu"))()
        assert str(ended.value).startswith(f"split {'test' if split == 'test' else 'train'!r}: {words}")
    data._latest.clear()


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        # a network takes as many positions as there are tokens for all of them, in their order
        (torch.arange(5, -1, -1), "positions of a row do not rise"),
        (torch.tensor([0, 1, 2, 3, 4, 4], dtype=torch.uint8), "positions of a row do not rise"),
        (torch.arange(5), "targets and positions have different shapes"),
        (None, ""),
    ],
)
def test_labels_that_a_model_would_compare_with_other_predictions_are_refused(positions, words):
    spec = TaskSpec("tokens", num_classes=2, readout="token", max_length=6, vocab_size=2)
    rows = torch.zeros(3, 6, dtype=torch.long)
    at = None if positions is None else positions.expand(3, -1)
    assert spec.misfit(Segment(rows, rows, at)) == words
    assert spec.misfit(Segment(rows, rows[:2], at)) == "3 rows have 2 rows of targets"
    assert spec.misfit(Segment(rows, rows[:, :4], None)) == "without positions, all 6 tokens of a row need a label"
