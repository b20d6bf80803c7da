"""Modular arithmetic: strings belong to the language of the source, and their values are those of Python."""

import re

import numpy as np
import pytest
import torch

from subquad.tasks.modular_arithmetic import SIGNS, ModularArithmetic
from tests.drawn import p_value

NESTED = re.compile(r"\((-?\d|\(-?\d\)|N)[-+*](-?\d|\(-?\d\)|N)\)")


def texts(task, segment):
    """The expressions of the rows, without `=` and what stands behind it."""
    signs = SIGNS if task.brackets else SIGNS[:4]
    names = [*map(str, range(task.modulus)), *signs, "_"]
    whole = ["".join(names[token] for token in row) for row in segment.inputs.tolist()]
    for text, (place,) in zip(whole, segment.positions.tolist(), strict=True):
        assert text[place:] == "=" + "_" * (len(text) - place - 1)
    return [text[:place] for text, (place,) in zip(whole, segment.positions.tolist(), strict=True)]


@pytest.mark.parametrize("brackets", [False, True])
@pytest.mark.parametrize("modulus", [2, 5, 7])
def test_labels_are_the_values_that_python_computes(brackets, modulus):
    task = ModularArithmetic(brackets=brackets, modulus=modulus, num_test=200)
    for segment in (*task.segments("test", 0), task.block(0, 0, 500)):
        values = [eval(text) % modulus for text in texts(task, segment)]
        assert segment.targets[:, 0].tolist() == values


def test_expressions_without_brackets_alternate_digits_and_operators():
    task = ModularArithmetic(num_test=500)
    for segment in (*task.segments("test", 0), task.block(0, 0, 500)):
        assert all(re.fullmatch(r"[0-4]([-+*][0-4])*", text) for text in texts(task, segment))


def test_every_operation_in_brackets_has_a_pair_of_its_own():
    task = ModularArithmetic(brackets=True, num_test=300)
    for segment in (*task.segments("test", 0), task.block(0, 0, 500)):
        for text in texts(task, segment):
            before = ""
            while text != before:
                before, text = text, NESTED.sub("N", text)
            assert text == "N" or re.fullmatch(r"-?\d|\(-?\d\)", text)


def test_lengths_are_uniform_as_in_the_source():
    # without brackets a length is 2 k + 1 with k digits; the label stands before the answer
    flat = np.bincount(ModularArithmetic().block(0, 0, 16384).positions[:, 0])
    assert set(np.flatnonzero(flat)) == set(range(1, 38, 2))
    assert p_value(flat[1::2]) > 1e-6
    (test,) = ModularArithmetic().segments("test", 0)
    assert (test.positions.min(), test.positions.max()) == (37, 253)
    # with brackets, lengths 3, 4 and 5 are one
    places = np.bincount(ModularArithmetic(brackets=True).block(0, 0, 16384).positions[:, 0])
    assert set(np.flatnonzero(places)) == set(range(2, 38))
    assert p_value(places[2:], 16384 * np.array([3, *[1] * 35]) / 38) > 1e-6
    (test,) = ModularArithmetic(brackets=True).segments("test", 0)
    assert test.inputs.shape == (8192, 255)
    assert (test.positions.min(), test.positions.max()) == (37, 253)


def test_the_place_of_the_outermost_operator_is_uniform():
    task = ModularArithmetic(brackets=True, min_length=20, length=20)
    starts = []
    for text in texts(task, task.block(0, 0, 4096)):
        depth = np.cumsum([(sign == "(") - (sign == ")") for sign in text])
        # outside all inner pairs, the first sign behind the left side, which may begin with a sign itself
        (place, *_) = [i for i in range(2, len(text)) if depth[i] == 1 and text[i] in "+-*"]
        starts.append(place - 1)
    counts = np.bincount(starts)
    assert set(np.flatnonzero(counts)) == set(range(1, 14))
    assert p_value(counts[1:]) > 1e-6


def test_zero_is_frequent_where_products_are_nested():
    # a model that always answers zero has this accuracy, where a guess has 20 %
    for options, low, high in (({}, 0.19, 0.21), ({"brackets": True}, 0.29, 0.33)):
        (test,) = ModularArithmetic(**options).segments("test", 0)
        assert low < (test.targets == 0).double().mean() < high
    task = ModularArithmetic(brackets=True, multiply=False)
    (test,) = task.segments("test", 0)
    assert p_value(np.bincount(test.targets[:, 0])) > 1e-6
    assert not (test.inputs == task.modulus + SIGNS.index("*")).any()


def test_the_policy_decides_at_which_lengths_rates_are_chosen():
    task = ModularArithmetic(num_test=50)
    assert [s.slice for s in task.segments("test", 0)] == ["length=40..256"]
    assert [s.slice for s in task.segments("valid", 0)] == ["length=40"]
    paper = ModularArithmetic(num_test=50, split_policy="paper")
    (valid,), (test,) = paper.segments("valid", 0), task.segments("test", 0)
    assert torch.equal(valid.inputs, test.inputs)
