"""The two synthetic languages of H3, and induction heads at the lengths of Mamba."""

import numpy as np
import pytest
import torch

from subquad.tasks.associative_recall import AssociativeRecall
from subquad.tasks.induction_heads import InductionHeads
from subquad.tasks.induction_heads_extrapolation import InductionHeadsExtrapolation
from tests.drawn import only, p_value


def test_induction_heads_has_the_published_sizes():
    task = InductionHeads()
    train, test = only(task, "train"), only(task, "test")
    assert train.inputs.shape == (5000, 31)
    assert test.inputs.shape == (500, 31)
    assert train.targets.shape == (5000, 31)
    assert test.targets.shape == (500, 1)
    assert (test.positions == 30).all()
    assert task.spec.num_classes == task.spec.vocab_size == 20
    assert test.slice == "length=30"


def test_induction_heads_has_one_trigger_inside_and_one_at_the_end():
    inputs = only(InductionHeads(), "train").inputs.numpy()
    is_trigger = inputs == 18
    assert (is_trigger.sum(axis=1) == 2).all()
    assert is_trigger[:, 30].all()
    place = is_trigger.argmax(axis=1)
    # uniform over 0 .. length - 3, so the answer is never the last ordinary token
    assert p_value(np.bincount(place, minlength=28)) > 1e-6
    assert place.max() == 27
    assert (inputs != 19).all(), "the second special token never occurs"
    assert p_value(np.bincount(only(InductionHeads(), "train").targets[:, -1])) > 1e-6


def test_associative_recall_has_the_published_sizes():
    task = AssociativeRecall()
    train, test = only(task, "train"), only(task, "test")
    assert train.inputs.shape == (5000, 22)
    assert train.targets.shape == (5000, 22)
    assert test.inputs.shape == (500, 22)
    assert test.targets.shape == (500, 1)
    assert task.spec.vocab_size == 10
    assert only(AssociativeRecall(vocab_size=20, length=40), "test").inputs.shape == (500, 42)


def test_associative_recall_draws_fresh_maps_and_asks_uniformly_among_the_keys_that_occur():
    task = AssociativeRecall(num_train=2_000, length=4, vocab_size=18, train_loss="answer-only")
    rows = only(task, "train").inputs.numpy()
    keys, values, query = rows[:, 0:4:2], rows[:, 1:4:2], rows[:, 5]
    assert keys.max() == 7
    assert values.min() == 8
    assert values.max() == 15
    assert (rows[:, 4] == 16).all()
    assert ((keys == query[:, None]).any(axis=1)).all()
    twice = keys[:, 0] == keys[:, 1]
    assert (values[twice, 0] == values[twice, 1]).all(), "one key, one value"
    # duplicates were removed, so only rows with two keys are exactly uniform
    first = (keys[:, 0] == query)[~twice]
    assert p_value(np.bincount(first)) > 1e-6
    same_value = (values[:, 0] == values[:, 1])[~twice]
    assert p_value(np.bincount(same_value), len(same_value) * np.array([7, 1]) / 8) > 1e-6


def test_rows_are_unique_within_a_split():
    task = AssociativeRecall(length=4, vocab_size=8, num_train=110, num_test=60)
    for split in ("train", "test"):
        rows = only(task, split).inputs.numpy()
        assert len(np.unique(rows, axis=0)) == len(rows)


def test_answer_only_changes_the_labels_and_not_the_inputs():
    every, answer = InductionHeads(), InductionHeads(train_loss="answer-only")
    assert (only(every, "train").inputs == only(answer, "train").inputs).all()
    assert (only(every, "train").targets[:, -1:] == only(answer, "train").targets).all()
    assert only(answer, "train").positions.tolist()[0] == [30]


def test_test_lengths_are_slices_of_the_test_split_alone():
    task = AssociativeRecall(test_lengths=(20, 40))
    assert [segment.slice for segment in task.segments("test", 0)] == ["length=20", "length=40"]
    assert [segment.slice for segment in task.segments("valid", 0)] == ["length=20"]
    assert [segment.slice for segment in task.segments("train", 0)] == ["length=20"]
    assert task.spec.max_length == 42
    alone = only(AssociativeRecall(), "test")
    assert (next(iter(task.segments("test", 0))).inputs == alone.inputs).all()


def test_extrapolation_tests_the_published_lengths():
    task = InductionHeadsExtrapolation()
    assert task.test_lengths[0] == 64
    assert task.test_lengths[-1] == 1_048_576
    assert len(task.test_lengths) == 15
    assert task.spec.max_length == 2**20
    assert task.spec.vocab_size == 16
    assert task.fresh


def test_extrapolation_can_validate_every_length_on_rows_of_its_own():
    lengths = (8, 16, 32)
    task = InductionHeadsExtrapolation(length=16, test_lengths=lengths, valid_lengths=lengths, num_test=20)
    parts = {split: list(task.segments(split, 0)) for split in ("valid", "test")}
    assert [part.slice for part in parts["valid"]] == [f"length={n}" for n in lengths]
    assert not torch.equal(parts["valid"][1].inputs, parts["test"][1].inputs)
    alone = InductionHeadsExtrapolation(length=16, test_lengths=lengths, num_test=20)
    assert torch.equal(next(alone.segments("valid", 0)).inputs, parts["valid"][1].inputs)
    assert "valid_lengths" not in alone.model_dump(mode="json")
    with pytest.raises(ValueError, match="valid_lengths has no meaning with split_policy=paper"):
        InductionHeadsExtrapolation(valid_lengths=(64,), split_policy="paper")


def test_extrapolation_bounds_the_tokens_of_a_length_and_draws_lazily():
    task = InductionHeadsExtrapolation(max_test_tokens=2**16, test_lengths=(64, 256, 1024, 65536))
    segments = task.segments("test", 0)
    shapes = [tuple(segment.inputs.shape) for segment in segments]
    assert shapes == [(256, 64), (256, 256), (64, 1024), (1, 65536)]
    # the first length is available before the last one, of 2^40 tokens, is drawn
    huge = InductionHeadsExtrapolation(test_lengths=(64, 2**30), max_test_tokens=2**40)
    assert next(huge.segments("test", 0)).slice == "length=64"


def test_extrapolation_selects_on_the_training_length_unless_told_otherwise():
    clean = InductionHeadsExtrapolation(test_lengths=(64, 512))
    assert [segment.slice for segment in clean.segments("valid", 0)] == ["length=256"]
    paper = InductionHeadsExtrapolation(test_lengths=(64, 512), split_policy="paper")
    assert [segment.slice for segment in paper.segments("valid", 0)] == ["length=64", "length=512"]


def test_extrapolation_is_the_language_of_h3_at_other_lengths():
    rows = InductionHeadsExtrapolation().block(0, 0, 2048).inputs.numpy()
    assert rows.shape == (2048, 256)
    is_trigger = rows == 15
    assert (is_trigger.sum(axis=1) == 2).all()
    assert is_trigger[:, 255].all()
    place = is_trigger.argmax(axis=1)
    assert place.max() <= 252
    # eleven ranges of the 253 places
    assert p_value(np.bincount(place // 23, minlength=11)) > 1e-6
    every = InductionHeadsExtrapolation(train_loss="all-tokens").block(0, 0, 2048)
    assert every.targets.shape == (2048, 256)
    assert (every.inputs.numpy() == rows).all()
