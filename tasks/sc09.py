"""SC09: predict spoken digits sample by sample, and judge the clips that a model generates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from subquad.suite.bounds import Count, Positive, Steps
from subquad.suite.contracts import Generation, Segment, TaskSpec
from subquad.tasks.audio import LEVELS, ZERO, NextSample, mu_law, mu_law_decode, stretched
from subquad.tasks.base import Array, token_spec
from subquad.tasks.data import folder as cached_folder
from subquad.tasks.speech_commands import (
    ALL_WORDS,
    RATE,
    Recordings,
    SpokenWords,
    clean_splits,
    find_recordings,
    read_clip,
)

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CLIPS = 31_158
"""Number of clips of the ten digits in SC09, as in Mamba's sources."""


class SC09(SpokenWords, NextSample):
    """The next sample of a spoken digit. With `num_generated`, clips that the model generates are judged too.

        input   128 131 140 152    (levels of the mu-law; the first is silence, the rest the samples before)
        target  131 140 152 149    (the sample itself, everywhere)

    Source: Donahue et al. 2019 (SC09), by the protocol of SaShiMi (Goel et al. 2022) as Mamba follows it (section
    4.4.2, appendix E.4.2, Tables 4 and 5): 16,000 samples, mu-law at 8 bits, and the official lists, in which no
    speaker is in two splits.

    Generation begins with silence. The recurrent step of the model gives a distribution of the next sample, from which
    one is drawn. FID, IS, mIS and AM (`tasks.generation`) compare the generated clips with the training clips, and also
    the real test clips with the training clips.

    Departures: the judge is a small classifier that is trained here on the training clips (`tasks.judge`), so its
    metrics can be compared with each other and not with those of papers. No clip is rejected, while SaShiMi chooses
    clips for its listening tests. Clips shorter than a second end in silence, which is predicted too, since generated
    clips last a second as well.

    Folder: as for `speech-commands`. Where the digits are missing, `words` may name others, which are stand-in data.
    """

    name: ClassVar[str] = "sc09"
    version: ClassVar[int] = 1
    source: ClassVar[str] = "sc09"
    first_token: ClassVar[int] = ZERO
    """The token that a model sees before the first one that it generates."""

    words: tuple[str, ...] = DIGITS
    """Words of Speech Commands."""
    length: int = Field(default=RATE, ge=1024, le=RATE)
    """Number of samples of a row, taken from the beginning of each clip."""
    scaling: Literal["segment", "unit"] = "segment"
    """`segment`: each clip is stretched to [-1, 1] before the mu-law, as in the source. `unit`: full scale is 1."""
    num_generated: Count = 0
    """Number of clips to generate after training; the papers generate 2048."""
    temperature: Positive = 1.0
    """The logits are divided by it before a sample is drawn."""
    judge_steps: Steps = 3000
    """Number of training steps of the judge, with 64 clips each."""

    @property
    def spec(self) -> TaskSpec:
        unknown = [word for word in self.words if word not in ALL_WORDS]
        if unknown or len(set(self.words)) != len(self.words) or len(self.words) < 2:
            what = (
                f"{unknown[0]!r} is no word of Speech Commands" if unknown else "two or more different ones are needed"
            )
            raise ValueError(f"{self.name}: words={', '.join(self.words)}: {what}.")
        if self.num_generated == 1:
            raise ValueError(f"{self.name}: num_generated=1 has no spread to judge; give 0, or 2 or more.")
        return token_spec(LEVELS, self.length)

    @property
    def recordings(self) -> Recordings:
        # Speech Commands contains the digits, so its folder will do where SC09 itself is not in the cache
        source = "speech-commands" if cached_folder(self.source) is None else self.source
        if self.data is None and cached_folder(source) is None:
            source = self.source
        return find_recordings(self.data, self.words, self.name, source)

    @property
    def stand_in(self) -> str:
        recordings = self.recordings
        if self.words != DIGITS:
            return f"{len(recordings.clips)} clips of {len(self.words)} other words, not the digits"
        missing = len(recordings.clips) < CLIPS
        return f"{len(recordings.clips)} clips of the digits; SC09 has {CLIPS}" if missing else ""

    def counts(self) -> dict[str, int]:
        return {split: len(rows) for split, rows in self._rows().items()}

    def reading(self) -> Mapping[str, Any]:
        return {"words": self.words, "length": self.length, "scaling": self.scaling}

    def read(self, folder: Path) -> dict[str, Array]:
        """Levels of the mu-law, uint8 [R, length], and words [R], in the order of the recordings."""
        clips = self.recordings.clips
        levels = np.empty((len(clips), self.length), dtype=np.uint8)
        for row, clip in enumerate(clips):
            samples = np.zeros(self.length, dtype=np.int16)
            heard = read_clip(folder / clip)[: self.length]
            samples[: len(heard)] = heard
            wave = stretched(samples) if self.scaling == "segment" else samples.astype(np.float32) / 2**15
            levels[row] = mu_law(wave)
        targets = np.array([self.words.index(clip.partition("/")[0]) for clip in clips], dtype=np.int8)
        return {"levels": levels, "targets": targets}

    def _rows(self) -> dict[str, Array]:
        recordings = self.recordings
        number = {clip: row for row, clip in enumerate(recordings.clips)}
        splits = clean_splits(recordings)
        return {split: np.array([number[clip] for clip in clips], dtype=np.int64) for split, clips in splits.items()}

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        self.check_split(split)
        yield self.shifted(self.arrays()["levels"][self._rows()[split]])

    def generation(self) -> Generation | None:
        return Generation(self.num_generated, self.temperature, self.first_token) if self.num_generated else None

    def judge(self, clips: torch.Tensor, device: torch.device) -> Iterator[tuple[str, str, float]]:
        """Metrics (split, metric, value) of generated clips [R, length] of levels, of real test clips and of the
        judge."""
        from subquad.tasks.generation import scores
        from subquad.tasks.judge import judged, trained

        arrays, rows = self.arrays(), self._rows()

        def waves(levels: Array) -> torch.Tensor:
            return torch.from_numpy(mu_law_decode(levels).astype(np.float32)).to(device)

        words = torch.from_numpy(arrays["targets"][rows["train"]].astype(np.int64)).to(device)
        real = waves(arrays["levels"][rows["train"]])
        content = f"{self.fingerprint()} {dict(self.reading())}"
        judge = trained(content, real, words, len(self.words), RATE, self.judge_steps)
        of_train, of_test = judged(judge, real), judged(judge, waves(arrays["levels"][rows["test"]]))
        right = of_test[1].argmax(-1) == arrays["targets"][rows["test"]]
        yield "test", "judge_accuracy", float(right.mean())
        for split, found in (("test", of_test), ("generated", judged(judge, waves(clips.cpu().numpy())))):
            for metric, value in scores(of_train, found).items():
                yield split, metric, value
