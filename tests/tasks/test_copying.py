"""Copying and the needle: strings, texts and what is scored."""

import numpy as np
import pytest
import torch

from subquad.suite.contracts import IGNORE
from subquad.tasks.copying import Copying
from subquad.tasks.needle import Needle


def test_a_training_row_is_full_of_strings_with_their_copies():
    task = Copying()
    segment = task.block(0, 0, 64)
    assert segment.inputs.shape == segment.targets.shape == (64, 220)
    sizes = []
    for tokens, targets in zip(segment.inputs.tolist(), segment.targets.tolist(), strict=True):
        starts = [t for t, token in enumerate(tokens) if token == 26]
        assert starts[0] == 0
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            if 28 in tokens[start:end]:
                size = tokens[start:].index(27) - 1
                sizes.append(size)
                string = tokens[start + 1 : start + 1 + size]
                assert tokens[start:end] == [26, *string, 27, *string, 28]
                assert targets[start + size + 1 : end - 1] == [*string, 28]
    assert min(sizes) >= 8
    assert max(sizes) <= 50


def test_an_exact_copy_has_no_wrong_letter():
    task = Copying(test_strings=(5,), num_test=4)
    (segment,) = task.segments("test", 0)
    assert segment.inputs.shape == (4, 11)
    assert (segment.targets == segment.inputs[:, 1:6]).all()
    logits = 9.0 * torch.nn.functional.one_hot(segment.targets.long(), 29)
    logits[0, 3] = 0
    logits[0, 3, (segment.targets[0, 3] + 1) % 26] = 1
    metrics = task.score(logits, segment.targets.long())
    assert tuple(int(x) for x in metrics["exact"]) == (3, 4)
    assert tuple(int(x) for x in metrics["accuracy"]) == (19, 20)
    hidden = segment.targets.long().clone()
    hidden[0, 3], hidden[1] = IGNORE, IGNORE
    assert tuple(int(x) for x in task.score(logits, hidden)["exact"]) == (3, 3)


def test_needles_stand_at_the_depth_that_their_slice_names():
    task = Needle(length=64, test_lengths=(128,), num_words=40, num_names=8, num_test=100)
    found = {}
    for segment in task.segments("test", 0):
        tokens = segment.inputs.numpy()
        key = tokens.max() - 2
        places = (tokens == key).argmax(axis=1)
        # 128 tokens without the sentence of 8 and the question of 6
        found[segment.slice] = places / 115
        assert ((tokens == key).sum(axis=1) == 2).all()
    assert list(found) == [f"length=128,depth={depth:g}" for depth in (0, 0.25, 0.5, 0.75)]
    for i, places in enumerate(found.values()):
        assert (places >= i / 4).all()
        assert (places < (i + 1) / 4).all()


def test_distractors_have_other_names_and_words_are_as_frequent_as_zipf_says():
    task = Needle(length=256, num_names=4, num_distractors=3)
    segment = task.block(0, 0, 256)
    tokens = segment.inputs.numpy()
    names = tokens[(tokens >= 200) & (tokens < 204)].reshape(256, 5)
    assert (np.sort(names[:, :4], axis=1) == np.arange(200, 204)).all()
    counts = np.bincount(tokens[tokens < 200], minlength=200)
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.2)
