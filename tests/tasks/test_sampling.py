"""The samplers of generated tasks draw from exactly the distribution that they state."""

import itertools

import numpy as np
import pytest

from subquad.tasks.base import distinct, language_segment, token_dtype, unique_rows, weighted_distinct
from tests.drawn import p_value

# a correct sampler fails such a test once in 10^6 seeds, and the seeds are fixed
SIGNIFICANCE = 1e-6


def counts(rows, outcomes):
    index = {outcome: i for i, outcome in enumerate(outcomes)}
    return np.bincount([index[tuple(row)] for row in rows.tolist()], minlength=len(outcomes))


@pytest.mark.parametrize(("count", "num_values"), [(2, 6), (3, 6), (3, 5), (4, 4), (1, 2)])
def test_distinct_is_uniform_over_ordered_selections(count, num_values):
    # (2, 6) and (3, 6) are drawn by drawing repeats again, the denser ones by the order of random numbers
    rows = distinct(np.random.default_rng(0), 60_000, count, num_values)
    outcomes = list(itertools.permutations(range(num_values), count))
    assert p_value(counts(rows, outcomes)) > SIGNIFICANCE


@pytest.mark.parametrize(("count", "num_values"), [(16, 4096), (256, 4095), (64, 128), (8, 70_000), (5, 5)])
def test_distinct_never_repeats_within_a_row(count, num_values):
    rows = distinct(np.random.default_rng(1), 500, count, num_values)
    assert rows.shape == (500, count)
    assert rows.min() >= 0
    assert rows.max() < num_values
    assert (np.diff(np.sort(rows, axis=1), axis=1) > 0).all()


def test_weighted_distinct_is_sequential_sampling_without_replacement():
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    rows = weighted_distinct(np.random.default_rng(0), 60_000, 3, weights)
    outcomes = list(itertools.permutations(range(4), 3))
    expected = []
    for outcome in outcomes:
        left, probability = weights.sum(), 1.0
        for index in outcome:
            probability *= weights[index] / left
            left -= weights[index]
        expected.append(60_000 * probability)
    assert sum(expected) == pytest.approx(60_000)
    assert p_value(counts(rows, outcomes), expected) > SIGNIFICANCE


def test_weighted_distinct_can_take_everything():
    rows = weighted_distinct(np.random.default_rng(0), 100, 7, np.arange(1, 8.0))
    assert (np.sort(rows, axis=1) == np.arange(7)).all()


def test_unique_rows_keeps_the_order_of_the_stream():
    stream = iter(np.array([[3], [1], [3], [1], [2], [2], [0], [9]]))
    rows = unique_rows(lambda n: np.array([next(stream) for _ in range(n)]), 4, "letters")
    assert rows.tolist() == [[3], [1], [2], [0]]


def test_too_few_sequences_are_an_error_not_an_endless_loop():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"letters: found only 4 different sequences of 5; lower num_train"):
        unique_rows(lambda n: rng.integers(0, 4, (n, 1)), 5, "letters")


def test_labels_of_a_language_are_the_next_tokens():
    rows = np.array([[5, 6, 7, 8], [1, 2, 3, 4]])
    every = language_segment(rows, all_tokens=True, num_tokens=9, slice="")
    assert every.inputs.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert every.targets.tolist() == [[6, 7, 8], [2, 3, 4]]
    assert every.positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    answer = language_segment(rows, all_tokens=False, num_tokens=9, slice="")
    assert answer.inputs.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert answer.targets.tolist() == [[8], [4]]
    assert answer.positions.tolist() == [[2], [2]]


def test_tokens_take_the_smallest_dtype_that_holds_them():
    assert token_dtype(2**15) is np.int16
    assert token_dtype(2**15 + 1) is np.int32
