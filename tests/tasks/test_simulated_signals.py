"""Simulated brain activity and EEG: what the rows tell of their labels, and what they do not tell."""

import numpy as np
import pytest
import torch

from subquad.suite.contracts import IGNORE
from subquad.tasks.brain_activity import NOISE, BrainActivity, pattern, response
from subquad.tasks.seizures import RATE, Seizures, background, discharge


def levels(task, segment):
    """Levels [R, points, networks] of rows whose targets are the next levels."""
    return segment.targets.numpy().astype(int).reshape(-1, task.num_points, task.num_networks)


def test_the_input_is_the_target_one_network_later():
    task = BrainActivity(num_networks=3, num_points=5, num_levels=4, num_train=20)
    (segment,) = task.segments("train", 0)
    assert (segment.inputs[:, 0] == 12).all()
    network = torch.arange(15) % 3
    assert torch.equal(segment.inputs[:, 1:], (segment.targets + 4 * network)[:, :-1])


def test_the_slices_of_the_test_rows_are_the_networks():
    task = BrainActivity(num_networks=3, num_points=5, num_test=20)
    segments = list(task.segments("test", 0))
    assert [segment.slice for segment in segments] == [f"length=15,network={n}" for n in range(3)]
    assert torch.equal(torch.cat([segment.positions[0] for segment in segments]).sort().values, torch.arange(15))
    following = segments[1].inputs.gather(1, segments[1].positions.long() + 1)
    assert torch.equal(following, segments[1].targets + 16)


def test_the_past_predicts_a_network_and_the_better_the_less_noise_it_has():
    task = BrainActivity()
    (segment,) = task.segments("train", 0)
    values = (levels(task, segment) - 7.5) * 5 / 16
    past = np.concatenate([values[:, 8 - k : -k] for k in range(1, 9)], axis=2).reshape(-1, 64)
    now = values[:, 8:].reshape(-1, 8)
    errors = np.abs(now - past @ np.linalg.lstsq(past, now, rcond=None)[0]).mean(axis=0)
    constant = np.abs(now).mean(axis=0)
    assert errors[0] < 0.75 * constant[0]
    assert (errors < 0.92 * constant).all()
    assert errors[:2].mean() < errors[-2:].mean() - 0.05


def test_the_blood_flow_answers_after_five_seconds_and_swings_below_zero():
    time_s = np.arange(0, 30, 0.1)
    h = response(time_s)
    assert time_s[h.argmax()] == pytest.approx(5, abs=0.2)
    assert 10 < time_s[h.argmin()] < 18
    assert h.min() < 0


def test_a_row_tells_its_mental_state_better_than_chance():
    task = BrainActivity(labels="state", num_states=20, num_train=600)
    (segment,) = task.segments("train", 0)
    assert np.bincount(segment.targets).tolist() == [30] * 20
    values = segment.inputs[:, 1:].numpy().astype(int) % 16 - 7.5
    values = values[:, : 31 * 8].reshape(-1, 31, 8)
    patterns = np.array([pattern(state, 8) for state in range(20)])
    patterns /= np.sqrt(0.3 * patterns**2 + np.linspace(*NOISE, 8) ** 2)
    patterns /= np.linalg.norm(patterns, axis=1, keepdims=True)
    shown = values @ patterns.T
    # activity that a state drives lasts longer than noise
    guess = (shown[:, 1:] * shown[:, :-1]).mean(axis=1).argmax(axis=1)
    assert 0.4 < (guess == segment.targets.numpy()).mean() < 0.9


def test_four_hundred_labels_are_enough_to_learn_the_mental_states():
    def read(split):
        (segment,) = BrainActivity(labels="state", num_states=20, num_train=400, num_test=1000).segments(split, 0)
        # the level of the last network at the last time point is not among the inputs
        values = (segment.inputs[:, 1:].long() % 16 - 7.5)[:, : 31 * 8].unflatten(1, (31, 8)).float()
        products = values.mT @ values
        sizes = products.diagonal(dim1=1, dim2=2).sqrt()
        upper = torch.triu_indices(8, 8, 1)
        correlations = (products / sizes[:, :, None] / sizes[:, None])[:, upper[0], upper[1]]
        return correlations, segment.targets.long()

    features, states = read("train")
    regression = torch.nn.Linear(28, 20)
    torch.nn.init.zeros_(regression.weight)
    torch.nn.init.zeros_(regression.bias)
    optimizer = torch.optim.LBFGS(regression.parameters(), max_iter=100)

    def closure():
        optimizer.zero_grad()
        penalty = 1e-3 * regression.weight.square().sum()
        loss = torch.nn.functional.cross_entropy(regression(features), states) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    features, states = read("test")
    assert (regression(features).argmax(1) == states).float().mean() > 0.5


def test_the_absolute_error_is_that_of_the_median_in_standard_deviations():
    task = BrainActivity(num_levels=5)
    logits = torch.tensor([[0.4, 0.05, 0.1, 0.0, 0.45], [0.6, 0.1, 0.1, 0.1, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2]]).log()
    total, count = task.score(logits, torch.tensor([4, 2, IGNORE]))["mean_absolute_error"]
    # the median is level 2 in the first row and level 0 in the second; a level is one standard deviation wide
    assert (float(total), int(count)) == (4.0, 2)
    assert "mean_absolute_error" not in BrainActivity(labels="state").score(torch.zeros(2, 26), torch.zeros(2).long())


def regularity(signal):
    """Returns the regularity of the times between discharges in a row [T], from the peaks of a matched filter."""
    shape = discharge() - discharge().mean()
    match = np.convolve(signal, shape[::-1], "same")
    found: list[int] = []
    for sample in np.argsort(-match):
        if match[sample] < 0.5 * match.max():
            break
        if all(abs(sample - other) > 30 for other in found):
            found.append(int(sample))
    gaps = np.diff(sorted(found))
    gaps = gaps[gaps < 300]
    return -np.std(np.diff(gaps)) / gaps.mean() if len(gaps) > 3 else -9.0


def above(first, second):
    """Area under the ROC curve of two samples."""
    return float((first[:, None] > second).mean() + 0.5 * (first[:, None] == second).mean())


def test_rhythm_tells_a_seizure_and_power_does_not():
    (segment,) = Seizures(num_train=500).segments("train", 0)
    rows, seizure = segment.inputs.numpy(), segment.targets.numpy() == 1
    assert seizure.mean() == 0.5
    power = rows.std(axis=(1, 2))
    assert 0.4 < above(power[seizure], power[~seizure]) < 0.6
    focus = rows.min(axis=1).argmin(axis=1)
    found = np.array([regularity(row[:, channel]) for row, channel in zip(rows, focus, strict=True)])
    assert above(found[seizure], found[~seizure]) > 0.8


def test_the_background_has_unit_power_that_falls_with_the_frequency():
    signal = background(np.random.default_rng(0), 50, 2000, 3)
    assert signal.std() == pytest.approx(1, abs=0.02)
    power = (np.abs(np.fft.rfft(signal, axis=1)) ** 2).mean(axis=(0, 2))
    hertz = np.fft.rfftfreq(2000, 1 / RATE)
    low, high = (power[(hertz >= start) & (hertz < 2 * start)].sum() for start in (2, 32))
    # equal power in every octave
    assert low == pytest.approx(high, rel=0.1)
