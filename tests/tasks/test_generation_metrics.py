"""FID, IS, mIS and AM have their known values."""

import math

import numpy as np
import pytest

from subquad.suite.metrics import smaller_is_better
from subquad.tasks.generation import am_score, frechet_distance, inception_score, modified_inception_score, scores

RNG = np.random.default_rng(0)
K = 10


def random_log_p(rows, seed=1):
    logits = 3 * np.random.default_rng(seed).normal(size=(rows, K))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def sure(labels, others=1e-12):
    """log p of a classifier that is certain of these labels."""
    p = np.full((len(labels), K), others)
    p[np.arange(len(labels)), labels] = 1 - (K - 1) * others
    return np.log(p)


def test_fid_is_zero_for_equal_sets_and_the_squared_shift_for_shifted_ones():
    x = RNG.normal(size=(500, 6)) @ RNG.normal(size=(6, 6))
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-8)
    move = np.array([1.0, 2, 0, 0, -1, 0.5])
    assert frechet_distance(x, x + move) == pytest.approx(move @ move)


def test_fid_of_scaled_axes_is_the_sum_of_squared_differences_of_deviations():
    x = RNG.normal(size=(400, 5))
    x -= x.mean(0)
    # uncorrelated features with standard deviation one
    x = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x, rowvar=False))).T
    spread = np.array([0.5, 1, 2, 3, 4])
    assert frechet_distance(x, x * spread) == pytest.approx(((spread - 1) ** 2).sum())


def test_fid_agrees_with_the_matrix_square_root():
    linalg = pytest.importorskip("scipy.linalg")
    a, b = RNG.normal(size=(200, 8)) @ RNG.normal(size=(8, 8)), RNG.normal(size=(300, 8)) + 0.3
    ca, cb = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(ca + cb - 2 * linalg.sqrtm(ca @ cb).real)
    assert frechet_distance(a, b) == pytest.approx(expected)
    assert frechet_distance(b, a) == pytest.approx(expected)


def test_fid_of_fewer_rows_than_features_is_finite_and_not_negative():
    a, b = RNG.normal(size=(4, 30)), RNG.normal(size=(5, 30))
    assert 0 < frechet_distance(a, b) < 1e3
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)


def test_inception_score_is_the_number_of_classes_predicted_with_certainty():
    assert inception_score(sure(np.arange(K).repeat(7))) == pytest.approx(K, rel=1e-6)
    assert inception_score(sure(np.array([3, 3, 5, 5]))) == pytest.approx(2, rel=1e-6)
    assert inception_score(sure(np.array([3, 3, 3]))) == pytest.approx(1, rel=1e-6)
    assert inception_score(np.full((9, K), -math.log(K))) == pytest.approx(1)


def test_inception_score_is_exp_of_the_mean_divergence_from_the_marginal():
    log_p = random_log_p(50)
    p = np.exp(log_p)
    expected = np.mean([(row * np.log(row / p.mean(0))).sum() for row in p])
    assert inception_score(log_p) == pytest.approx(math.exp(expected))


def test_modified_inception_score_is_exp_of_the_mean_divergence_of_all_pairs():
    log_p = random_log_p(20)
    pairs = [(np.exp(a) * (a - b)).sum() for a in log_p for b in log_p]
    assert modified_inception_score(log_p) == pytest.approx(math.exp(np.mean(pairs)))
    assert modified_inception_score(log_p[:1].repeat(5, 0)) == pytest.approx(1)
    # with two classes of equal frequency, half of all pairs differ in their class
    e = 1e-3
    two = np.log(np.array([[1 - e, e], [e, 1 - e]]))
    divergence = (1 - 2 * e) * math.log((1 - e) / e)
    assert modified_inception_score(two) == pytest.approx(math.exp(divergence / 2))


@pytest.mark.parametrize(
    ("metric", "smaller"),
    [("fid", True), ("am_score", True), ("inception_score", False), ("modified_inception_score", False)],
)
def test_a_score_says_whether_a_smaller_value_is_better(metric, smaller):
    assert smaller_is_better(metric) == smaller


def test_am_score_is_zero_for_certain_labels_as_frequent_as_in_the_data():
    labels = np.array([0, 0, 1, 2])
    assert am_score(sure(labels), sure(np.tile(labels, 3))) == pytest.approx(0, abs=1e-6)
    # one of the two classes of the data is never generated; the score grows with the classifier's certainty
    assert am_score(sure(np.array([0, 1])), sure(np.array([0, 0]), 1e-6)) == pytest.approx(
        math.log(0.5) - 0.5 * math.log(1e-6), rel=1e-4
    )
    # the classifier is never certain, but classes are as frequent as in the data, so the entropy alone remains
    assert am_score(sure(np.arange(K)), np.full((5, K), -math.log(K))) == pytest.approx(math.log(K))


def test_am_score_is_divergence_plus_entropy():
    data, made = random_log_p(30, 2), random_log_p(40, 3)
    p, q = np.exp(data).mean(0), np.exp(made).mean(0)
    expected = (p * np.log(p / q)).sum() - (np.exp(made) * made).sum(1).mean()
    assert am_score(data, made) == pytest.approx(expected)


def test_real_samples_of_the_data_score_best():
    features, log_p = RNG.normal(size=(200, 4)), sure(np.arange(200) % K)
    real = scores((features, log_p), (features[:100], log_p[:100]))
    noise = scores((features, log_p), (RNG.normal(size=(100, 4)) + 2, random_log_p(100)))
    assert real["fid"] < noise["fid"]
    assert real["inception_score"] > noise["inception_score"]
    assert real["am_score"] < noise["am_score"]
