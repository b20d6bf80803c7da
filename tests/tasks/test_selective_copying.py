"""Selective copying: what the paper states, and each option for what it leaves open."""

import numpy as np
import pytest

from subquad.tasks.selective_copying import SelectiveCopying
from tests.drawn import p_value


def test_defaults_are_the_published_sizes():
    task = SelectiveCopying()
    assert (task.length, task.vocab_size, task.num_data) == (4096, 16, 16)
    assert task.fresh
    segment = task.block(0, 0, 64)
    assert segment.inputs.shape == (64, 4112)
    assert segment.targets.shape == (64, 16)
    assert (segment.positions == np.arange(4096, 4112)).all()
    assert task.spec.max_length == 4112
    assert task.spec.num_classes == 16


@pytest.mark.parametrize(
    ("marker", "symbols", "num_tokens", "query"),
    [("in-vocabulary", 14, 16, 15), ("additional", 15, 17, 16), ("none", 15, 16, 0)],
)
def test_marker_decides_on_symbols_and_answer_positions(marker, symbols, num_tokens, query):
    task = SelectiveCopying(marker=marker, length=64)
    segment = task.block(0, 0, 1024)
    context, answers = segment.inputs[:, :64].numpy(), segment.inputs[:, 64:].numpy()
    assert task.num_symbols == symbols
    assert task.spec.vocab_size == num_tokens
    assert (answers == query).all()
    assert ((context != 0).sum(axis=1) == 16).all()
    tokens = context[context != 0]
    assert p_value(np.bincount(tokens, minlength=symbols + 1)[1:]) > 1e-6
    assert tokens.max() == symbols


@pytest.mark.parametrize(("rule", "context", "total"), [("context", 100, 108), ("total", 92, 100), ("noise", 108, 116)])
def test_length_rule_decides_what_the_length_counts(rule, context, total):
    task = SelectiveCopying(length=100, num_data=8, length_rule=rule)
    segment = task.block(0, 0, 10)
    assert segment.inputs.shape == (10, total)
    assert segment.positions[0].tolist() == list(range(context, total))
    assert task.spec.max_length == total
    noise_and_data = segment.inputs[:, :context]
    assert ((noise_and_data == 0).sum(1) == context - 8).all()


def test_data_stand_anywhere_in_the_context():
    segment = SelectiveCopying(length=32, num_data=4).block(0, 0, 8192)
    held = (segment.inputs[:, :32] != 0).sum(0).numpy()
    assert p_value(held) > 1e-6


def test_a_full_context_is_plain_copying():
    segment = SelectiveCopying(length=8, num_data=8).block(0, 0, 16)
    assert (segment.inputs[:, :8] == segment.targets).all()
