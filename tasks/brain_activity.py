"""Activity of simulated brain networks: its next level, or the mental state behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
import torch

from subquad.suite.bounds import Size
from subquad.suite.contracts import IGNORE, Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import Array, TaskBase, token_dtype, token_segment

INTERVALS_S = (1.0, 2.5)
"""Smallest and largest time between two time points of a recording, which has its own."""
BLOCKS_S = (12.0, 30.0)
"""Shortest and longest time that a mental state, or rest, lasts."""
RESPONSE_S = 30.0
"""Time after which the response to a mental state is taken to be over."""
NOISE = (0.4, 1.6)
"""Standard deviation of the noise of the first and of the last network; that of the responses is near one."""
MEMORY, SHARED = 0.5, 0.1
"""Correlation of the noise at one time point with that at the next, and of two networks at one time point."""
RANGE = 2.5
"""Levels divide the range from -RANGE to RANGE standard deviations evenly; what is beyond has the outermost level."""


def response(time_s: Array) -> Array:
    """Response of the blood flow to a short activity, h(t) = t^5 e^-t / 5! - t^15 e^-t / (6 15!), t in seconds.

    The canonical double gamma function: it peaks after five seconds and swings below zero after about twelve.
    """
    return np.exp(-time_s) * (time_s**5 / math.factorial(5) - time_s**15 / (6 * math.factorial(15)))


def pattern(state: int, num_networks: int) -> Array:
    """Returns the weights [N] with which a mental state drives the networks; they do not depend on the seed."""
    return numpy_generator(0, f"{BrainActivity.name}/pattern", state).standard_normal(num_networks)


class BrainActivity(TaskBase):
    """Levels of the activity of N simulated brain networks.

        input   $   a3  b7  c1  a4  b7  c0  a6        (time point by time point, in each the networks a, b and c)
        target  3   7   1   4   7   0   6   6         (labels: next, the level of the next network)
        target  5                                     (labels: state, the mental state of the whole row)

    A row is a stretch of `num_points` time points of a recording. Mental states s follow each other in blocks, between
    which the brain may rest, and each drives the networks by a pattern p_s of its own. The blood flow answers late:

        x_{t,n} = sum_k h(k d) p_{s(t - k), n} / sum_k |h(k d)|  +  sigma_n e_{t,n}

    with the response h (`response`), the time d between two time points of this recording, and noise e that is
    correlated over time and between networks. sigma_n rises with n, so some networks can be predicted better than
    others. Each network is standardised over the row, as recordings are, and divided into levels. With `labels: state`,
    one state and rest take turns; states are equally frequent.

    Source: the models of H3 (Fu et al. 2022, appendix F.8), which follow Thomas et al. 2022, predict the activity of
    1,024 networks at the next time point and then decode mental states. These rows stand in for recordings. Departures:
    activity is divided into levels, which come one after the other, so that a model also sees the networks before the
    one that it predicts; the loss is the cross-entropy. `mean_absolute_error` is that of the median of the predicted
    distribution, which is the best prediction for this error, in standard deviations of the network.
    """

    name: ClassVar[str] = "brain-activity"
    version: ClassVar[int] = 1

    labels: Literal["next", "state"] = "next"
    num_networks: Size = 8
    num_points: Size = 32
    """Time points of a row, which has `num_networks` tokens for each."""
    num_levels: Size = 16
    num_states: Size = 26
    """Number of mental states. A state has the same pattern whatever their number is."""
    num_train: Size = 2000
    num_test: Size = 500
    """Number of rows of the test split, and of a clean validation split."""

    def check_options(self) -> None:
        for key in ("num_points", "num_levels", "num_states"):
            if getattr(self, key) < 2:
                raise ValueError(f"{self.name}: {key}={getattr(self, key)}; needs 2 or more.")

    @property
    def length(self) -> int:
        """Number of tokens of a row."""
        return self.num_networks * self.num_points

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(
            input="tokens",
            num_classes=self.num_levels if self.labels == "next" else self.num_states,
            readout="token" if self.labels == "next" else "sequence",
            max_length=self.length,
            vocab_size=self.num_networks * self.num_levels + 1,
        )

    @property
    def stand_in(self) -> str:
        return "simulated activity of brain networks in place of fMRI recordings"

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        rng = numpy_generator(seed, f"{self.name}/{self.labels}/{split}")
        count = self.num_train if split == "train" else self.num_test
        states = rng.permutation(np.arange(count) % self.num_states)
        levels = self._levels(self._activity(rng, states)).reshape(count, self.length)
        network = np.tile(np.arange(self.num_networks), self.num_points)
        num_tokens = self.num_networks * self.num_levels + 1
        begin = np.full((count, 1), num_tokens - 1)
        inputs = np.concatenate([begin, (levels + self.num_levels * network)[:, :-1]], axis=1)
        name = f"length={self.length}"
        if self.labels == "state":
            tokens = np.ascontiguousarray(inputs, dtype=token_dtype(num_tokens))
            labels = states.astype(token_dtype(self.num_states))
            yield Segment(inputs=torch.from_numpy(tokens), targets=torch.from_numpy(labels), slice=name)
            return
        positions = np.tile(np.arange(self.length), (count, 1))
        if split != "test":
            yield token_segment(inputs, levels, positions, num_tokens, name)
            return
        for n in range(self.num_networks):
            own = network == n
            yield token_segment(inputs, levels[:, own], positions[:, own], num_tokens, f"{name},network={n}")

    def _activity(self, rng: np.random.Generator, states: Array) -> Array:
        """Activity [R, num_points, num_networks]; states [R] are those of the rows with `labels: state`."""
        rows = len(states)
        # rows begin in the middle of a recording, when earlier states still have a response
        before = math.ceil(RESPONSE_S / INTERVALS_S[0])
        interval = rng.uniform(*INTERVALS_S, rows)
        # the last pattern is that of rest
        patterns = np.array(
            [*(pattern(s, self.num_networks) for s in range(self.num_states)), [0.0] * self.num_networks]
        )
        driven = np.full((rows, before + self.num_points), self.num_states)
        for row, (state, seconds) in enumerate(zip(states, interval, strict=True)):
            start, rests = 0, bool(rng.integers(2))
            while start < driven.shape[1]:
                stop = start + math.ceil(rng.uniform(*BLOCKS_S) / seconds)
                if not rests:
                    driven[row, start:stop] = state if self.labels == "state" else rng.integers(self.num_states)
                start = stop
                rests = not rests if self.labels == "state" else bool(rng.integers(3) == 0)
        h = response(np.arange(before) * interval[:, None])
        h /= np.abs(h).sum(axis=1, keepdims=True)
        activity = np.zeros((rows, self.num_points, self.num_networks))
        for k in range(before):
            shown = patterns[driven[:, before - k : before - k + self.num_points]]
            activity += h[:, k, None, None] * shown
        own = rng.standard_normal((rows, self.num_points, self.num_networks))
        noise = math.sqrt(1 - SHARED) * own + math.sqrt(SHARED) * rng.standard_normal((rows, self.num_points, 1))
        for t in range(1, self.num_points):
            noise[:, t] = MEMORY * noise[:, t - 1] + math.sqrt(1 - MEMORY**2) * noise[:, t]
        return activity + np.linspace(*NOISE, self.num_networks) * noise

    def _levels(self, activity: Array) -> Array:
        """The levels of activity [R, num_points, num_networks], each network of each row standardised."""
        shifted = activity - activity.mean(axis=1, keepdims=True)
        standard = shifted / shifted.std(axis=1, keepdims=True)
        return np.clip((standard + RANGE) / (2 * RANGE) * self.num_levels, 0, self.num_levels - 1).astype(np.int64)

    def score(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Adds `mean_absolute_error` where levels are predicted."""
        scores = super().score(logits, targets)
        if self.labels == "state":
            return scores
        below = logits.float().softmax(-1).cumsum(-1) < 0.5
        median = below.sum(-1).clamp(max=self.num_levels - 1)
        labelled = targets != IGNORE
        error = torch.where(labelled, (median - targets).abs(), 0).sum(dtype=torch.float64)
        # no sum of NaN is below a half
        error = error.where(~scores["loss"][0].isnan(), torch.nan)
        return {**scores, "mean_absolute_error": (error * (2 * RANGE / self.num_levels), labelled.sum())}
