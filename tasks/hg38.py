"""HG38: the next base of the human genome."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from suite.contracts import IGNORE, Segment, TaskSpec
from suite.rng import numpy_generator
from tasks.base import SPLITS, Array
from tasks.data import DataError, cache, find
from tasks.dna import BASES, MASKED, UNKNOWN, DNATask, fasta_in, shared_bases


def _labels(soft_masked: bool) -> bytes:
    """What each token is as a target, as the bytes of int8: none for N, and none for lower case unless it counts."""
    table = np.full(256, IGNORE, dtype=np.int8)
    table[:UNKNOWN] = np.arange(UNKNOWN)
    if soft_masked:
        table[MASKED : MASKED + UNKNOWN] = np.arange(UNKNOWN)
    return table.tobytes()


LABELS = {"upper": _labels(True), "ignore": _labels(False)}
HG38_CHR1 = 248_956_422
"""Bases of chromosome 1 in GRCh38."""
INTERVALS = {"train": 34_021, "valid": 2_213, "test": 1_937}
"""Published intervals of 131,072 bases (Kelley 2020, Avsec et al. 2021)."""


class HG38(DNATask):
    """The next base of the human genome.

        input   A C G T T A G N A    (1024 bases a row, of one interval)
        target  C G T T A G . A .    (the next one; none for N and behind the last)

    Source: Nguyen et al. 2023 (HyenaDNA) and Gu & Dao 2023 (Mamba), appendix E.3.1: 34,021 intervals of 131,072 bases
    train, others validate and test (a BED file with a fourth column `train`, `valid` or `test`). Rows by `rule`:

    `hyenadna`: one a interval. Shorter than the interval, its beginning; longer, the interval extended to both sides.
    `mamba`: all of the interval, in pieces that do not overlap; longer than the interval, two, of which one begins
    with it and one ends with it.

    What lies beyond a chromosome's end is N. An epoch is every row once, in an order by seed and epoch. HyenaDNA
    selects on test (`split_policy: paper`). Sequence-length warm-up is the run's (`train.length_warmup`).

    N is a token but never a target, as in HyenaDNA; the other IUPAC letters count as N. Lower case (soft-masked
    repeats) is read as upper case, or is no target either (`soft_masked: ignore`).

    Departures: 5 tokens in place of HyenaDNA's 12 (its special tokens do not occur) and no end mark behind a row.
    Validation and test take all their intervals or an even choice (`eval_intervals`), by the same rule.

    `data` is a folder with one FASTA and one BED file; `fasta` and `bed` name any other two.
    """

    name: ClassVar[str] = "hg38"
    version: ClassVar[int] = 1
    source: ClassVar[str] = "hg38"
    exponentials: ClassVar[Mapping[str, str]] = {"perplexity": "loss"}
    """Metrics that are exp of the mean of another."""

    fasta: Path | None = None
    """Any genome, with `bed`, in place of the folder `data`."""
    bed: Path | None = None
    """Its intervals: chromosome, start, end, split."""
    length: int = Field(default=1024, ge=2, le=2**20)
    """Bases a row."""
    rule: Literal["hyenadna", "mamba"] = "mamba"
    """Which parts of an interval are rows."""
    soft_masked: Literal["upper", "ignore"] = "upper"
    """`upper`: lower-case bases are bases; `ignore`: they are inputs but no targets."""
    eval_intervals: int | None = Field(default=None, ge=1)
    """How many intervals of valid and of test are used, evenly chosen; default: all."""

    @property
    def spec(self) -> TaskSpec:
        size = len(BASES)
        return TaskSpec("tokens", num_classes=size, readout="token", max_length=self.length, vocab_size=size)

    @property
    def sources(self) -> tuple[str, ...]:
        return () if self.fasta is not None else super().sources

    @property
    def folder(self) -> Path:
        if (self.fasta is None) != (self.bed is None):
            raise DataError(f"{self.name}: fasta and bed belong together; give both, or --data DIR with one of each.")
        if self.fasta is not None and self.bed is not None:
            for path in (self.fasta, self.bed):
                if not path.is_file():
                    raise DataError(f"{self.name}: {path}: there is no such file.")
            return Path(*_common(self.fasta.absolute(), self.bed.absolute()))
        return find(
            self.name,
            self.data,
            self.source,
            ("hg38",),
            lambda path: bool(fasta_in(path)) and bool(cache.files_in(path, ".bed")),
            "one FASTA and one BED file",
        )

    def fasta_files(self, folder: Path) -> list[Path]:
        return [self._pair(folder)[0]]

    def _pair(self, folder: Path) -> tuple[Path, Path]:
        if self.fasta is not None and self.bed is not None:
            return self.fasta.absolute(), self.bed.absolute()
        genomes, beds = fasta_in(folder), cache.files_in(folder, ".bed")
        if len(genomes) != 1 or len(beds) != 1:
            raise DataError(
                f"{self.name}: {folder} holds {len(genomes)} FASTA and {len(beds)} BED files, needs one of each; "
                f"name them with the options fasta and bed."
            )
        return genomes[0], beds[0]

    def files(self, folder: Path) -> list[Path]:
        return list(self._pair(folder))

    def read(self, folder: Path) -> dict[str, Array]:
        genome, bed = self._pair(folder)
        arrays = self.records(folder)
        return arrays | read_intervals(bed, genome, arrays["records.name"], arrays["records.length"])

    @property
    def stand_in(self) -> str:
        arrays, _ = self.opened()
        found = {split: int((arrays["intervals.split"] == i).sum()) for i, split in enumerate(SPLITS)}
        if found == INTERVALS and HG38_CHR1 in arrays["records.length"]:
            return ""
        genome = self._pair(self.folder)[0].name
        return f"{found['train']} intervals of {genome}; the papers train on {INTERVALS['train']} of hg38"

    def plan(self) -> None:
        for split in SPLITS:
            self.rows(split)

    def rows(self, split: str) -> tuple[Array, Array]:
        """Records and starts of all rows of a split."""
        return _hg38_rows(self, self.fingerprint(), split)

    def _rows(self, split: str) -> tuple[Array, Array]:
        arrays, _ = self.opened()
        chosen = np.flatnonzero(arrays["intervals.split"] == SPLITS.index(split))
        if not len(chosen):
            raise DataError(f"{self._pair(self.folder)[1]}: no {split} intervals (fourth column); add some.")
        if split != "train" and self.eval_intervals is not None:
            chosen = chosen[np.unique(np.linspace(0, len(chosen) - 1, self.eval_intervals).round().astype(int))]
        records, starts, ends = (arrays[f"intervals.{name}"][chosen] for name in ("record", "start", "end"))
        sizes = ends - starts
        if self.rule == "hyenadna":
            return records, starts - np.maximum(self.length - sizes, 0) // 2
        pieces = np.where(sizes >= self.length, sizes // self.length, 2)
        rows = np.repeat(np.arange(len(chosen)), pieces)
        number = np.arange(len(rows)) - np.repeat(pieces.cumsum() - pieces, pieces)
        inside = starts[rows] + number * self.length
        around = np.where(number == 0, starts[rows], ends[rows] - self.length)
        return records[rows], np.where(sizes[rows] >= self.length, inside, around)

    def _segment(self, records: Array, starts: Array) -> Segment:
        codes = self.stretches(records, starts, self.length)
        targets = np.full(codes.shape, IGNORE, dtype=np.int8)
        labels = codes[:, 1:].tobytes().translate(LABELS[self.soft_masked])
        targets[:, :-1] = np.frombuffer(labels, dtype=np.int8).reshape(len(codes), -1)
        return Segment(inputs=torch.from_numpy(codes & (MASKED - 1)), targets=torch.from_numpy(targets))

    def evaluation(self, split: str) -> Segment:
        return self._segment(*self.rows("test" if self.split_policy == "paper" else split))

    def block(self, seed: int, index: int, num_rows: int) -> Segment:
        """Rows of the epochs one after the other, each in an order of its own."""
        records, starts = self.rows("train")
        wanted = np.arange(index * num_rows, (index + 1) * num_rows)
        epochs, places = np.divmod(wanted, len(records))
        rows = np.concatenate([_order(seed, int(e), len(records))[places[epochs == e]] for e in np.unique(epochs)])
        return self._segment(records[rows], starts[rows])

    @property
    def epoch_rows(self) -> int:
        """Rows of train that are seen once an epoch."""
        return len(self.rows("train")[0])

    def counts(self) -> dict[str, int]:
        """Rows of every split; of train, in an epoch."""
        return {split: len(self.rows(split)[0]) for split in SPLITS}

    def shared_rows(self) -> dict[str, int]:
        """Bases that two splits share, in place of whole rows."""
        arrays, _ = self.opened()
        columns = [arrays[f"intervals.{name}"] for name in ("record", "start", "end")]
        parts = {split: arrays["intervals.split"] == i for i, split in enumerate(SPLITS)}
        return shared_bases({split: (columns[0][p], columns[1][p], columns[2][p]) for split, p in parts.items()})

    def score(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Also bits a base; perplexity a base is exp of the loss."""
        metrics = super().score(logits, targets)
        total, count = metrics["loss"]
        return metrics | {"bits_per_base": (total / math.log(2), count)}


def _common(first: Path, second: Path) -> tuple[str, ...]:
    """The parts of the folder above both files."""
    shared = []
    for one, two in zip(first.parent.parts, second.parent.parts, strict=False):
        if one != two:
            break
        shared.append(one)
    return tuple(shared)


@functools.lru_cache(maxsize=8)
def _hg38_rows(task: HG38, key: str, split: str) -> tuple[Array, Array]:
    return task._rows(split)


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> Array:
    return numpy_generator(seed, "hg38/order", epoch).permutation(count)


def read_intervals(bed: Path, genome: Path, names: Array, lengths: Array) -> dict[str, Array]:
    """Record, start, end and split of the lines of a BED file; a fault names the line."""
    number = {name: i for i, name in enumerate(names.tolist())}
    twice = {name for name, count in zip(*np.unique(names, return_counts=True), strict=True) if count > 1}
    found = []
    for line, text in enumerate(bed.read_text(errors="replace").splitlines(), start=1):
        words = text.split("\t")
        if not text.strip() or text.startswith(("#", "track", "browser")):
            continue
        where = f"{bed}: line {line}"
        if len(words) < 4 or not (words[1].isdigit() and words[2].isdigit()) or words[3].strip() not in SPLITS:
            raise DataError(
                f"{where} is {text[:60]!r}; needs chromosome, start, end and a split ({', '.join(SPLITS)}), with tabs."
            )
        name, start, end = words[0], int(words[1]), int(words[2])
        if name not in number:
            some = ", ".join(list(number)[:3])
            raise DataError(f"{where}: {genome.name} has no record {name} (it has {some}, ...); use names of one kind.")
        if name in twice:
            raise DataError(f"{where}: {genome.name} has two records {name}; give each a name of its own.")
        size = int(lengths[number[name]])
        if start >= end:
            raise DataError(f"{where}: the interval {start} to {end} is empty; correct the line.")
        if end > size:
            raise DataError(
                f"{where}: {name}:{start}-{end} ends past {name} of {genome.name} ({size:,} bases); the two are of "
                f"different assemblies, give those of one."
            )
        found.append((number[name], start, end, SPLITS.index(words[3].strip())))
    if not found:
        raise DataError(f"{bed}: holds no intervals; fetch it again.")
    columns = np.array(found, dtype=np.int64).T
    return {f"intervals.{name}": columns[i] for i, name in enumerate(("record", "start", "end", "split"))}
