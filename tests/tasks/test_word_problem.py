"""Word problems: the products are those of the group, and the options are the protocols of the sources."""

import numpy as np
import pytest
import torch

from subquad.tasks.word_problem import WordProblem, orders, permutations, products
from tests.drawn import p_value

SMALL = {"num_train": 100, "num_test": 50}


@pytest.mark.parametrize(
    ("group", "order", "abelian"), [("Z2", 2, True), ("Z5", 5, True), ("S3", 6, False), ("A5", 60, False)]
)
def test_the_table_is_that_of_a_group(group, order, abelian):
    table, elements = products(group), np.arange(order)
    assert table.shape == (order, order)
    assert (table[0] == elements).all()
    assert (table[:, 0] == elements).all()
    # every element occurs once in each row and column, so there are inverses
    assert (np.sort(table, axis=0) == elements[:, None]).all()
    assert (np.sort(table, axis=1) == elements).all()
    # (x y) z = x (y z)
    assert (table[table] == table[:, table]).all()
    assert (table == table.T).all() == abelian


def test_a5_is_not_solvable_and_s3_is():
    # the commutators x^-1 y^-1 x y of A5 generate A5 itself, those of S3 the three rotations
    for group, size in (("A5", 60), ("S3", 3)):
        table = products(group)
        inverse = (table == 0).argmax(axis=1)
        found = np.unique(table[table[inverse[:, None], inverse], table])
        while len(closed := np.unique(table[found[:, None], found])) > len(found):
            found = closed
        assert len(found) == size


def test_parity_is_the_parity_of_the_bits():
    (segment,) = WordProblem(group="Z2", length=40, **SMALL).segments("train", 0)
    bits = segment.inputs[:, 1:]
    assert (segment.inputs[:, 0] == 2).all()
    assert (segment.targets == bits.cumsum(1) % 2).all()
    assert (segment.positions == torch.arange(1, 41)).all()


def test_all_lengths_are_tested_and_only_the_training_length_validates():
    task = WordProblem(**SMALL)
    assert [s.slice for s in task.segments("test", 0)] == [f"length={n}" for n in (32, 64, 128, 256, 512)]
    assert [s.slice for s in task.segments("valid", 0)] == ["length=128"]
    assert task.spec.max_length == 513


def test_one_label_a_row_stands_anywhere_in_training_and_last_in_evaluation():
    task = WordProblem(group="Z2", labels="end", length=40, min_length=3, test_lengths=(256,), num_train=0)
    places = task.block(0, 0, 4096).positions.numpy()
    assert places.shape == (4096, 1)
    assert p_value(np.bincount(places[:, 0])[3:]) > 1e-6
    assert places.min() == 3
    (test,) = task.segments("test", 0)
    assert (test.positions == 256).all()


def test_one_set_of_test_rows_may_have_a_range_of_lengths():
    task = WordProblem(
        group="Z2", labels="end", length=39, min_length=2, test_lengths=(255,), min_test_length=39, num_train=0
    )
    (test,) = WordProblem(**{**task.model_dump(), "num_test": 8192}).segments("test", 0)
    assert test.slice == "length=39..255"
    assert p_value(np.bincount(test.positions[:, 0])[39:]) > 1e-6
    assert (test.positions.min(), test.positions.max()) == (39, 255)
    (valid,) = task.segments("valid", 0)
    assert valid.slice == "length=39"
    assert (valid.positions == 39).all()
    # a run without the option keeps its id
    assert "min_test_length" in task.model_dump()
    assert "min_test_length" not in WordProblem().model_dump()


def test_rows_that_repeat_one_element_have_slices_by_its_order():
    task = WordProblem(group="S3", length=8, test_lengths=(8, 12), num_train=10, num_test=5, repeats=True)

    segments = {segment.slice: segment for segment in task.segments("test", 0)}

    assert list(segments) == [f"length={n}{more}" for n in (8, 12) for more in ("", ",order=2", ",order=3")]
    for order, elements in (2, (1, 2, 5)), (3, (3, 4)):
        segment = segments[f"length=12,order={order}"]
        assert segment.inputs[:, 1:].tolist() == [[element] * 12 for element in elements]
        # the identity, element 0, returns after as many positions as the order says, and not before
        assert ((segment.targets == 0).nonzero()[:, 1] % order == order - 1).all()
        assert (segment.targets == 0).sum() == len(elements) * 12 // order
        assert (task.solve(segment) == segment.targets.numpy()).all()
    plain = task.model_copy(update={"repeats": False})
    # the rows of random elements stay, and training and validation have no others
    for split in "train", "valid", "test":
        for segment in plain.segments(split, 0):
            same = segments if split == "test" else {s.slice: s for s in task.segments(split, 0)}
            assert torch.equal(same[segment.slice].inputs, segment.inputs)
            assert split == "test" or len(same) == 1
    assert "repeats" in task.model_dump()
    assert "repeats" not in plain.model_dump()


@pytest.mark.parametrize(
    ("group", "counts"), [("S5", [1, 25, 20, 30, 24, 20]), ("A5", [1, 15, 20, 24]), ("Z6", [1, 1, 2, 2])]
)
def test_the_elements_have_the_orders_of_their_group(group, counts):
    assert np.unique(orders(group), return_counts=True)[1].tolist() == counts


def test_swaps_move_two_points():
    task = WordProblem(group="S5", max_moved=2, identity=False, **SMALL)
    images = np.array(permutations("S5"))[task.drawn]
    assert len(images) == 10
    assert ((images != np.arange(5)).sum(axis=1) == 2).all()
    (segment,) = task.segments("train", 0)
    assert set(np.unique(segment.inputs[:, 1:])) == set(task.drawn)
    assert len(np.unique(segment.targets)) == 120
