"""The tasks of MAD: what the released code draws, at its sizes."""

import numpy as np
import pytest
import torch

from subquad.suite.contracts import IGNORE
from subquad.tasks.compression import Compression
from subquad.tasks.in_context_recall import FuzzyInContextRecall, InContextRecall
from subquad.tasks.memorization import Memorization
from subquad.tasks.selective_copying import SelectiveCopying
from tests.drawn import only, p_value


def test_the_defaults_are_the_baselines():
    for task, vocab_size, length, num_train in (
        (InContextRecall(), 16, 128, 12_800),
        (FuzzyInContextRecall(), 16, 128, 12_800),
        (Compression(), 16, 32, 12_800),
        (Memorization(), 256, 32, 256),
    ):
        assert (task.vocab_size, task.length, task.num_train, task.num_test) == (vocab_size, length, num_train, 1280)
    assert only(InContextRecall(), "test").inputs.shape == (1280, 127)
    assert only(FuzzyInContextRecall(num_train=10), "train").inputs.shape == (10, 128)


def test_recall_asks_for_every_key_that_was_shown_before():
    test = only(InContextRecall(length=32), "test")
    rows = np.concatenate([test.inputs.numpy(), test.targets[:, -1:].numpy()], axis=1).reshape(1280, 16, 2)
    keys = rows[:, :, 0]
    again = np.array([[key in row[:i] for i, key in enumerate(row)] for row in keys.tolist()])
    assert (keys < 8).all()
    assert ((rows[:, :, 1] >= 8) & (rows[:, :, 1] < 16)).all()
    assert ((test.targets.numpy() != IGNORE) == np.repeat(again, 2, axis=1)[:, :-1] & (np.arange(31) % 2 == 0)).all()
    assert again[:, -1].all()
    assert p_value(np.bincount(keys[:, 0], minlength=8)) > 1e-6
    train = only(InContextRecall(length=32), "train")
    assert (train.targets[:, :-1] == train.inputs[:, 1:]).all()


def test_noise_stands_in_place_of_whole_pairs():
    test = only(InContextRecall(vocab_size=32, num_noise=16, frac_noise=0.4), "test")
    pairs = test.inputs[:, :126].reshape(1280, 63, 2) >= 16
    assert (pairs[:, :, 0] == pairs[:, :, 1]).all()
    assert abs(float(pairs[:, :, 0].float().mean()) - 0.4 * 62 / 63) < 0.01
    assert (test.inputs[:, -1] < 8).all()


def test_fuzzy_keys_are_whole_in_evaluation_and_of_all_sizes_in_training():
    task = FuzzyInContextRecall(num_train=500, num_test=500)
    sizes = {}
    for name in ("train", "test"):
        tokens = only(task, name).inputs.numpy()
        key = np.pad(tokens < 7, ((0, 0), (1, 1)))
        starts, ends = (np.argwhere(key[:, 1:] & ~key[:, :-1]), np.argwhere(key[:, :-1] & ~key[:, 1:]))
        sizes[name] = np.bincount((ends - starts)[:, 1], minlength=4)[1:]
    assert (sizes["test"][:2] == 0).all()
    assert (sizes["train"] / sizes["train"].sum() > 0.25).all()
    test = only(task, "test")
    assert (test.targets[:, -1] != IGNORE).all()
    labelled = test.targets[test.targets != IGNORE]
    assert set(labelled.tolist()) == set(range(7, 15))


def test_the_facts_to_memorise_are_the_same_in_all_seeds_and_splits():
    task = Memorization(vocab_size=32)
    facts = {}
    for seed, name in ((0, "train"), (0, "test"), (1, "train")):
        segment = only(task, name, seed)
        for key, value in zip(
            segment.inputs[:, ::2].flatten().tolist(), segment.targets.flatten().tolist(), strict=True
        ):
            assert facts.setdefault(key, value) == value
    assert sorted(facts) == list(range(15))
    assert len(set(facts.values())) == 15
    assert (only(task, "train").inputs[:, 1::2] == 31).all()


def test_selective_copying_of_mad_ends_in_data_marker_and_noise():
    task = SelectiveCopying(
        length=256, length_rule="total", marker="before", places="gaps", num_train=12_800, num_test=1280
    )
    segment = only(task, "train")
    assert segment.inputs.shape == (12_800, 256)
    assert (segment.inputs[:, 239] == 15).all()
    assert (segment.inputs[:, 240:] == 0).all()
    assert (segment.inputs[:, 238] == segment.targets[:, -1]).all()
    data = segment.inputs[:, :239] != 0
    assert (data.sum(1) == 16).all()
    assert segment.targets.unique().tolist() == list(range(1, 15))
    # the first gap is binomial: 223 noise tokens, one of 16 gaps
    first = data.int().argmax(1).double()
    assert abs(first.mean() - 223 / 16) < 0.2
    assert abs(first.var() - 223 / 16 * 15 / 16) < 1
    with pytest.raises(ValueError, match="the training split is finite and has no blocks"):
        task.block(0, 0, 8)


def test_options_of_selective_copying_that_are_off_are_no_part_of_a_run():
    assert not {"places", "num_train"} & set(SelectiveCopying().model_dump())
    assert SelectiveCopying(num_train=5).model_dump()["num_train"] == 5


def test_the_smallest_rows_of_fuzzy_recall_show_their_last_key():
    task = FuzzyInContextRecall(length=19, num_test=200)
    for tokens in only(task, "test").inputs.tolist():
        key = tuple(token for token in tokens[-6:] if token < 7)[-3:]
        places = [i for i in range(len(tokens) - 2) if tuple(tokens[i : i + 3]) == key]
        assert len(places) > 1


@pytest.mark.parametrize(
    "task", [Compression(), InContextRecall(), FuzzyInContextRecall(), Memorization(), SelectiveCopying()]
)
def test_macro_accuracy_is_the_mean_over_the_classes_that_occur(task):
    classes, generator = 7, torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, classes, generator=generator)
    targets = torch.randint(0, classes - 2, (5, 4), generator=generator)
    targets[0, 1:3] = IGNORE
    predicted = logits.argmax(-1)
    pairs = [(int(p), int(t)) for p, t in zip(predicted.flatten(), targets.flatten(), strict=True) if t != IGNORE]
    present = {p for p, _ in pairs} | {t for _, t in pairs}
    assert present > {t for _, t in pairs}, "a class without a label is predicted"
    shares = []
    for label in present:
        right = [p == t for p, t in pairs if t == label]
        shares.append(sum(right) / len(right) if right else 0.0)
    total, count = task.score_batch(logits, targets)["macro_accuracy"]
    assert count == 5
    assert float(total / count) == pytest.approx(sum(shares) / len(shares))
    total, count = task.score_batch(logits, torch.full_like(targets, IGNORE))["macro_accuracy"]
    assert float(total) == float(count) == 0
