"""Metrics of generated samples, computed from the outputs of a classifier.

log_p [R, K] are the logarithms of the classifier's probabilities p(y | x) for R samples and K classes; features [R, F]
are the inputs of its last layer.
Sources: Heusel et al. 2017 (FID), Salimans et al. 2016 (IS), Gurumurthy et al. 2017 (mIS) and Zhou et al. 2018 (AM), as
Kong et al. 2021 (DiffWave), Goel et al. 2022 (SaShiMi) and Mamba's Tables 4 and 5 use them on SC09.

Departure: all rows and all pairs of rows are used. The SaShiMi code shuffles with a fixed seed, computes IS between two
halves, and mIS over 10,000 random pairs.
"""

from __future__ import annotations

import numpy as np

from subquad.tasks.base import Array


def frechet_distance(first: Array, second: Array) -> float:
    """FID of two sets of features with means m and covariances C: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)).

    tr (C1 C2)^(1/2) is computed as the sum of the singular values of C1^(1/2) C2^(1/2).
    """
    means = [features.mean(axis=0, dtype=np.float64) for features in (first, second)]
    spreads = [np.atleast_2d(np.cov(features.astype(np.float64), rowvar=False)) for features in (first, second)]
    overlap = np.linalg.svd(_root(spreads[0]) @ _root(spreads[1]), compute_uv=False).sum()
    return float(((means[0] - means[1]) ** 2).sum() + np.trace(spreads[0]) + np.trace(spreads[1]) - 2 * overlap)


def _root(spread: Array) -> Array:
    """The symmetric square root of a covariance."""
    values, vectors = np.linalg.eigh(spread)
    return vectors * np.sqrt(values.clip(min=0)) @ vectors.T


def _entropy(log_p: Array) -> Array:
    return -(np.exp(log_p) * log_p).sum(axis=-1)


def inception_score(log_p: Array) -> float:
    """IS = exp(E_x KL(p(y | x) || p(y))), from 1 to K.

    It is high where the classifier is certain about every sample and all classes occur equally often.
    """
    mean = np.exp(log_p).mean(axis=0)
    seen = mean > 0
    return float(np.exp(-(mean[seen] * np.log(mean[seen])).sum() - _entropy(log_p).mean()))


def modified_inception_score(log_p: Array) -> float:
    """mIS = exp(E_x,x' KL(p(y | x) || p(y | x'))) over all pairs of samples, at least 1.

    It also measures how different the samples within a class are.
    """
    across = -(np.exp(log_p).mean(axis=0) * log_p.mean(axis=0)).sum()
    return float(np.exp(across - _entropy(log_p).mean()))


def am_score(log_p_data: Array, log_p: Array) -> float:
    """AM = KL(p_data(y) || p(y)) + E_x H(p(y | x)), at least 0.

    It is low where the classifier is certain about every sample and classes occur as often as in the data.
    """
    data, mean = np.exp(log_p_data).mean(axis=0), np.exp(log_p).mean(axis=0)
    seen = data > 0
    with np.errstate(divide="ignore"):
        distance = (data[seen] * (np.log(data[seen]) - np.log(mean[seen]))).sum()
    return float(distance + _entropy(log_p).mean())


def scores(real: tuple[Array, Array], made: tuple[Array, Array]) -> dict[str, float]:
    """All four metrics of generated samples; real and made are (features, log_p) of training data and of samples."""
    return {
        "fid": frechet_distance(real[0], made[0]),
        "inception_score": inception_score(made[1]),
        "modified_inception_score": modified_inception_score(made[1]),
        "am_score": am_score(real[1], made[1]),
    }
