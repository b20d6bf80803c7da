"""Speech Commands: which of ten words is spoken, from the raw waveform."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from suite.contracts import Segment, TaskSpec
from suite.rng import numpy_generator
from tasks.base import Array, TaskBase

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
"""The ten words in the order of their classes."""

RATE = 16_000

PAPER_CLIPS = 34_975
"""Clips of exactly one second of these words in version 0.02: the papers' whole set, as their loader asserts."""


def _fault(message: str) -> ValueError:
    return ValueError(f"{SpeechCommands.name}: {message}")


@dataclass(frozen=True)
class Recordings:
    """The files of a folder: clips of each word, and the split lists that stand beside them."""

    root: Path
    clips: tuple[str, ...]
    """Paths below the root, class by class, sorted."""
    lists: tuple[str, ...]

    @property
    def is_sample(self) -> bool:
        return "split_test.txt" in self.lists and "testing_list.txt" not in self.lists

    def listed(self, name: str) -> frozenset[str]:
        """The clips of the ten words that a list names."""
        lines = {line.strip() for line in (self.root / name).read_text().splitlines()}
        named = {line for line in lines if line.partition("/")[0] in WORDS}
        missing = sorted(named - set(self.clips))
        if missing:
            raise _fault(f"{self.root / name} names {missing[0]}, which is not there; restore the file or the list.")
        return frozenset(named)


def find_recordings(data: Path | None) -> Recordings:
    """The recordings in `data` or `data/speech_commands`."""
    if data is None:
        raise _fault("no data folder; give --data DIR, which holds the folders yes, no, ... or speech_commands/.")
    for root in (data, data / "speech_commands"):
        if any((root / word).is_dir() for word in WORDS):
            break
    else:
        raise _fault(
            f"no recordings in {data} or {data / 'speech_commands'}; unpack Speech Commands v0.02 there (folders yes, "
            f"no, up, ... of WAV files) or give another --data DIR."
        )
    clips: list[str] = []
    for word in WORDS:
        files = sorted(f"{word}/{path.name}" for path in (root / word).glob("*.wav"))
        if not files:
            raise _fault(f"no WAV files in {root / word}; all ten words are needed, restore the folder.")
        clips += files
    names = ("testing_list.txt", "validation_list.txt", "split_train.txt", "split_test.txt")
    return Recordings(root, tuple(clips), tuple(name for name in names if (root / name).is_file()))


@functools.cache
def _fingerprint(recordings: Recordings) -> str:
    """SHA-256 over names, sizes and contents. Every clip is decoded on the way, so that planning finds a broken one."""
    total = hashlib.sha256()
    clips = frozenset(recordings.clips)
    for name in sorted((*clips, *recordings.lists)):
        content = (recordings.root / name).read_bytes()
        if name in clips:
            decode(recordings.root / name, content)
        total.update(f"{name} {len(content)} {hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()


def speaker(clip: str) -> str:
    """Whose voice it is: the part of the file name before `_nohash_`."""
    return clip.partition("/")[2].partition("_nohash_")[0]


def _held_out(clip: str) -> bool:
    """One speaker in eight, by the hash of the name."""
    return hashlib.sha256(f"valid/{speaker(clip)}".encode()).digest()[0] % 8 == 0


def _clean_splits(recordings: Recordings) -> dict[str, list[str]]:
    """Speaker-disjoint: the lists decide on test, and on valid if they can; else valid is carved out of train."""
    tests = [name for name in ("testing_list.txt", "split_test.txt") if name in recordings.lists]
    if not tests:
        raise _fault(
            f"split_policy=clean needs testing_list.txt (or split_test.txt) in {recordings.root}; restore it, or set "
            f"split_policy: paper, which draws its own split."
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
    """70/15/15 of every word at random, one fixed split for all seeds; a speaker may stand in several splits."""
    splits: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for index, word in enumerate(WORDS):
        clips = [clip for clip in recordings.clips if clip.startswith(f"{word}/")]
        order = numpy_generator(0, "speech-commands/paper-split", index).permutation(len(clips))
        first, second = round(0.70 * len(clips)), round(0.85 * len(clips))
        for split, part in zip(splits, (order[:first], order[first:second], order[second:]), strict=True):
            splits[split] += [clips[i] for i in sorted(part)]
    return splits


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise _fault(
            f"reading WAV files needs soundfile ({error}); install the extra: pip install -e '.[audio]'."
        ) from None
    return soundfile


def read_clip(path: Path) -> Array:
    """[frames] float32 in [-1, 1] of a complete 16 kHz mono WAV file; anything else is an error that names the file."""
    return decode(path, path.read_bytes())


def decode(path: Path, content: bytes) -> Array:
    """The same for content that was read from path."""
    soundfile = _soundfile()
    # libsndfile reads what is there of a truncated file without a word, so hold the file against its header
    if content[:4] != b"RIFF" or len(content) < 8 + int.from_bytes(content[4:8], "little"):
        raise _fault(f"{path} is truncated or not a WAV file ({len(content)} bytes); fetch it again.")
    try:
        samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise _fault(f"{path} cannot be decoded ({error}); fetch it again.") from None
    if rate != RATE:
        raise _fault(f"{path} has a sampling rate of {rate} Hz, needs {RATE}; resample it or fetch it again.")
    if samples.shape[1] != 1 or not len(samples):
        raise _fault(f"{path} has {samples.shape[1]} channels and {len(samples)} frames; needs one channel with sound.")
    return samples[:, 0]


class SpeechCommands(TaskBase):
    """Ten spoken words from the raw waveform (SC10), as in DSS Table 2.

        input   0.01  0.03  -0.02  ...  0.00        (one second, 16000 samples)
        target  "stop"                              (one label a sequence)

    Source: Warden 2018 (data, version 0.02); the ten words and the preprocessing are those of the S4 and DSS code
    (Gupta et al. 2022, Table 2), which goes back to Romero et al. 2021: clips that are not one second long are
    dropped (34,975 remain), 70/15/15 are split at random within each word, and the signal is standardised with the
    training split. That is `split_policy: paper, short_clips: drop, scaling: standard`.

    Departures: the source's permutation comes from a library and the file system's order and is not repeated, only
    its proportions; it drops short clips before it splits, here after. It lets a speaker be in train and test, so the
    default, `clean`, follows the official speaker-disjoint lists.

    Folders: the official one (`testing_list.txt`, `validation_list.txt`), or a sample that has `split_train.txt` and
    `split_test.txt`. Where no list holds out a validation split, every eighth speaker of train, by hash, does.
    """

    name: ClassVar[str] = "speech-commands"
    version: ClassVar[int] = 1

    data: Path | None = None
    """The folder of the recordings, or one that has them below `speech_commands/`."""
    length: int = Field(default=RATE, ge=1)
    """Samples of a row: longer clips lose their end, shorter ones are a matter of `short_clips`."""
    short_clips: Literal["pad", "drop"] = "pad"
    """`pad`: zeros behind clips shorter than `length`; `drop`: such clips are left out, as in the source."""
    scaling: Literal["unit", "standard"] = "unit"
    """`unit`: full scale is 1; `standard`: less the mean, over the standard deviation, of all samples of train."""

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(input="signal", num_classes=len(WORDS), readout="sequence", max_length=self.length, channels=1)

    @property
    def stand_in(self) -> str:
        recordings = find_recordings(self.data)
        if recordings.is_sample:
            kind = "speaker-disjoint" if self.split_policy == "clean" else "random"
            return f"{len(recordings.clips)}-clip sample of the v0.02 test set; {kind} split of ours"
        if len(recordings.clips) < PAPER_CLIPS:
            return f"{len(recordings.clips)} clips; the papers' set has {PAPER_CLIPS}"
        return ""

    def fingerprint(self) -> str:
        recordings = find_recordings(self.data)
        self._splits(recordings)
        return _fingerprint(recordings)

    def _splits(self, recordings: Recordings) -> dict[str, list[str]]:
        return _clean_splits(recordings) if self.split_policy == "clean" else _paper_splits(recordings)

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        """Recordings are no random draw: every seed has the same rows."""
        # the source has a validation split of its own under either policy
        if split not in ("train", "valid", "test"):
            raise _fault(f"split={split!r}; there are: train, valid, test.")
        signal, targets = self._load(split)
        if self.scaling == "standard":
            train = signal if split == "train" else self._load("train")[0]
            mean = train.mean(dtype=np.float64)
            square = np.einsum("rt,rt->r", train, train, dtype=np.float64).sum() / train.size
            deviation = np.sqrt(square - mean**2)
            signal -= np.float32(mean)
            signal /= np.float32(deviation + 1e-5)
        yield Segment(inputs=torch.from_numpy(signal[:, :, None]), targets=torch.from_numpy(targets))

    def _load(self, split: str) -> tuple[Array, Array]:
        """Signal [R, length] and classes [R] of a split."""
        recordings = find_recordings(self.data)
        splits = self._splits(recordings)
        signal = np.zeros((len(splits[split]), self.length), dtype=np.float32)
        classes: list[int] = []
        for clip in splits[split]:
            samples = read_clip(recordings.root / clip)[: self.length]
            if len(samples) < self.length and self.short_clips == "drop":
                continue
            signal[len(classes), : len(samples)] = samples
            classes.append(WORDS.index(clip.partition("/")[0]))
        if not classes:
            raise _fault(f"the {split} split of {recordings.root} is empty; add recordings or correct the lists.")
        return signal[: len(classes)], np.array(classes, dtype=np.int16)
