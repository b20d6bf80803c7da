"""Claims about the verdict on two revisions, with a timer whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from subquad.suite.bench.compare import SIDES, compare, rounds


class Device:
    """A stub timer with the noise of real ones: jitter, outliers, a drifting clock, small differences of processes."""

    def __init__(self, seed, slowdown=1.0, jitter=0.01, outliers=0.05, drift=0.03, process=0.002, burst=None):
        self.random = np.random.default_rng(seed)
        self.scale = {side: math.exp(process * self.random.standard_normal()) for side in SIDES}
        self.scale["B"] *= slowdown
        self.jitter, self.outliers, self.drift, self.burst = jitter, outliers, drift, burst
        self.blocks = 0

    def __call__(self, side):
        clock = 1 + self.drift * math.sin(self.blocks / 7)
        if self.burst is not None and side == "B" and self.blocks < self.burst:
            clock *= 1.1
        self.blocks += 1
        times = 0.2 * self.scale[side] * clock * np.exp(self.jitter * self.random.standard_normal(40))
        times[self.random.random(40) < self.outliers] *= 1.5
        return times.tolist()


@pytest.mark.parametrize("jitter", [0.003, 0.02])
def test_a_planted_five_percent_is_caught_in_20_of_20_tries(jitter):
    found = [compare(Device(seed, slowdown=1.05, jitter=jitter)) for seed in range(20)]
    assert [one.verdict for one in found] == ["slower"] * 20
    assert all(one.low <= one.ratio <= one.high for one in found)
    assert all(abs(one.ratio - 1.05) < 0.02 for one in found)


@pytest.mark.parametrize("jitter", [0.003, 0.02])
def test_an_unchanged_tree_gives_no_alarm_in_20_of_20_tries(jitter):
    found = [compare(Device(seed, jitter=jitter)) for seed in range(20)]
    assert [one.verdict for one in found] == ["same"] * 20


def test_a_speed_up_is_named_as_one():
    assert compare(Device(0, slowdown=0.9)).verdict == "faster"


def test_a_slowdown_below_three_percent_is_no_regression():
    assert compare(Device(0, slowdown=1.015)).verdict == "same"


def test_on_a_noisy_device_the_limit_rises_instead_of_the_alarm():
    found = compare(Device(3, slowdown=1.02, jitter=0.05, process=0.03))
    assert found.limit > 1.04
    assert found.verdict == "same"


def test_what_does_not_come_back_is_no_regression():
    blocks = 3 * 9
    assert rounds(Device(0, burst=blocks), 9).verdict == "slower"
    assert compare(Device(0, burst=blocks)).verdict == "same"


def test_a_verdict_that_keeps_changing_counts_as_noise():
    class Unsteady(Device):
        def __call__(self, side):
            # slower in the first and the third measurement
            self.scale["B"] = 1.1 if self.blocks < 27 or self.blocks >= 27 + 54 else 1.0
            return super().__call__(side)

    found = compare(Unsteady(0))
    assert found.verdict == "same"
    assert found.noise > 0.05


def test_all_sides_are_timed_equally_often_and_in_turn():
    order = []

    def sample(side):
        order.append(side)
        return [1.0, 1.0, 1.0]

    found = rounds(sample, 6)
    assert all(order.count(side) == 6 for side in SIDES)
    assert {tuple(order[i : i + 3]) for i in range(0, 18, 3)} == {
        ("A", "B", "control"),
        ("B", "control", "A"),
        ("control", "A", "B"),
    }
    assert found.ratio == 1.0
    assert found.noise == 0.0
    assert len(found.samples["A"]) == 18
