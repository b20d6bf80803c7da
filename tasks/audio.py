"""Audio: predict the next sample of recordings, encoded by the mu-law at 8 bits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from subquad.suite.contracts import IGNORE, Segment, TaskSpec
from subquad.tasks.base import SPLITS, Array, token_spec
from subquad.tasks.data import DataError, NoDataError, cache, needed
from subquad.tasks.data.stored import StoredTask

RATE = 16_000
LEVELS = 256
ZERO = LEVELS // 2
"""The level of silence, which is the first input of every row."""
SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
LOUDEST = 4.0
"""Largest sample that is cut off at full scale. Decoders of lossy formats exceed 1 by a little, and floats that count
in integers exceed it by far."""


def mu_law(wave: Array) -> Array:
    """Encodes a wave in [-1, 1] as levels 0 ... 255, uint8.

        f(x) = sign(x) log(1 + 255 |x|) / log 256;    level = floor(((f + 1) / 2) (256 - e) + e / 2),  e = 0.01

    Source: the curve of ITU-T G.711, quantised as in the code of SaShiMi (Goel et al. 2022).
    """
    mu, margin = LEVELS - 1, 0.01
    bent = np.copysign(np.log1p(mu * np.abs(wave)) / math.log1p(mu), wave)
    return ((bent + 1) / 2 * (LEVELS - margin) + margin / 2).astype(np.uint8)


def mu_law_decode(levels: Array) -> Array:
    """Decodes levels: the value in the middle of each level, a wave in [-1, 1], float64."""
    mu, margin = LEVELS - 1, 0.01
    bent = (levels.astype(np.float64) + (1 - margin) / 2) / (LEVELS - margin) * 2 - 1
    return np.copysign(np.expm1(np.abs(bent) * math.log1p(mu)) / mu, bent)


def stretched(segment: Array) -> Array:
    """Scales int16 samples so that they reach from -1 to 1, as the SaShiMi code does for each row."""
    low, high = int(segment.min()), int(segment.max())
    return 2 * (segment.astype(np.float32) - low) / max(high - low, 1) - 1


def natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort key by which `out2` comes before `out10`."""
    parts = re.findall(r"\d+|\D+", path.name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def told_size(head: bytes) -> int:
    """The bytes of a WAV or AIFF file behind its first eight, as its first 28 state them; 0 where they state none.

    A program that writes into a pipe cannot know them, and writes 2^32 - 1 or, as SoX, a little less than 2^31.
    """
    kind, size = head[:4], int.from_bytes(head[4:8], "big")
    if kind == b"RF64":
        # a WAV file of more than 4 GB
        return int.from_bytes(head[20:28], "little") if head[12:16] == b"ds64" else 0
    if kind == b"RIFF":
        size = int.from_bytes(head[4:8], "little")
    elif kind not in (b"RIFX", b"FORM"):
        return 0
    return 0 if size >= 0x7FFF_F000 else size


def is_cut(path: Path) -> bool:
    """Whether the end of a WAV, AIFF or Ogg file is missing, which libsndfile reads without an error."""
    with path.open("rb") as file:
        head = file.read(28)
        if head[:4] != b"OggS":
            return path.stat().st_size < 8 + told_size(head)
        # a page has 65,307 bytes or fewer
        file.seek(max(0, path.stat().st_size - 2**16))
        page = file.read()
    page = page[page.rfind(b"OggS") :]
    sizes = page[27 : 27 + page[26]] if len(page) > 26 else b""
    is_last = len(page) > 5 and bool(page[5] & 4)
    return not is_last or not sizes or len(page) < 27 + len(sizes) + sum(sizes)


def read_recording(path: Path, resample: bool) -> Array:
    """Reads the mean of the channels of a recording: [frames] int16 at 16 kHz.

    Another sampling rate is an error unless `resample` is set. A DataError names the file and what is wrong with it.
    """
    soundfile = needed("soundfile", "reading recordings", "audio")
    try:
        with soundfile.SoundFile(path) as file:
            wave, rate, frames = file.read(dtype="float32", always_2d=True), file.samplerate, file.frames
    except soundfile.LibsndfileError as error:
        reason = " ".join(str(error).split()).replace(str(path), "it")
        raise DataError(f"{path}: cannot be decoded ({reason}); fetch it again.") from None
    # most MP3 files state their frames
    if is_cut(path) or len(wave) < frames:
        raise DataError(f"{path}: truncated; fetch it again.")
    if not len(wave):
        raise DataError(f"{path}: holds no sound; remove it or fetch it again.")
    if not np.isfinite(wave).all():
        raise DataError(f"{path}: holds samples that are not finite; correct it or fetch it again.")
    if (peak := float(np.abs(wave).max())) > LOUDEST:
        raise DataError(
            f"{path}: holds samples of up to {peak:g}, where full scale is 1; divide them and write it again."
        )
    mono = wave.mean(axis=1)
    # rounding leaves a little of them
    if np.abs(mono).max() < peak / 1000:
        raise DataError(f"{path}: its channels cancel each other in their mean; keep one of them.")
    if rate != RATE:
        if not resample:
            raise DataError(
                f"{path}: has a sampling rate of {rate} Hz, needs {RATE}; resample it, or set resample: true."
            )
        signal = needed("scipy.signal", "resample: true", "audio")
        common = math.gcd(rate, RATE)
        mono = signal.resample_poly(mono, RATE // common, rate // common)
    return np.clip(np.round(mono * 2**15), -(2**15), 2**15 - 1).astype(np.int16)


class NextSample(StoredTask):
    """Base class of the tasks that predict the levels of the mu-law, sample by sample."""

    exponentials: ClassVar[Mapping[str, str]] = {"perplexity": "loss"}
    """Metrics that are the exponential of the mean of another one, by name."""

    def shifted(self, targets: Array) -> Segment:
        """The rows of these levels [R, T]: the inputs are silence and then every level but the last."""
        inputs = np.empty_like(targets)
        inputs[:, 0], inputs[:, 1:] = ZERO, targets[:, :-1]
        return Segment(inputs=torch.from_numpy(inputs), targets=torch.from_numpy(targets))

    def score(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The metrics of every task, and bits per sample."""
        metrics = super().score(logits, targets)
        total, count = metrics["loss"]
        return metrics | {"bits_per_sample": (total / math.log(2), count)}


class Recordings(NextSample):
    """The next sample of the recordings in any folder.

        input   128 131 140 152    (levels of the mu-law; the first is silence, the rest the samples before)
        target  131 140 152 149    (the sample itself, everywhere)

    Source: any folder of WAV, FLAC, OGG or MP3 files, by the protocol of `youtubemix` below. No published number
    belongs to it. Files are taken in the order of their names, 2 before 10. Where there are 17 or more, the first 88 %
    of them are for training and 6 % each for validation and testing. Where there are fewer, each recording is cut in
    these proportions.

    Bits a sample at two lengths compare only with `scaling: unit` and `rest: pad`. With the defaults, which are the
    source's, a longer row drops more of each recording, and the range that it is stretched by is that of more samples,
    so that its levels lie closer together and are easier to predict without any longer context.
    """

    name: ClassVar[str] = "recordings"
    version: ClassVar[int] = 1
    left_out_when_off: ClassVar[tuple[str, ...]] = ("rest",)

    length: int = Field(default=2**13, ge=2, le=2**20)
    """Number of samples of a row. Mamba's Table 14: 8192, 16384, 30720, 61440, 120832, 239616, 479232, 958464."""
    scaling: Literal["segment", "unit"] = "segment"
    """`segment`: each row is stretched to [-1, 1] before the mu-law, as in the source. `unit`: full scale is 1."""
    resample: bool = False
    """Whether recordings with another sampling rate are resampled to 16 kHz, which needs scipy."""
    rest: Literal["drop", "pad"] = "drop"
    """Treatment of the samples of a validation or test stretch that fill no row. `drop`: they are left out, as in the
    source, so that each length has test samples of its own. `pad`: they are one more row, in which silence without
    targets follows them, so that every sample is a target exactly once at any length."""

    @property
    def spec(self) -> TaskSpec:
        return token_spec(LEVELS, self.length)

    @property
    def folder(self) -> Path:
        if self.data is None and not self.source:
            raise NoDataError(f"{self.name}: no data; give --data DIR, a folder of recordings.")
        layout = f"recordings ({', '.join(SUFFIXES)})"
        below = ("youtube_mix", "youtubemix", "wavs")
        return self.find(below, lambda path: bool(cache.files_in(path, *SUFFIXES)), layout)

    def files(self, folder: Path) -> list[Path]:
        return sorted(cache.files_in(folder, *SUFFIXES), key=natural)

    def reading(self) -> Mapping[str, Any]:
        return {"resample": self.resample}

    def read(self, folder: Path) -> dict[str, Array]:
        """The samples of all recordings, one after the other, int16 [N], and where each recording ends [R]."""
        parts = [read_recording(path, self.resample) for path in self.files(folder)]
        return {"samples": np.concatenate(parts), "ends": np.cumsum([len(part) for part in parts], dtype=np.int64)}

    @property
    def stand_in(self) -> str:
        arrays = self.arrays()
        return f"{len(arrays['ends'])} recordings, {len(arrays['samples']) / RATE:.0f} s, of the user's own"

    def _bounds(self, split: str, ends: Array) -> list[tuple[int, int]]:
        """Start and stop of the stretches of samples that belong to a split."""
        starts = np.concatenate([[0], ends[:-1]])
        low, high = {"train": (0, 88), "valid": (88, 94), "test": (94, 100)}[split]
        count = len(ends)
        if count >= MIN_FILES:
            chosen = range(count * low // 100, count * high // 100)
            return [(int(starts[i]), int(ends[i])) for i in chosen]
        sizes = ends - starts
        return [(int(s + n * low // 100), int(s + n * high // 100)) for s, n in zip(starts, sizes, strict=True)]

    def plan(self) -> None:
        for split in SPLITS:
            self._rows(split)

    def _rows(self, split: str) -> list[tuple[int, int]]:
        """The index at which each row of a split begins, and its number of samples."""
        bounds = self._bounds(split, self.arrays()["ends"])
        rows = [
            (start, min(self.length, high - start)) for low, high in bounds for start in range(low, high, self.length)
        ]
        if split == "train" or self.rest == "drop":
            rows = [(start, count) for start, count in rows if count == self.length]
        if not rows:
            longest = max((high - low for low, high in bounds), default=0)
            raise DataError(
                f"{self.name}: no {split} stretch of {self.folder} has {self.length} samples (the longest has "
                f"{longest}); lower length or add recordings."
            )
        return rows

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        self.check_split(split)
        samples, rows = self.arrays()["samples"], self._rows(split)
        levels = np.full((len(rows), self.length), ZERO, dtype=np.uint8)
        for row, (start, count) in enumerate(rows):
            piece = samples[start : start + count]
            wave = stretched(piece) if self.scaling == "segment" else piece.astype(np.float32) / 2**15
            levels[row, :count] = mu_law(wave)
        segment = self.shifted(levels)
        if self.rest == "pad" and split != "train":
            counts = torch.tensor([count for _, count in rows])
            silent = torch.arange(self.length) >= counts[:, None]
            segment = replace(segment, targets=segment.targets.to(torch.int16).masked_fill(silent, IGNORE))
        yield segment


MIN_FILES = 17
"""Minimum number of files; 6 % of fewer files would round to none."""
HOURS = 3.5
"""YouTubeMix has about four."""


class YouTubeMix(Recordings):
    """The next sample of four hours of solo piano music.

        input   128 131 140 152    (levels of the mu-law; the first is silence, the rest the samples before)
        target  131 140 152 149    (the sample itself, everywhere)

    Source: DeepSound 2017, as SaShiMi (Goel et al. 2022) and Mamba (Gu & Dao 2023, appendix E.4.1) train on it: clips
    of one minute at 16 kHz, mu-law at 8 bits, and rows that do not overlap. Clips are taken in the order of their
    names, and the first 88 % are for training. Mamba's Table 14 combines `length` and batch size as 8192 x 128, 16384 x
    64, 30720 x 32, 61440 x 16, 120832 x 8, 239616 x 4, 479232 x 2 and 958464 x 1. The rest of a clip that fills no row
    is dropped, as in the source.

    Departure: the source adds 1e-8 to a sample before the mu-law and 1e-6 to the range of a row, which is left out
    here.
    """

    name: ClassVar[str] = "youtubemix"
    version: ClassVar[int] = 1
    source: ClassVar[str] = "youtubemix"

    @property
    def stand_in(self) -> str:
        arrays = self.arrays()
        hours = len(arrays["samples"]) / RATE / 3600
        if hours >= HOURS and len(arrays["ends"]) >= MIN_FILES:
            return ""
        return f"{len(arrays['ends'])} recordings, {hours:.2f} hours; YouTubeMix has about 4"
