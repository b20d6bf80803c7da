"""DNA: the next base of a genome, and which species a stretch of DNA is of."""

from __future__ import annotations

import functools
import hashlib
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from suite.contracts import IGNORE, Segment, TaskSpec
from suite.rng import numpy_generator
from tasks.base import SPLITS, Array
from tasks.data import DataError, cache, find, sources
from tasks.data import folder as cached_folder
from tasks.data.stored import PlannedTask
from tasks.data.unpack import unpack

BASES = "ACGTN"
"""Tokens 0 to 4. N, and every other letter of the IUPAC alphabet that leaves the base open, is the last."""
UNKNOWN = BASES.index("N")
MASKED = 8
"""Added to the token of a lower-case letter: a repeat, by the convention of soft-masking."""
BREAK, ODD = 254, 255


def _codes() -> Array:
    table = np.full(256, ODD, dtype=np.uint8)
    for letter in BASES + "RYSWKMBDHV":
        code = BASES.find(letter) if letter in BASES else UNKNOWN
        table[ord(letter)], table[ord(letter.lower())] = code, code | MASKED
    table[[ord("\n"), ord("\r")]] = BREAK
    return table


CODES = _codes()

SUFFIXES = tuple(kind + packed for kind in (".fa", ".fna", ".fasta", ".fsa") for packed in ("", ".gz"))
SCAN = 1 << 24
"""Bytes looked at at a time."""


def _pyfaidx() -> Any:
    try:
        import pyfaidx
    except ImportError:
        raise DataError("reading FASTA needs pyfaidx; install the extra: pip install -e '.[dna]'.") from None
    return pyfaidx


def plain(path: Path, key: str) -> Path:
    """The file itself, or what is in a .gz, unpacked once into the cache: only plain text has random access."""
    if path.suffix != ".gz":
        return path
    name = f"fasta-{hashlib.sha256(f'{key} {path}'.encode()).hexdigest()[:16]}"
    target = cache.place("unpacked", name)
    if not target.is_dir():
        with cache.lock(name):
            if not target.is_dir():
                unpack(path, target)
    return target / path.name.removesuffix(".gz")


def _mapped(path: Path) -> Array:
    seen = path.stat()
    return _map(path, seen.st_size, seen.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _map(path: Path, size: int, changed: int) -> Array:
    # an empty file cannot be mapped
    # plain arrays: slicing a memmap costs as much as copying a thousand bytes
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r")) if size else np.empty(0, dtype=np.uint8)


def index(path: Path, told: Path) -> dict[str, Array]:
    """The records of a plain FASTA file, as pyfaidx indexes it, after a look at every letter.

    name, about [R] text (the whole header); length [R] bases; offset [R], where in the file the first of them is;
    bases, bytes [R] of a full line. told: the file to name in faults.
    """
    library = _pyfaidx()
    with tempfile.TemporaryDirectory() as folder:
        try:
            records = library.Faidx(str(path), indexname=str(Path(folder) / "index.fai"), read_long_names=True).index
        except (library.FastaIndexingError, ValueError, OSError) as error:
            reason = " ".join(str(error).split()).replace(str(path), "it")
            raise DataError(
                f"{told}: no FASTA file that can be indexed ({reason}); correct or fetch it again."
            ) from None
    content = _mapped(path)
    for name, record in records.items():
        if not record.rlen:
            raise DataError(f"{told}: record {name.split()[0]} is empty; remove it or fetch the file again.")
        for start in range(record.offset, record.bend, SCAN):
            part = content[start : min(start + SCAN, record.bend)]
            odd = np.flatnonzero(CODES[part] == ODD)
            if len(odd):
                raise DataError(
                    f"{told}: record {name.split()[0]} holds {chr(part[odd[0]])!r} (byte {start + int(odd[0])}), which "
                    f"is no base; allowed are {BASES}, RYSWKMBDHV (read as N), lower case. Correct or fetch the file."
                )
    numbers = np.array([(r.rlen, r.offset, r.lenc, r.lenb) for r in records.values()], dtype=np.int64).T
    columns = dict(zip(("length", "offset", "bases", "bytes"), numbers, strict=True))
    # in some sets of regions only the rest of the header tells two records apart
    return {"name": np.array([name.split()[0] for name in records]), "about": np.array(list(records)), **columns}


def _fasta_in(folder: Path) -> list[Path]:
    """FASTA files, a plain one before its packed copy."""
    found = [path for path in cache.files_in(folder, *SUFFIXES) if path.is_file()] if folder.is_dir() else []
    names = {path.name for path in found}
    return [path for path in found if path.suffix != ".gz" or path.stem not in names]


def _fasta_below(folder: Path) -> list[Path]:
    folders = sorted({folder, *(path for path in folder.rglob("*") if path.is_dir())})
    return [path for below in folders for path in _fasta_in(below)]


class DNATask(PlannedTask):
    """What the tasks of this file share: FASTA files that are never loaded whole.

    The cache holds an index (`read`); rows are cut out of the mapped files when they are asked for, so memory is that
    of the rows in hand. Training rows are an endless stream (`block`).
    """

    def fasta_files(self, folder: Path) -> list[Path]:
        """The FASTA files, in the order of the index."""
        raise NotImplementedError

    @property
    def fresh(self) -> bool:
        return True

    def records(self, folder: Path) -> dict[str, Array]:
        """The index of all files, with `file`, the number of each record's file."""
        key = cache.folder_hash(folder, self.files(folder))
        parts = []
        for number, path in enumerate(self.fasta_files(folder)):
            part = index(plain(path, key), path)
            parts.append(part | {"file": np.full(len(part["name"]), number, dtype=np.int64)})
        return {f"records.{name}": np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def opened(self) -> tuple[dict[str, Array], list[Array]]:
        """The index and the mapped files, looked up once a process."""
        folder = self.folder
        key = self.fingerprint()
        return _opened(self, key, folder)

    def stretches(self, records: Array, starts: Array, length: int) -> Array:
        """uint8 [R, length]: tokens, `MASKED` added in lower case; N where a stretch leaves its record."""
        arrays, files = self.opened()
        letters = np.full((len(records), length), ord("N"), dtype=np.uint8)
        names = ("file", "length", "offset", "bases", "bytes")
        facts = np.stack([arrays[f"records.{name}"][records] for name in names], axis=1).tolist()
        for row, ((file, size, offset, num_bases, num_bytes), start) in enumerate(
            zip(facts, starts.tolist(), strict=True)
        ):
            low, high = max(start, 0), min(start + length, size)
            if low >= high:
                continue
            letters[row, low - start : high - start] = _cut(files[file], offset, num_bases, num_bytes, low, high)
        codes = np.frombuffer(letters.tobytes().translate(CODES.tobytes()), dtype=np.uint8)
        return codes.reshape(letters.shape)

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        """valid and test are one fixed set of rows; every seed has the same."""
        self.check_split(split)
        if split == "train":
            raise ValueError(f"{self.name}: training data are a stream; use block(seed, index, rows).")
        yield self.evaluation(split)

    def evaluation(self, split: str) -> Segment:
        """The rows of valid or test."""
        raise NotImplementedError


def _cut(content: Array, offset: int, num_bases: int, num_bytes: int, low: int, high: int) -> Array:
    """The letters low to high of a record that begins at offset, in lines of num_bases letters and num_bytes bytes."""
    first, last = low // num_bases, (high - 1) // num_bases
    at = offset + first * num_bytes
    head, tail = low - first * num_bases, high - last * num_bases
    if first == last:
        return content[at + head : at + tail]
    end = offset + last * num_bytes
    # all lines but the last, which may be short where the file ends, as one array whose view leaves out their ends
    lines = np.ndarray((last - first, num_bases), np.uint8, content, at, (num_bytes, 1))
    if last - first == 1:
        return np.concatenate([lines[0, head:], content[end : end + tail]])
    return np.concatenate([lines.reshape(-1)[head:], content[end : end + tail]])


@functools.lru_cache(maxsize=8)
def _opened(task: DNATask, key: str, folder: Path) -> tuple[dict[str, Array], list[Array]]:
    arrays = {name: np.array(array) for name, array in task.arrays().items()}
    return arrays, [_mapped(plain(path, key)) for path in task.fasta_files(folder)]


def covered(records: Array, starts: Array, ends: Array) -> int:
    """Bases in the union of intervals."""
    total = 0
    for record in np.unique(records):
        here = records == record
        order = starts[here].argsort()
        low, high = starts[here][order], np.maximum.accumulate(ends[here][order])
        before = np.concatenate([low[:1], high[:-1]])
        total += int(np.maximum(high - np.maximum(low, before), 0).sum())
    return total


def shared_bases(intervals: Mapping[str, tuple[Array, Array, Array]]) -> dict[str, int]:
    """Bases that the intervals (records, starts, ends) of two splits both hold."""
    result = {}
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        both = [np.concatenate(pair) for pair in zip(intervals[first], intervals[second], strict=True)]
        apart = covered(*intervals[first]) + covered(*intervals[second])
        result[f"bases of {first} & {second}"] = apart - covered(*both)
    return result


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
            lambda path: bool(_fasta_in(path)) and bool(cache.files_in(path, ".bed")),
            "one FASTA and one BED file",
        )

    def fasta_files(self, folder: Path) -> list[Path]:
        return [self._pair(folder)[0]]

    def _pair(self, folder: Path) -> tuple[Path, Path]:
        if self.fasta is not None and self.bed is not None:
            return self.fasta.absolute(), self.bed.absolute()
        genomes, beds = _fasta_in(folder), cache.files_in(folder, ".bed")
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


GROUPS = {
    "five-species": ("human", "lemur", "mouse", "pig", "hippo"),
    "great-apes": ("human", "chimpanzee", "gorilla", "orangutan", "bonobo"),
}
VALID_CHROMOSOMES = frozenset(("1", "3", "12", "13"))
TEST_CHROMOSOMES = frozenset(("5", "7", "9", "10", "11"))
"""Of every species; all its other chromosomes train (HyenaDNA)."""
WHOLE_GENOME = 1_000_000_000
"""A mammal has two to four times as many bases, so less is a part of one."""


def chromosome(name: str, about: str, stem: str) -> str:
    """Which chromosome a record is, e.g. `2A` or `X`: by its name, its header or (alone in a file) the file's name.

    Empty for what is placed on none: mitochondria, scaffolds, patches.
    """
    if found := re.fullmatch(r"(?:chr)?(\d{1,2}[AB]?|[XYZW])", name, re.IGNORECASE):
        return found[1].upper()
    if found := re.search(r"\bchromosome:? (\d{1,2}[AB]?|[XYZW])\b(?! unlocalized)", about):
        return found[1].upper()
    if found := re.fullmatch(r"chr(\d{1,2}[AB]?|[XYZW])", stem, re.IGNORECASE):
        return found[1].upper()
    return ""


@functools.lru_cache(maxsize=8)
def _regions(task: Species, key: str, split: str) -> list[Array]:
    return task._regions(split)


class Species(DNATask):
    """Which species a stretch of DNA is of.

        input   A C G T T A G N A    (1024 bases, from anywhere in a chromosome)
        target  lemur                (one label a row; one of five species)

    Source: Nguyen et al. 2023 (HyenaDNA), section 4.4: human, lemur, mouse, pig, hippo; Gu & Dao 2023 (Mamba),
    section 4.3.3 and appendix E.3.4: the great apes (`group: great-apes`); `species` names any others. A row takes a
    species, one of its chromosomes and a place in it, each uniformly. Training rows are an endless stream.
    Chromosomes 1, 3, 12 and 13 validate, 5, 7, 9, 10 and 11 test, the others train, in every species
    (`split_by: chromosome`); where there are few records, the first 80 % of each train, and a tenth each validates and
    tests (`split_by: position`, of ours).

    N is a token; lower case is read as upper case; other IUPAC letters count as N. What is placed on no chromosome is
    left out, and so are chromosomes shorter than a row.

    Departures: HyenaDNA draws validation and test rows anew at every epoch; here `num_eval` rows are drawn once. It
    cuts a row where the chromosome ends and pads it with N; here a row ends there at the latest. Mamba does not name
    its assemblies of the apes: those of the manifest are UCSC's of 2018 to 2020.

    Folder: `<species>/` with FASTA files below it (one a chromosome or a whole genome), or files `<species>.*`.
    """

    name: ClassVar[str] = "species"
    version: ClassVar[int] = 1

    group: Literal["five-species", "great-apes"] = "five-species"
    """Whose set of species."""
    species: tuple[str, ...] = ()
    """Any species, in the order of their classes; empty: those of `group`."""
    length: int = Field(default=1024, ge=2, le=2**20)
    """Bases a row."""
    split_by: Literal["chromosome", "position"] = "chromosome"
    """`chromosome`: as HyenaDNA; `position`: each record is cut in three."""
    num_eval: int = Field(default=1000, ge=1)
    """Rows of valid and of test."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.species or GROUPS[self.group]

    @property
    def spec(self) -> TaskSpec:
        kinds = self.kinds
        if len(kinds) < 2 or len(set(kinds)) < len(kinds):
            raise ValueError(f"{self.name}: species={', '.join(kinds)}; give two or more different ones.")
        return TaskSpec("tokens", len(kinds), readout="sequence", max_length=self.length, vocab_size=len(BASES))

    @property
    def sources(self) -> tuple[str, ...]:
        if self.data is not None:
            return ()
        names = tuple(f"species-{kind}" for kind in self.kinds)
        unknown = [kind for kind, name in zip(self.kinds, names, strict=True) if name not in sources()]
        if unknown:
            raise DataError(
                f"{self.name}: no source is known for {unknown[0]!r}; give --data DIR with {unknown[0]}/*.fa."
            )
        return names

    @property
    def folder(self) -> Path:
        if self.data is None:
            for name in self.sources:
                if cached_folder(name) is None:
                    raise DataError(
                        f"{self.name}: {name} is not in the cache; call `python run_suite.py data prepare "
                        f"{self.name}`, or give --data DIR (a folder of FASTA files a species)."
                    )
            return cache.place("unpacked")
        return find(
            self.name,
            self.data,
            "",
            ("species",),
            lambda path: any(self._of(path, kind) for kind in self.kinds),
            f"FASTA files {self.kinds[0]}/*.fa or {self.kinds[0]}.*.fa (also .fna, .fasta, .gz)",
        )

    def _of(self, folder: Path, kind: str) -> list[Path]:
        """The files of a species."""
        base = cached_folder(f"species-{kind}") if self.data is None else folder / kind
        if base is not None and base.is_dir():
            return _fasta_below(base)
        return [path for path in _fasta_below(folder) if path.name.startswith(f"{kind}.")]

    def fasta_files(self, folder: Path) -> list[Path]:
        found = []
        for kind in self.kinds:
            files = self._of(folder, kind)
            if not files:
                raise DataError(
                    f"{self.name}: no FASTA file of {kind} in {folder / kind} or as {kind}.*.fa below {folder}; add "
                    f"it, or leave {kind} out of the option species."
                )
            found += files
        return found

    def files(self, folder: Path) -> list[Path]:
        return self.fasta_files(folder)

    def reading(self) -> Mapping[str, Any]:
        return {"species": self.kinds}

    def read(self, folder: Path) -> dict[str, Array]:
        arrays = self.records(folder)
        kinds = [number for number, kind in enumerate(self.kinds) for _ in self._of(folder, kind)]
        stems = [path.name.partition(".")[0] for path in self.fasta_files(folder)]
        file = arrays["records.file"]
        alone = np.bincount(file)[file] == 1
        labels = [
            chromosome(str(name), str(about), stems[number] if single else "")
            for name, about, number, single in zip(
                arrays["records.name"], arrays["records.about"], file, alone, strict=True
            )
        ]
        return arrays | {
            "records.species": np.array(kinds, dtype=np.int64)[file],
            "records.chromosome": np.array(labels),
        }

    @property
    def stand_in(self) -> str:
        arrays, _ = self.opened()
        sizes = [int(arrays["records.length"][arrays["records.species"] == i].sum()) for i in range(len(self.kinds))]
        small = [i for i, size in enumerate(sizes) if size < WHOLE_GENOME]
        if small:
            return f"{sizes[small[0]]} bases of {self.kinds[small[0]]}, not a whole genome"
        if set(self.kinds) not in map(set, GROUPS.values()):
            return "species of the user's choice"
        return "split by position, the source splits by chromosome" if self.split_by == "position" else ""

    def plan(self) -> None:
        for split in SPLITS:
            self.regions(split)

    def regions(self, split: str) -> list[Array]:
        """[K, 3] record, start, end of each species: where rows of a split may lie."""
        return _regions(self, self.fingerprint(), split)

    def _regions(self, split: str) -> list[Array]:
        arrays, _ = self.opened()
        species, size = arrays["records.species"], arrays["records.length"]
        records = np.arange(len(size))
        if self.split_by == "position":
            cuts = (0, 8, 9, 10)
            number = SPLITS.index(split)
            table = np.stack([records, size * cuts[number] // 10, size * cuts[number + 1] // 10], axis=1)
        else:
            held = {"valid": VALID_CHROMOSOMES, "test": TEST_CHROMOSOMES}
            apart = VALID_CHROMOSOMES | TEST_CHROMOSOMES
            labels = arrays["records.chromosome"].tolist()
            chosen = [
                bool(label) and (label in held[split] if split in held else label not in apart) for label in labels
            ]
            table = np.stack([records, np.zeros_like(size), size], axis=1)[np.array(chosen, dtype=bool)]
        table = table[table[:, 2] - table[:, 1] >= self.length]
        parts = [table[species[table[:, 0]] == number] for number in range(len(self.kinds))]
        for kind, part in zip(self.kinds, parts, strict=True):
            if not len(part):
                hint = "" if self.split_by == "position" else ", or take split_by: position"
                raise DataError(
                    f"{self.name}: {kind} has no {split} {self.split_by} of {self.length} bases or more; lower length, "
                    f"add chromosomes{hint}."
                )
        return parts

    def _draw(self, rng: np.random.Generator, regions: list[Array], count: int) -> tuple[Array, Array, Array]:
        """Classes, records and starts of rows."""
        kinds = rng.integers(0, len(regions), count)
        which, where = rng.random(count), rng.random(count)
        counts = np.array([len(part) for part in regions])
        first = counts.cumsum() - counts
        chosen = np.concatenate(regions)[first[kinds] + (which * counts[kinds]).astype(np.int64)]
        free = chosen[:, 2] - chosen[:, 1] - self.length + 1
        return kinds, chosen[:, 0], chosen[:, 1] + (where * free).astype(np.int64)

    def _segment(self, kinds: Array, records: Array, starts: Array) -> Segment:
        inputs = self.stretches(records, starts, self.length) & (MASKED - 1)
        return Segment(inputs=torch.from_numpy(inputs), targets=torch.from_numpy(kinds.astype(np.int16)))

    def evaluation(self, split: str) -> Segment:
        # the source has a validation split of its own under either policy
        return self._segment(*self._draw(numpy_generator(0, f"species/{split}"), self.regions(split), self.num_eval))

    def block(self, seed: int, index: int, num_rows: int) -> Segment:
        """Places are drawn `CHUNK` at a time, so that row i is the same whatever the size of the blocks."""
        regions = self.regions("train")
        start, stop = index * num_rows, (index + 1) * num_rows
        parts = [
            self._draw(numpy_generator(seed, "species/train", chunk), regions, CHUNK)
            for chunk in range(start // CHUNK, -(-stop // CHUNK))
        ]
        offset = start % CHUNK
        kinds, records, starts = (
            np.concatenate(column)[offset : offset + num_rows] for column in zip(*parts, strict=True)
        )
        return self._segment(kinds, records, starts)

    def counts(self) -> dict[str, int]:
        """Rows of valid and test; those of train are endless."""
        return {split: len(self.evaluation(split)) for split in SPLITS[1:]}

    def shared_rows(self) -> dict[str, int]:
        """Bases that two splits share, in place of whole rows."""
        parts = {split: np.concatenate(self.regions(split)) for split in SPLITS}
        return shared_bases({split: (part[:, 0], part[:, 1], part[:, 2]) for split, part in parts.items()})


CHUNK = 256
"""Places drawn from one generator."""
