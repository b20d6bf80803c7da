"""Seizures in simulated EEG: discharges with a rhythm, beside as many without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch

from subquad.suite.bounds import Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import CHUNK_ROWS, Array, TaskBase

RATE = 200
"""Samples a second, as in the corpus of the paper."""
LOWEST_HZ = 0.5
"""The background has no slower waves than this."""
ALPHA_HZ = (8.0, 12.0)
"""Range of the frequency of the alpha rhythm, of which every row has its own."""
SWELL_HZ = (0.05, 0.2)
"""Range of the frequency at which the alpha rhythm rises and falls."""
RHYTHM_HZ = (2.0, 3.5)
"""Discharges a second at the end and at the beginning of a seizure."""
JITTER = 0.05
"""Standard deviation of the time between two discharges of a seizure, as a part of it."""
APART_S = 0.18
"""Shortest time between two discharges that are no seizure."""
AMPLITUDE = (2.0, 4.0)
"""Range of the height of the discharges at their focus, in standard deviations of the background."""
SPREAD = 1.5
"""Distance from the focus, in electrodes, at which discharges are e times lower."""
SPIKE_S, WAVE_S, WAVE_DELAY_S = 0.015, 0.04, 0.1
"""Widths of the spike and of the slow wave of a discharge (standard deviations), and the time between them."""


def discharge() -> Array:
    """A sharp negative spike and the slow positive wave behind it, [samples]; the spike peaks at sample 10."""
    time = (np.arange(70) - 10) / RATE
    wave = np.exp(-0.5 * ((time - WAVE_DELAY_S) / WAVE_S) ** 2)
    return 0.6 * wave - np.exp(-0.5 * (time / SPIKE_S) ** 2)


def background(rng: np.random.Generator, num_rows: int, length: int, num_channels: int) -> Array:
    """EEG without discharges [R, T, C] of standard deviation one.

    Noise with a power that falls as 1 / frequency, a third of it shared by all electrodes, and an alpha rhythm of
    varying strength.
    """
    white = rng.standard_normal((num_rows, num_channels + 1, length))
    frequency = np.fft.rfftfreq(length, 1 / RATE)
    gain = np.where(frequency >= LOWEST_HZ, 1 / np.sqrt(np.maximum(frequency, LOWEST_HZ)), 0.0)
    # mean square of the gain over both halves of the spectrum, so that the noise has standard deviation one
    gain *= np.sqrt(length / (2 * (gain**2).sum()))
    noise = np.fft.irfft(np.fft.rfft(white, axis=-1) * gain, n=length, axis=-1)
    mixed = np.sqrt(2 / 3) * noise[:, 1:] + np.sqrt(1 / 3) * noise[:, :1]
    time = np.arange(length) / RATE
    spans = (ALPHA_HZ, (0.0, 2 * np.pi), SWELL_HZ)
    hertz, phase, swell = (rng.uniform(low, high, (num_rows, 1)) for low, high in spans)
    alpha = np.sin(2 * np.pi * hertz * time + phase) * (1 + np.sin(2 * np.pi * swell * time + 3 * phase))
    strength = rng.uniform(0, 0.6, (num_rows, num_channels, 1))
    return ((mixed + strength * alpha[:, None]) / np.sqrt(1 + 0.75 * strength**2)).transpose(0, 2, 1)


class Seizures(TaskBase):
    """Seizures in simulated EEG.

        input   0.3 -0.1  0.4 -1.9  0.8  0.9 ... -2.1  0.7 ... -2.0  0.8 ...   (each sample: one value an electrode)
        target  1                                                              (a seizure; 0: none)

    Both classes have the same background and, in an episode of half the row to all of it, the same number of discharges
    (a spike and a slow wave, strongest at one electrode). In a seizure they come in a rhythm that slows down from 3.5
    to 2 a second; in the other rows they come at random, as discharges between seizures do. So neither the power nor
    the shape of a discharge tells the classes apart; a model must remember when the last one was. Classes are equally
    frequent.

    Source: H3 (Fu et al. 2022, appendix F.8) classifies clips of 12,000 samples of EEG (TUSZ v1.5.2, 60 s at 200 Hz) as
    seizure or not. These rows stand in for that corpus, which may not be passed on. Departures: shorter clips of fewer
    electrodes, of which half are seizures. Which metric the paper has is not in the text that was read.
    """

    name: ClassVar[str] = "seizures"
    version: ClassVar[int] = 1

    length: Size = 2000
    """Number of samples of a row, at 200 a second."""
    num_channels: Size = 4
    """Number of electrodes, which stand in a line."""
    num_train: Size = 4000
    num_test: Size = 1000
    """Number of rows of the test split, and of a clean validation split."""

    def check_options(self) -> None:
        if self.length < 4 * RATE:
            raise ValueError(
                f"{self.name}: length={self.length} is {self.length / RATE:g} s; a rhythm needs four, raise length to "
                f"{4 * RATE} or more."
            )

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(
            input="signal", num_classes=2, readout="sequence", max_length=self.length, channels=self.num_channels
        )

    @property
    def stand_in(self) -> str:
        return "simulated EEG in place of TUSZ v1.5.2"

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        count = self.num_train if split == "train" else self.num_test
        rows = np.empty((count, self.length, self.num_channels), dtype=np.float32)
        targets = np.empty(count, dtype=np.int16)
        for start in range(0, count, CHUNK_ROWS):
            part = slice(start, min(start + CHUNK_ROWS, count))
            rng = numpy_generator(seed, f"{self.name}/{split}", start // CHUNK_ROWS)
            targets[part] = rng.permutation(np.arange(part.stop - start) % 2)
            rows[part] = self._draw(rng, targets[part])
        yield Segment(inputs=torch.from_numpy(rows), targets=torch.from_numpy(targets), slice=f"length={self.length}")

    def _draw(self, rng: np.random.Generator, targets: Array) -> Array:
        """Rows [R, T, C] of these classes [R]."""
        signal = background(rng, len(targets), self.length, self.num_channels)
        shape, channels = discharge(), np.arange(self.num_channels)
        for row, target in zip(signal, targets, strict=True):
            weights = rng.uniform(*AMPLITUDE) * np.exp(-np.abs(channels - rng.integers(self.num_channels)) / SPREAD)
            for sample in np.round(RATE * self._times(rng, bool(target))).astype(int):
                stop = min(sample + len(shape), self.length)
                row[sample:stop] += shape[: stop - sample, None] * weights
        return signal

    def _times(self, rng: np.random.Generator, seizure: bool) -> Array:
        """Returns the onsets of an episode's discharges, in seconds."""
        whole = self.length / RATE
        lasts = rng.uniform(0.5, 1.0) * whole
        begins = rng.uniform(0, whole - lasts)
        slow, fast = RHYTHM_HZ
        # the rate falls linearly over the episode, and this many discharges come before its end
        count = int(lasts * (slow + fast) / 2)
        if seizure:
            fall = (fast - slow) / lasts
            even = (fast - np.sqrt(fast**2 - 2 * fall * np.arange(count))) / fall
            times = np.cumsum(np.diff(even, prepend=0.0) * (1 + JITTER * rng.standard_normal(count)))
            return begins + times * min(1.0, lasts / times[-1])
        free = lasts - (count - 1) * APART_S
        return begins + np.sort(rng.uniform(0, free, count)) + APART_S * np.arange(count)
