"""MQAR: the published protocols."""

import numpy as np
import pytest
import torch

from subquad.tasks.mqar import MQAR
from tests.drawn import only, p_value

SMALL = {"vocab_size": 128, "length": 64, "num_kv_pairs": 8, "num_train": 2000, "num_test": 100}


def test_zoology_protocol_is_the_published_one():
    task = MQAR()
    (train,), (test,) = task.shapes("train"), task.shapes("test")
    assert (train.length, train.num_kv_pairs, train.num_examples) == (512, 64, 100_000)
    assert (test.length, test.num_kv_pairs, test.num_examples) == (512, 64, 3_000)
    assert (task.vocab_size, task.power_a, task.non_queries) == (8192, 0.01, "zeros")
    for length, num_kv_pairs in ((64, 4), (128, 8), (256, 16), (512, 64)):
        swept = MQAR(length=length, num_kv_pairs=num_kv_pairs, num_test=10)
        segment = only(swept, "test")
        assert segment.inputs.shape == (10, length)
        assert segment.targets.shape == segment.positions.shape == (10, num_kv_pairs)
        assert segment.slice == f"length={length},num_kv_pairs={num_kv_pairs}"


def test_based_protocol_is_the_published_one():
    task = MQAR(protocol="based-fig2")
    assert [(s.length, s.num_kv_pairs, s.num_examples) for s in task.train] == [
        (64, 4, 100_000),
        (128, 8, 20_000),
        (256, 16, 20_000),
        (256, 32, 20_000),
        (256, 64, 20_000),
    ]
    assert [(s.length, s.num_kv_pairs) for s in task.test] == [
        (64, 4),
        (64, 8),
        (64, 16),
        (128, 32),
        (256, 64),
        (512, 128),
        (1024, 256),
    ]
    assert {s.num_examples for s in task.test} == {1_000}
    assert (task.vocab_size, task.power_a, task.non_queries) == (8192, 0.01, "random")
    assert task.spec.max_length == 1024
    slices = [segment.slice for segment in task.segments("test", 0)]
    assert slices[0] == "length=64,num_kv_pairs=4"
    assert slices[-1] == "length=1024,num_kv_pairs=256"


def test_keys_and_values_come_from_their_halves_without_repetition():
    segment = only(MQAR(**SMALL), "train")
    rows = segment.inputs.numpy()
    keys, values = rows[:, 0:16:2], rows[:, 1:16:2]
    assert keys.min() == 1
    assert keys.max() == 63
    assert values.min() == 64
    assert values.max() == 127
    for part in (keys, values):
        assert (np.diff(np.sort(part, axis=1), axis=1) > 0).all()
    assert p_value(np.bincount(keys[:, 0], minlength=64)[1:]) > 1e-6
    assert p_value(np.bincount(values[:, -1], minlength=128)[64:]) > 1e-6


def test_every_key_is_asked_once_at_an_even_distance_and_the_rest_is_zero():
    segment = only(MQAR(**SMALL), "train")
    rows, positions = segment.inputs.numpy(), segment.positions.numpy()
    assert (positions >= 16).all()
    assert (positions % 2 == 0).all()
    asked = np.take_along_axis(rows, positions.astype(np.int64), axis=1)
    assert (np.sort(asked, axis=1) == np.sort(rows[:, 0:16:2], axis=1)).all()
    rest = rows.copy()
    np.put_along_axis(rest, positions.astype(np.int64), 0, axis=1)
    assert (rest[:, 16:] == 0).all()


@pytest.mark.parametrize("power_a", [0.01, 1.0])
def test_the_gap_of_the_first_pair_follows_the_power_law(power_a):
    task = MQAR(**{**SMALL, "num_train": 20_000, "power_a": power_a})
    segment = only(task, "train")
    rows, positions = segment.inputs.numpy(), segment.positions.numpy().astype(np.int64)
    # gaps are drawn without replacement pair by pair, so only the first one follows the power law exactly
    asked = np.take_along_axis(rows, positions, axis=1)
    gap = (positions[asked == rows[:, :1]] - 16) // 2
    expected = np.arange(1, 25.0) ** (power_a - 1)
    assert p_value(np.bincount(gap, minlength=24), 20_000 * expected / expected.sum()) > 1e-6
    last = (positions[asked == rows[:, 14:15]] - 16) // 2
    if power_a < 1:
        assert last.mean() > gap.mean() + 1, "later pairs find the near places taken"


def test_random_non_queries_fill_every_gap_from_the_whole_vocabulary():
    zeros, noisy = only(MQAR(**SMALL), "train"), only(MQAR(**SMALL, non_queries="random"), "train")
    rows, positions = noisy.inputs.numpy(), noisy.positions.numpy().astype(np.int64)
    free = np.ones(rows.shape, dtype=bool)
    free[:, :16] = False
    np.put_along_axis(free, positions, False, axis=1)
    assert p_value(np.bincount(rows[free], minlength=128)) > 1e-6
    own = (rows[:, 16:, None] == rows[:, None, 0:16:2]).any(-1) & free[:, 16:]
    assert own.any(), "noise may repeat keys, as in the source"
    # the noise is drawn last, so the first rows have the same pairs and queries as without noise
    assert (noisy.inputs[:, :16] == zeros.inputs[:, :16]).all()
    assert (noisy.targets == zeros.targets).all()


def test_noise_can_be_kept_off_the_keys_of_its_row():
    segment = only(MQAR(**SMALL, non_queries="random-no-keys"), "train")
    rows, positions = segment.inputs.numpy(), segment.positions.numpy().astype(np.int64)
    is_key = (rows[:, 16:, None] == rows[:, None, 0:16:2]).any(-1)
    assert (is_key.sum(axis=1) == 8).all(), "the queries and nothing else"
    free = rows.copy()
    np.put_along_axis(free, positions, -1, axis=1)
    assert set(np.unique(free[:, 16:])) == set(range(-1, 128))


def test_segments_of_the_same_shape_are_drawn_apart():
    shape = {"length": 32, "num_kv_pairs": 4, "num_examples": 10}
    task = MQAR(protocol="based-fig2", vocab_size=128, train=[shape, shape], test=[shape])
    first, second = task.segments("train", 0)
    assert (first.inputs != second.inputs).any()
    assert (first.inputs[:, :8] != second.inputs[:, :8]).any()


def test_the_smallest_vocabulary_that_is_allowed_works():
    task = MQAR(vocab_size=18, length=32, num_kv_pairs=8, num_train=50, num_test=50, non_queries="random-no-keys")
    assert (np.sort(only(task, "train").inputs[:, 0:16:2], axis=1) == np.arange(1, 9)).all()


@pytest.mark.slow
def test_the_published_size_is_drawn_and_small():
    (segment,) = MQAR().segments("train", 0)
    assert segment.inputs.shape == (100_000, 512)
    assert {segment.inputs.dtype, segment.targets.dtype, segment.positions.dtype} == {torch.int16}
