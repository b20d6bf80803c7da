"""Speech Commands: which of ten or 35 words is spoken, from the raw waveform or from its cepstrum."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from subquad.suite.bounds import Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.audio import told_size
from subquad.tasks.base import SPLITS, Array
from subquad.tasks.data import DataError, cache, find, needed
from subquad.tasks.data.stored import StoredTask

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
"""The ten words in the order of their classes."""

ALL_WORDS = (
    *("backward", "bed", "bird", "cat", "dog", "down", "eight", "five", "follow", "forward", "four", "go", "happy"),
    *("house", "learn", "left", "marvin", "nine", "no", "off", "on", "one", "right", "seven", "sheila", "six", "stop"),
    *("three", "tree", "two", "up", "visual", "wow", "yes", "zero"),
)
"""All words of version 0.02, in the order of their classes."""

RATE = 16_000

PAPER_CLIPS = {10: 34_975, 35: 105_829}
"""Number of clips in version 0.02.

Of the ten words, clips that last exactly a second count, as the papers' loader asserts; of all 35 words, every clip.
"""

HOP, NUM_MELS, NUM_MFCC = 100, 64, 20
"""The cepstrum of the papers' loaders: a window of 200 samples every 100 samples, 64 mel bands and 20 coefficients."""


def _fault(message: str) -> DataError:
    return DataError(f"{SpeechCommands.name}: {message}")


@dataclass(frozen=True)
class Recordings:
    """The files of a folder: the clips of each word, and the lists of splits that lie beside them."""

    root: Path
    clips: tuple[str, ...]
    """Paths relative to the root, class by class and sorted within a class."""
    lists: tuple[str, ...]

    words: tuple[str, ...] = WORDS

    @property
    def is_sample(self) -> bool:
        return "split_test.txt" in self.lists and "testing_list.txt" not in self.lists

    def listed(self, name: str) -> frozenset[str]:
        """The clips of these words that are in a list; a DataError names one that is missing."""
        try:
            lines = {line.strip() for line in (self.root / name).read_text().splitlines()}
        except UnicodeDecodeError:
            raise _fault(f"{self.root / name} is no text; restore the list.") from None
        named = {line for line in lines if line.partition("/")[0] in self.words}
        missing = sorted(named - set(self.clips))
        if missing:
            raise _fault(f"{self.root / name} names {missing[0]}, which is not there; restore the file or the list.")
        return frozenset(named)


def find_recordings(
    data: Path | None, words: tuple[str, ...] = WORDS, task: str = "speech-commands", source: str = "speech-commands"
) -> Recordings:
    """The recordings of these words in `data`, in a folder below it, or in the cache."""
    root = find(
        task,
        data,
        source,
        ("speech_commands", "speech_commands_v0.02", "sc09"),
        lambda path: any((path / word).is_dir() for word in words),
        f"the folders {', '.join(words[:3])}, ... of WAV files of Speech Commands v0.02",
    )
    clips: list[str] = []
    for word in words:
        files = sorted(f"{word}/{path.name}" for path in (root / word).glob("*.wav") if not cache.hidden(path.name))
        if not files:
            raise _fault(f"no WAV files in {root / word}; all {len(words)} words are needed, restore the folder.")
        clips += files
    names = ("testing_list.txt", "validation_list.txt", "split_train.txt", "split_test.txt")
    return Recordings(root, tuple(clips), tuple(name for name in names if (root / name).is_file()), words)


def speaker(clip: str) -> str:
    """Identifies the speaker of a clip: the part of the file name before `_nohash_`."""
    return clip.partition("/")[2].partition("_nohash_")[0]


def _held_out(clip: str) -> bool:
    """Whether the speaker of a clip is held out: one speaker in eight is, by the hash of the name."""
    return hashlib.sha256(f"valid/{speaker(clip)}".encode()).digest()[0] % 8 == 0


def clean_splits(recordings: Recordings) -> dict[str, list[str]]:
    """Splits in which no speaker is in two of them.

    The lists give the test split, and the validation split where they have one. Where they have none, speakers of the
    training split are held out.
    """
    tests = [name for name in ("testing_list.txt", "split_test.txt") if name in recordings.lists]
    if not tests:
        raise _fault(
            f"split_policy=clean and 35 classes need testing_list.txt (or split_test.txt) in {recordings.root}; "
            f"restore it, or take ten classes and split_policy: paper, which draws its own split."
        )
    test = recordings.listed(tests[0])
    rest = [clip for clip in recordings.clips if clip not in test]
    if recordings.is_sample and "split_train.txt" in recordings.lists:
        unlisted = sorted(set(rest) - recordings.listed("split_train.txt"))
        if unlisted:
            raise _fault(f"{unlisted[0]} is in neither split_train.txt nor split_test.txt; complete the lists.")
    if "validation_list.txt" in recordings.lists:
        listed = recordings.listed("validation_list.txt")
        valid = [clip for clip in rest if clip in listed]
    else:
        valid = [clip for clip in rest if _held_out(clip)]
    left = set(rest) - set(valid)
    return {
        "train": [clip for clip in rest if clip in left],
        "valid": valid,
        "test": [clip for clip in recordings.clips if clip in test],
    }


def _paper_splits(recordings: Recordings) -> dict[str, list[str]]:
    """70, 15 and 15 % of the clips of every word at random, the same for all seeds; a speaker may be in several
    splits."""
    splits: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for index, word in enumerate(recordings.words):
        clips = [clip for clip in recordings.clips if clip.startswith(f"{word}/")]
        order = numpy_generator(0, "speech-commands/paper-split", index).permutation(len(clips))
        first, second = round(0.70 * len(clips)), round(0.85 * len(clips))
        for split, part in zip(splits, (order[:first], order[first:second], order[second:]), strict=True):
            splits[split] += [clips[i] for i in sorted(part)]
    return splits


def _source_splits(clips: list[str]) -> dict[str, list[str]]:
    """70, 15 and 15 % of these clips, stratified by word, as the released code of S4 and DSS draws them."""
    split = needed("sklearn.model_selection", f"{SpeechCommands.name}: paper_split=source", "audio").train_test_split
    words = [clip.partition("/")[0] for clip in clips]
    train, rest, _, words_of_rest = split(clips, words, train_size=0.7, random_state=0, stratify=words)
    valid, test = split(rest, train_size=0.5, random_state=1, stratify=words_of_rest)
    return {"train": train, "valid": valid, "test": test}


def read_clip(path: Path) -> Array:
    """Reads a complete WAV file with one channel of 16 bits at 16 kHz: [frames] int16. A DataError names any other
    file."""
    soundfile = needed("soundfile", f"{SpeechCommands.name}: reading WAV files", "audio")
    content = path.read_bytes()
    # libsndfile reads a truncated file without an error, so its size is compared with its header
    if content[:4] != b"RIFF" or len(content) < 8 + told_size(content[:28]):
        raise _fault(f"{path} is truncated or not a WAV file ({len(content)} bytes); fetch it again.")
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            rate, kind = file.samplerate, file.subtype
            samples = file.read(dtype="int16", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise _fault(f"{path} cannot be decoded ({error}); fetch it again.") from None
    if rate != RATE:
        raise _fault(f"{path} has a sampling rate of {rate} Hz, needs {RATE}; resample it or fetch it again.")
    if kind != "PCM_16":
        raise _fault(
            f"{path} is {kind}, needs 16-bit samples (PCM_16) as in the official set; convert or fetch it again."
        )
    if samples.shape[1] != 1 or not len(samples):
        raise _fault(f"{path} has {samples.shape[1]} channels and {len(samples)} frames; needs one channel with sound.")
    return samples[:, 0]


def mel_filters(bands: int, num_bins: int, rate: float) -> Array:
    """Triangular filters [bands, num_bins], evenly spaced in mel = 2595 log10(1 + f / 700) from 0 to half the rate."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    frequencies = np.linspace(0, rate / 2, num_bins)
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    return np.maximum(0, np.minimum(rising, falling))


def mfcc(signal: Array) -> Array:
    """The log-mel cepstrum of the papers' loaders: int16 [R, T] to float32 [R, T // 100 + 1, 20].

        c_k = sum_m w_k cos(pi k (m + 1/2) / 64) log(e_m + 1e-6),   w_0 = 64^(-1/2), else 32^(-1/2)

    e_m is the energy in the mel band m of a periodic Hann window of 200 samples around every 100th one; the signal is
    reflected at its ends. Bands narrower than the 80 Hz between two frequencies hold none of them and are empty.

    Source: `torchaudio.transforms.MFCC` with `log_mels=True`, n_mfcc 20, n_fft 200 and n_mels 64, as S4's and DSS's
    loaders call it; computed in float64.
    """
    window = torch.hann_window(2 * HOP, dtype=torch.float64)
    bands = torch.from_numpy(mel_filters(NUM_MELS, HOP + 1, RATE))
    angle = torch.arange(NUM_MFCC)[:, None] * (torch.arange(NUM_MELS, dtype=torch.float64) + 0.5)
    cosines = torch.cos(math.pi / NUM_MELS * angle) * math.sqrt(2 / NUM_MELS)
    cosines[0] /= math.sqrt(2)
    parts = []
    for start in range(0, len(signal), 256):
        wave = torch.from_numpy(signal[start : start + 256]).double() / 2**15
        spectrum = torch.stft(wave, 2 * HOP, HOP, window=window, return_complex=True).abs().square()
        parts.append((cosines @ torch.log(bands @ spectrum + 1e-6)).mT.float())
    return torch.cat(parts).contiguous().numpy()


def moments(values: Array, *, each_step: bool = False) -> tuple[Array, Array]:
    """Mean and standard deviation of each channel of values [R, T, C], or of each step and channel; float64."""
    axes, kept = ((0,), "tc") if each_step else ((0, 1), "c")
    count = math.prod(values.shape[axis] for axis in axes)
    mean = values.sum(axis=axes, dtype=np.float64) / count
    square = np.einsum(f"rtc,rtc->{kept}", values, values, dtype=np.float64) / count
    return mean, np.sqrt(np.maximum(square - mean**2, 0))


_moments: dict[str, tuple[Array, Array]] = {}
"""Moments of the training rows of every task that this process has opened."""


class SpokenWords(StoredTask):
    """Base class of the tasks on recordings of Speech Commands."""

    @property
    def recordings(self) -> Recordings:
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        return self.recordings.root

    def files(self, folder: Path) -> list[Path]:
        recordings = self.recordings
        return [folder / name for name in (*recordings.clips, *recordings.lists)]


class SpeechCommands(SpokenWords):
    """Ten (SC10) or 35 (SC35) spoken words, from the raw waveform or its cepstrum, as in DSS Table 2.

        input   0.01  0.03  -0.02  ...  0.00        (one second, 16000 samples; or 161 steps of 20 coefficients)
        target  "stop"                              (one label a sequence)

    Source: Warden 2018 for the data (version 0.02). Words and preprocessing are those of the S4 and DSS code (Gupta et
    al. 2022, Table 2), which goes back to Romero et al. 2021.

    - Ten words: clips that do not last a second are dropped (34,975 remain), the clips of each word are split at random
      into 70, 15 and 15 %, and rows are standardised with the training split: the cepstrum channel by channel, the raw
      waveform sample by sample, because its channel is not the last axis there. The options for this are
      `split_policy: paper, paper_split: source, short_clips: drop, scaling: standard-steps` (`standard` for the
      cepstrum). They follow src/dataloaders/sc.py of state-spaces/s4 at a0c724aae456468a271d5e5fc7415185c83cde71.
    - 35 words: the official lists under either policy, and short clips are padded
      (`short_clips: pad, scaling: standard`).

    `half_rate` adds DSS's zero-shot change of resolution to the test split: a second slice, `rate=8000`, holds every
    second sample of the rows of `rate=16000`. Its segment has `rate` 0.5, and linear time-invariant layers take steps
    twice as large there (`Backbone.at_rate`); other layers do not adapt. The test value over both slices mixes the two,
    so read the slices.

    Departures: the source splits the clips in the order of its file system, here they are sorted by name, so its very
    splits cannot be had. `paper_split: own` has its proportions alone, and drops short clips after the split. In the
    source a speaker may be both in train and in test, so the default, `clean`, follows the official lists, which keep
    speakers apart. Full scale is 1 before the cepstrum is computed; the source divides by 2^15 what its audio library
    returns, although newer versions of that library have done so already.

    Folders: the official one (`testing_list.txt`, `validation_list.txt`), or a sample of it that has `split_train.txt`
    and `split_test.txt`. Where no list gives a validation split, one training speaker in eight is held out, by hash.
    """

    name: ClassVar[str] = "speech-commands"
    version: ClassVar[int] = 2
    left_out_when_off: ClassVar[tuple[str, ...]] = ("paper_split",)
    source: ClassVar[str] = "speech-commands"

    classes: Literal[10, 35] = 10
    """Number of words."""
    features: Literal["raw", "mfcc"] = "raw"
    """`raw`: the waveform. `mfcc`: 20 coefficients every 100 samples, 161 steps for a second."""
    paper_split: Literal["own", "source"] = "own"
    """The random split of ten words under `split_policy: paper`. `own`: of every word 70, 15 and 15 %, from a random
    stream of ours. `source`: of the clips that last `length` samples, the calls of S4's code, scikit-learn's
    `train_test_split` with the random states 0 and 1, stratified by word."""
    half_rate: bool = False
    """Whether the test split has a second slice with every second sample, for raw features only."""
    length: Size = RATE
    """Number of samples of a row. Longer clips are cut; `short_clips` decides about shorter ones."""
    short_clips: Literal["pad", "drop"] = "pad"
    """Treatment of clips shorter than `length`. `pad`: zeros follow them. `drop`: they are left out, as in the
    source."""
    scaling: Literal["unit", "standard", "standard-steps"] = "unit"
    """`unit`: full scale is 1. `standard`: each channel has mean 0 and standard deviation 1 on the training split.
    `standard-steps`: each step of each channel has, as in S4's code for the raw waveform."""

    @property
    def words(self) -> tuple[str, ...]:
        return WORDS if self.classes == 10 else ALL_WORDS

    @property
    def spec(self) -> TaskSpec:
        if self.paper_split == "source" and (self.split_policy != "paper" or self.classes != 10):
            raise _fault(
                f"paper_split=source is for ten classes and split_policy=paper, got {self.classes} and "
                f"{self.split_policy}; set those, or paper_split: own."
            )
        if self.half_rate and self.features == "mfcc":
            raise _fault("half_rate is for raw signals; set features: raw or half_rate: false.")
        length, channels = self.length, 1
        if self.features == "mfcc":
            if self.length <= HOP:
                raise _fault(f"features=mfcc needs length > {HOP} (half a window), got {self.length}; raise length.")
            length, channels = self.length // HOP + 1, NUM_MFCC
        return TaskSpec("signal", num_classes=self.classes, readout="sequence", max_length=length, channels=channels)

    @property
    def recordings(self) -> Recordings:
        return find_recordings(self.data, self.words)

    @property
    def stand_in(self) -> str:
        recordings = self.recordings
        if recordings.is_sample:
            kind = "speaker-disjoint" if self.split_policy == "clean" or self.classes == 35 else "random"
            return f"{len(recordings.clips)}-clip sample of the v0.02 test set; {kind} split of ours"
        if len(recordings.clips) < PAPER_CLIPS[self.classes]:
            return f"{len(recordings.clips)} clips; the papers' set has {PAPER_CLIPS[self.classes]}"
        return ""

    def reading(self) -> Mapping[str, Any]:
        return {"classes": self.classes, "features": self.features, "length": self.length}

    def read(self, folder: Path) -> dict[str, Array]:
        """Rows (int16 [R, length] or the cepstrum in float32), frames [R] and targets [R], in the order of the
        words."""
        clips = self.recordings.clips
        signal = np.zeros((len(clips), self.length), dtype=np.int16)
        frames = np.empty(len(clips), dtype=np.int32)
        for row, clip in enumerate(clips):
            samples = read_clip(folder / clip)[: self.length]
            signal[row, : len(samples)] = samples
            frames[row] = len(samples)
        targets = np.array([self.words.index(clip.partition("/")[0]) for clip in clips], dtype=np.int8)
        rows = mfcc(signal) if self.features == "mfcc" else signal
        return {"rows": rows, "frames": frames, "targets": targets}

    def _splits(self, recordings: Recordings) -> dict[str, list[str]]:
        if self.split_policy != "paper" or self.classes != 10:
            return clean_splits(recordings)
        if self.paper_split == "own":
            return _paper_splits(recordings)
        frames = self.arrays()["frames"]
        return _source_splits(
            [clip for clip, count in zip(recordings.clips, frames, strict=True) if count == self.length]
        )

    def counts(self) -> dict[str, int]:
        chosen = self._chosen()
        return {split: len(chosen[split]) * (1 + (self.half_rate and split == "test")) for split in SPLITS}

    def _chosen(self) -> dict[str, Array]:
        """The rows of every split."""
        recordings = self.recordings
        number = {clip: row for row, clip in enumerate(recordings.clips)}
        splits = self._splits(recordings)
        chosen = {split: np.array([number[clip] for clip in splits[split]], dtype=np.int64) for split in SPLITS}
        if self.short_clips == "drop":
            frames = self.arrays()["frames"]
            return {split: rows[frames[rows] >= self.length] for split, rows in chosen.items()}
        return chosen

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        # the source has a validation split of its own under either policy
        self.check_split(split)
        arrays, chosen = self.arrays(), self._chosen()

        def signal(name: str) -> Array:
            values = arrays["rows"][chosen[name]]
            return values if self.features == "mfcc" else np.divide(values, 2**15, dtype=np.float32)[:, :, None]

        values = signal(split)
        if self.scaling != "unit":
            key = f"{self.model_dump_json()} {self.fingerprint()}"
            # kept for validation and test, because going through the training rows again would take seconds
            if key not in _moments:
                train = values if split == "train" else signal("train")
                _moments[key] = moments(train, each_step=self.scaling == "standard-steps")
            mean, deviation = _moments[key]
            values -= mean.astype(np.float32)
            values /= (deviation + 1e-5).astype(np.float32)
        targets = torch.from_numpy(arrays["targets"][chosen[split]].astype(np.int16))
        if split != "test" or not self.half_rate:
            yield Segment(inputs=torch.from_numpy(values), targets=targets)
            return
        for step in (1, 2):
            inputs = torch.from_numpy(np.ascontiguousarray(values[:, ::step]))
            yield Segment(inputs=inputs, targets=targets, slice=f"rate={RATE // step}", rate=1 / step)
