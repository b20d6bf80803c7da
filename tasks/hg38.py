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

from subquad.suite.bounds import Size
from subquad.suite.contracts import IGNORE, Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import SPLITS, Array, token_spec
from subquad.tasks.data import DataError, cache
from subquad.tasks.dna import BASES, MASKED, UNKNOWN, DNATask, fasta_in, shared_bases


def _labels(soft_masked: bool) -> bytes:
    """The target of every code, as a table of 256 bytes (int8).

    N is no target, and neither is a lower-case letter unless `soft_masked` is set.
    """
    table = np.full(256, IGNORE, dtype=np.int8)
    table[:UNKNOWN] = np.arange(UNKNOWN)
    if soft_masked:
        table[MASKED : MASKED + UNKNOWN] = np.arange(UNKNOWN)
    return table.tobytes()


LABELS = {"upper": _labels(True), "ignore": _labels(False)}
HG38_CHR1 = 248_956_422
"""Number of bases of chromosome 1 in GRCh38, by which the real genome is recognised."""
INTERVALS = {"train": 34_021, "valid": 2_213, "test": 1_937}
"""Number of published intervals of 131,072 bases (Kelley 2020, Avsec et al. 2021)."""


class HG38(DNATask):
    """The next base of the human genome.

        input   A C G T T A G N A    (1024 bases per row, all of one interval)
        target  C G T T A G . A .    (the next one; none for N and behind the last)

    Source: Nguyen et al. 2023 (HyenaDNA) and Gu & Dao 2023 (Mamba), appendix E.3.1: 34,021 intervals of 131,072 bases
    are for training, and others for validation and testing. They come from a BED file whose fourth column is `train`,
    `valid` or `test`. The option `rule` decides how intervals become rows:

    - `hyenadna`: every interval is one row. A row that is shorter than the interval is its beginning; a row that is
      longer extends the interval to both sides.
    - `mamba`: the whole interval, in pieces that do not overlap; what fills no piece is left out. Where a row is longer
      than the interval, there are two rows, of which one begins with the interval and one ends with it.

    Beyond the end of a chromosome there is N. An epoch has every row once, in an order that depends on seed and epoch.
    HyenaDNA selects on test (`split_policy: paper`). Warm-up of the sequence length is an option of the run
    (`train.length_warmup`).

    N is a token but never a target, as in HyenaDNA; the other IUPAC letters count as N. Lower case (soft-masked
    repeats) is read as upper case, or is no target either (`soft_masked: ignore`).

    Departures: there are 5 tokens in place of HyenaDNA's 12, whose special tokens do not occur, and no end mark behind
    a row. Validation and testing use all their intervals or an even choice of them (`eval_intervals`), by the same
    rule.

    `data` is a folder with one FASTA and one BED file; `fasta` and `bed` name any other two files.
    """

    name: ClassVar[str] = "hg38"
    version: ClassVar[int] = 1
    source: ClassVar[str] = "hg38"
    exponentials: ClassVar[Mapping[str, str]] = {"perplexity": "loss"}
    """Metrics that are the exponential of the mean of another one, by name."""

    fasta: Path | None = None
    """A FASTA file with any genome, which together with `bed` replaces the folder `data`."""
    bed: Path | None = None
    """A BED file with intervals of that genome: chromosome, start, end and split."""
    length: int = Field(default=1024, ge=2, le=2**20)
    """Number of bases of a row."""
    rule: Literal["hyenadna", "mamba"] = "mamba"
    """Selects the parts of an interval that are rows."""
    soft_masked: Literal["upper", "ignore"] = "upper"
    """`upper`: lower-case bases are like others. `ignore`: they are inputs but no targets."""
    eval_intervals: Size | None = None
    """Number of intervals of valid and of test that are used, chosen evenly. None: all of them."""

    @property
    def spec(self) -> TaskSpec:
        return token_spec(len(BASES), self.length)

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

        def holds(path: Path) -> bool:
            return bool(fasta_in(path)) and bool(cache.files_in(path, ".bed"))

        return self.find(("hg38",), holds, "one FASTA and one BED file")

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
        """Record and start of every row of a split."""
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
        """Rows of one epoch after the other, each epoch in an order of its own."""
        records, starts = self.rows("train")
        wanted = np.arange(index * num_rows, (index + 1) * num_rows)
        epochs, places = np.divmod(wanted, len(records))
        rows = np.concatenate([_order(seed, int(e), len(records))[places[epochs == e]] for e in np.unique(epochs)])
        return self._segment(records[rows], starts[rows])

    @property
    def epoch_rows(self) -> int:
        """Number of training rows, each of which is seen once per epoch."""
        return len(self.rows("train")[0])

    def counts(self) -> dict[str, int]:
        """Number of rows of every split; for train, in an epoch."""
        return {split: len(self.rows(split)[0]) for split in SPLITS}

    def shared_rows(self) -> dict[str, int]:
        """Number of bases that the rows of two splits share, for every pair of splits."""
        sizes = self.opened()[0]["records.length"]
        parts = {}
        for split in SPLITS:
            records, starts = self.rows(split)
            # rows that are longer than their intervals leave them, and the record too
            parts[split] = (records, np.maximum(starts, 0), np.minimum(starts + self.length, sizes[records]))
        return shared_bases(parts)

    def score(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The metrics of every task, and bits per base. Perplexity per base is the exponential of the loss."""
        metrics = super().score(logits, targets)
        total, count = metrics["loss"]
        return metrics | {"bits_per_base": (total / math.log(2), count)}


def _common(first: Path, second: Path) -> tuple[str, ...]:
    """The parts of the path of the folder that contains both files."""
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
    """Record, start, end and split of every line of a BED file. A DataError names the line that is wrong.

    names, lengths [R]: name and number of bases of the records of the genome.
    """
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
