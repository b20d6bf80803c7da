"""LRA Text: whether a film review is positive, read byte by byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import Array, token_dtype
from subquad.tasks.data import DataError, cache
from subquad.tasks.data.stored import ChosenTask
from subquad.tasks.data.tables import labelled_texts, split_tables, unpublished

PAD, END = 0, 1
"""Tokens of padding and of the end mark. These control characters occur in no text, so every byte is its own token."""

VOCAB_SIZE = 256


def pack(texts: Sequence[bytes], length: int) -> tuple[Array, Array]:
    """Texts as rows [R, length] of bytes, and the index of the end mark of each [R].

    A text is cut to length - 1 bytes and followed by `END` and padding. Source: the S4 and DSS loaders, which cut to
    l_max - 1 and append <eos>.
    """
    rows = np.full((len(texts), length), PAD, dtype=np.uint8)
    ends = np.empty(len(texts), dtype=token_dtype(length))
    for row, text in enumerate(texts):
        cut = np.frombuffer(text, dtype=np.uint8)[: length - 1]
        rows[row, : len(cut)] = cut
        rows[row, len(cut)] = END
        ends[row] = len(cut)
    return rows, ends


def sequence_segment(inputs: Array, ends: Array, targets: Array) -> Segment:
    """A segment of padded rows with one label each; ends [R, towers] are the last indices that a readout pools over."""
    return Segment(
        inputs=torch.from_numpy(np.ascontiguousarray(inputs)),
        targets=torch.from_numpy(np.ascontiguousarray(targets, dtype=np.int16)),
        positions=torch.from_numpy(np.ascontiguousarray(ends)),
    )


def table_of(folder: Path, file: str, endings: Sequence[str]) -> Path | None:
    """The table of the release with this name in a folder, with the first of these endings that there is, or None."""
    return next((path for end in endings if (path := folder / f"{file}{end}").is_file()), None)


def tables_of(task: str, folder: Path, files: Iterable[str], endings: Sequence[str]) -> list[Path]:
    """The tables of the release with these names. A DataError names one that is missing."""
    found = []
    for file in files:
        if (path := table_of(folder, file, endings)) is None:
            raise DataError(f"{task}: {file} is not in {folder}; restore it.")
        found.append(path)
    return found


FOLDERS = (("neg", 0), ("pos", 1))
REVIEWS = 12_500
"""Number of reviews in each of the four folders of the official data set."""


def _has_reviews(folder: Path) -> bool:
    return all((folder / split / name).is_dir() for split in ("train", "test") for name, _ in FOLDERS)


def _has_tables(folder: Path) -> bool:
    return all(split_tables(folder, split) for split in ("train", "test"))


class LRAText(ChosenTask):
    """The sentiment of a film review (IMDB) from its bytes, LRA's `Text`.

        input   T h i s _ f i l m _ w a s ... . <end> <pad> <pad>    (bytes, cut to 2048 or 4096)
        target  positive                                             (one label per review, read where it ends)

    Source: Tay et al. 2021, section 2.2. DSS (Gupta et al. 2022) cuts reviews to 2048 bytes, and S4's later
    configuration to 4096 (`length`). The papers have no validation split and select on test (`split_policy: paper`);
    `clean` holds out one training review in ten.

    Folders: the official one, or tables `{train,test}` (parquet as on the hub, CSV, JSON lines) with the columns `text`
    and `label`. The tables of the hub hold the same reviews in another order, so `clean` holds out others.

    Departure: rows are bytes, as in LRA's paper. S4 and DSS read characters that occur 15 times or more, 135 of them.
    """

    name: ClassVar[str] = "lra-text"
    version: ClassVar[int] = 1
    source: ClassVar[str] = "imdb"

    length: int = Field(default=2048, ge=2, le=2**15)
    """Number of bytes of a row, the end mark included: 2048 in DSS, 4096 in S4."""

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec("tokens", num_classes=2, readout="sequence", max_length=self.length, vocab_size=VOCAB_SIZE)

    @property
    def folder(self) -> Path:
        layout = "aclImdb/{train,test}/{pos,neg}/*.txt, or tables {train,test} (parquet, csv, jsonl)"
        names = ("aclImdb", "imdb/aclImdb", "imdb", "plain_text")
        return self.find(names, lambda path: _has_reviews(path) or _has_tables(path), layout)

    def files(self, folder: Path) -> list[Path]:
        if not _has_reviews(folder):
            return [path for split in ("train", "test") for path in split_tables(folder, split)]
        found = []
        for split in ("train", "test"):
            for name, _ in FOLDERS:
                reviews = cache.files_in(folder / split / name, ".txt")
                if not reviews:
                    raise DataError(f"{self.name}: no reviews in {folder / split / name}; restore the folder.")
                found += reviews
        return found

    @property
    def stand_in(self) -> str:
        folder = self.folder
        files = self.files(folder)
        if not _has_reviews(folder):
            return unpublished(files, self.source)
        count = len(files)
        return "" if count == 4 * REVIEWS else f"{count} reviews; the full set has {4 * REVIEWS}"

    def reading(self) -> Mapping[str, Any]:
        return {"length": self.length}

    def read(self, folder: Path) -> dict[str, Array]:
        arrays = {}
        for split in ("train", "test"):
            places, texts, labels = self._reviews(folder, split)
            for place, text in zip(places, texts, strict=True):
                if not text or min(text) <= END:
                    raise DataError(f"{place}: {'empty' if not text else 'holds control characters'}; fetch it again.")
            arrays[f"{split}.inputs"], arrays[f"{split}.ends"] = pack(texts, self.length)
            arrays[f"{split}.targets"] = np.array(labels, dtype=np.int8)
        return arrays

    def _reviews(self, folder: Path, split: str) -> tuple[Sequence[object], list[bytes], list[int]]:
        """Places of the reviews, their texts and their classes; a place names a review in a message."""
        if not _has_reviews(folder):
            tables = split_tables(folder, split)
            texts, labels = labelled_texts(tables, 2)
            return [f"{tables[0]}: row {number}" for number in range(1, len(texts) + 1)], texts, labels
        paths = [path for path in self.files(folder) if path.parent.parent.name == split]
        classes = dict(FOLDERS)
        return paths, [path.read_bytes() for path in paths], [classes[path.parent.name] for path in paths]

    def chosen(self, split: str) -> tuple[str, Array]:
        part = "test" if split == "test" or (split == "valid" and self.split_policy == "paper") else "train"
        rows = np.arange(len(self.arrays()[f"{part}.targets"]))
        if part == "train" and self.split_policy == "clean":
            order = numpy_generator(0, "lra-text/held-out").permutation(len(rows))
            count = len(rows) // 10
            rows = np.sort(order[:count] if split == "valid" else order[count:])
        return part, rows

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        inputs, ends, targets = self.selected(split, "inputs", "ends", "targets")
        yield sequence_segment(inputs, ends[:, None], targets)
