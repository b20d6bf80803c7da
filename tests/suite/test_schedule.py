"""The learning rate over the steps of a run."""

import math

import pytest

from subquad.suite.training.config import TrainConfig
from subquad.suite.training.schedule import Plateau, lr_factor


def test_schedules_have_their_closed_forms():
    def make(**changes):
        return TrainConfig(steps=100, lr=0.1, **changes)

    assert lr_factor(make(), 57, 100, 10) == 1
    warm = make(schedule="cosine", warmup_fraction=0.1, warmup_from=0.01, min_lr=0.02)
    assert lr_factor(warm, 0, 100, 10) == pytest.approx(0.1)
    assert lr_factor(warm, 5, 100, 10) == pytest.approx(0.55)
    assert lr_factor(warm, 10, 100, 10) == pytest.approx(1)
    assert lr_factor(warm, 55, 100, 10) == pytest.approx(0.6)
    assert lr_factor(warm, 100, 100, 10) == pytest.approx(0.2)
    assert lr_factor(make(schedule="linear", warmup_steps=20), 60, 100, 10) == pytest.approx(0.5)
    stepped = make(schedule="cosine", schedule_unit="epoch")
    assert lr_factor(stepped, 19, 100, 10) == lr_factor(stepped, 10, 100, 10)
    assert lr_factor(stepped, 20, 100, 10) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.2)))


def test_the_fraction_of_a_warmup_is_rounded_to_the_nearest_step():
    config = TrainConfig(steps=7, lr=0.1, warmup_fraction=0.1)
    assert [lr_factor(config, step, 7, 1) for step in (0, 1)] == [0, 1]


def test_the_plateau_waits_and_then_lowers_the_rate():
    plateau = Plateau(TrainConfig(steps=1, plateau_patience=2, plateau_factor=0.5))
    for value in (0.1, 0.2, 0.2, 0.1):
        plateau.update(value)
        assert plateau.factor == 1
    plateau.update(0.2)
    assert plateau.factor == 0.5
