"""Parts that the tasks on DNA share: tokens, FASTA files that are never loaded whole, and intervals of bases."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from subquad.suite.contracts import Segment
from subquad.tasks.base import Array
from subquad.tasks.data import DataError, cache, needed
from subquad.tasks.data.stored import StoredTask
from subquad.tasks.data.unpack import unpack

BASES = "ACGTN"
"""Tokens 0 to 4. The last one, N, also stands for every other letter of the IUPAC alphabet that leaves the base
open."""
UNKNOWN = BASES.index("N")
MASKED = 8
"""Added to the code of a lower-case letter, which marks a repeat by the convention of soft-masking."""
BREAK, ODD = 254, 255
"""Codes of the end of a line and of every character that FASTA does not allow."""


def _codes() -> Array:
    """The code of every byte: a token, with `MASKED` added in lower case, or `BREAK` or `ODD`."""
    table = np.full(256, ODD, dtype=np.uint8)
    for letter in BASES + "RYSWKMBDHV":
        code = BASES.find(letter) if letter in BASES else UNKNOWN
        table[ord(letter)], table[ord(letter.lower())] = code, code | MASKED
    table[[ord("\n"), ord("\r")]] = BREAK
    return table


CODES = _codes()

SUFFIXES = tuple(kind + packed for kind in (".fa", ".fna", ".fasta", ".fsa") for packed in ("", ".gz"))
SCAN = 1 << 24
"""Number of bytes that are checked at a time."""


def plain(path: Path, key: str) -> Path:
    """The path of a file with random access: the file itself, or the content of a .gz, unpacked once into the cache.

    key: identifies the content of the folder that the file belongs to.
    """
    if path.suffix.lower() != ".gz":
        return path
    name = f"fasta-{hashlib.sha256(f'{key} {path}'.encode()).hexdigest()[:16]}"
    target = cache.place("unpacked", name)
    if not target.is_dir():
        with cache.lock(name):
            if not target.is_dir():
                unpack(path, target)
    return target / path.stem


def _mapped(path: Path) -> Array:
    """The bytes of a file [N], mapped and not read; the mapping is kept until the file changes."""
    seen = path.stat()
    return _map(path, seen.st_size, seen.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _map(path: Path, size: int, changed: int) -> Array:
    # an empty file cannot be mapped; plain arrays, because slicing a memmap costs as much as copying a thousand bytes
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r")) if size else np.empty(0, dtype=np.uint8)


def index(path: Path, told: Path) -> dict[str, Array]:
    """The records of a plain FASTA file, as pyfaidx indexes it. Every letter is checked.

    Gives arrays [R] by name: `name`; `about`, the whole header; `length`, the number of bases; `offset`, the place of
    the first base in the file; `bases` and `bytes`, how many of either a full line has.

    told: the file that a DataError names.
    """
    library = needed("pyfaidx", "reading FASTA", "dna")
    with tempfile.TemporaryDirectory() as folder:
        try:
            records = library.Faidx(str(path), indexname=str(Path(folder) / "index.fai"), read_long_names=True).index
        except (library.FastaIndexingError, ValueError, OSError, RuntimeError) as error:
            reason = " ".join(str(error).split()).replace(str(path), "it")
            if "Unhandled" in reason:
                # pyfaidx asks to be told of it, but several blank lines in a row are the fault of the file
                reason = "several blank lines follow a record or are in it"
            raise DataError(
                f"{told}: no FASTA file that can be indexed ({reason}); correct or fetch it again."
            ) from None
    content, abouts = _mapped(path), []
    for record in records.values():
        about = _header(content, record.offset)
        name = about.split()[0]
        if not record.rlen:
            raise DataError(f"{told}: record {name} is empty; remove it or fetch the file again.")
        num_breaks = (record.rlen - 1) // record.lenc * (record.lenb - record.lenc)
        end, odd = record.offset + record.rlen + num_breaks, -1
        for start in range(record.offset, end, SCAN):
            codes = CODES[content[start : min(start + SCAN, end)]]
            if odd < 0 and (found := np.flatnonzero(codes == ODD)).size:
                odd = start + int(found[0])
            places = (np.flatnonzero(codes == BREAK) + (start - record.offset)) % record.lenb
            num_breaks -= np.count_nonzero(places >= record.lenc)
        # pyfaidx lets the last line of a record be longer than the others
        if num_breaks:
            raise DataError(
                f"{told}: the lines of record {name} differ in length; write {record.lenc} bases into all but the last."
            )
        if odd >= 0:
            raise DataError(
                f"{told}: record {name} holds {chr(content[odd])!r} (byte {odd}), which is no base; allowed are "
                f"{BASES}, RYSWKMBDHV (read as N), lower case. Correct or fetch the file."
            )
        abouts.append(about)
    numbers = np.array([(r.rlen, r.offset, r.lenc, r.lenb) for r in records.values()], dtype=np.int64).T
    columns = dict(zip(("length", "offset", "bases", "bytes"), numbers, strict=True))
    # in some sets of regions only the rest of the header tells two records apart
    return {"name": np.array([about.split()[0] for about in abouts]), "about": np.array(abouts), **columns}


def _header(content: Array, offset: int) -> str:
    """The header in front of the first base of a record. That of pyfaidx is cut off behind a blank line."""
    before = content[max(0, offset - SCAN) : offset].tobytes()
    return before.rstrip(b"\r\n").rpartition(b"\n")[2].removeprefix(b">").decode()


def fasta_in(folder: Path) -> list[Path]:
    """The FASTA files of a folder. A packed file is left out where the plain one lies beside it."""
    shown = cache.files_in(folder, *SUFFIXES) if folder.is_dir() else []
    # a link to a file that is gone is met when it is read
    found = [path for path in shown if not path.is_dir()]
    names = {path.name for path in found}
    return [path for path in found if path.suffix.lower() != ".gz" or path.stem not in names]


def fasta_below(folder: Path) -> list[Path]:
    below = (path for path in folder.rglob("*") if path.is_dir())
    seen = (path for path in below if not any(map(cache.hidden, path.relative_to(folder).parts)))
    folders = sorted({folder, *seen})
    return [path for below in folders for path in fasta_in(below)]


class DNATask(StoredTask):
    """Base class of tasks on FASTA files, which are never loaded whole.

    The cache holds an index (`read`). Rows are cut out of the mapped files when they are needed, so only the rows of a
    batch are in memory. Training rows are an endless stream (`block`).
    """

    reader: ClassVar[int] = 2

    def fasta_files(self, folder: Path) -> list[Path]:
        """The FASTA files, in the order of the index."""
        raise NotImplementedError

    @property
    def fresh(self) -> bool:
        return True

    def encode(self, text: str) -> list[int]:
        """The tokens of a stretch of bases."""
        codes = CODES[np.frombuffer(text.encode(), dtype=np.uint8)] & ~np.uint8(MASKED)
        if (codes >= len(BASES)).any():
            raise ValueError(f"{self.name}: {text!r} is no stretch of bases; give letters of {BASES}.")
        return [int(code) for code in codes]

    def decode(self, tokens: list[int]) -> str:
        """The bases of tokens."""
        return "".join(BASES[token] for token in tokens)

    def records(self, folder: Path) -> dict[str, Array]:
        """The index of all files. Besides the arrays of `index` there is `file`, the number of each record's file."""
        key = cache.folder_hash(folder, self.files(folder))
        parts = []
        for number, path in enumerate(self.fasta_files(folder)):
            part = index(plain(path, key), path)
            parts.append(part | {"file": np.full(len(part["name"]), number, dtype=np.int64)})
        return {f"records.{name}": np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def opened(self) -> tuple[dict[str, Array], list[Array]]:
        """The index and the mapped files, which every process opens once."""
        folder = self.folder
        key = self.fingerprint()
        return _opened(self, key, folder)

    def stretches(self, records: Array, starts: Array, length: int) -> Array:
        """Codes, uint8 [R, length], of stretches that begin at starts [R] of records [R].

        A code is a token, with `MASKED` added in lower case. Where a stretch leaves its record there is N.
        """
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
        """The rows of valid or test, which do not depend on the seed."""
        self.check_split(split)
        if split == "train":
            raise ValueError(f"{self.name}: training data are a stream; use block(seed, index, rows).")
        yield self.evaluation(split)

    def evaluation(self, split: str) -> Segment:
        """The rows of the split `valid` or `test`."""
        raise NotImplementedError


def _cut(content: Array, offset: int, num_bases: int, num_bytes: int, low: int, high: int) -> Array:
    """The letters low to high - 1 of a record that begins at offset, whose lines have num_bases letters in
    num_bytes."""
    first, last = low // num_bases, (high - 1) // num_bases
    at = offset + first * num_bytes
    head, tail = low - first * num_bases, high - last * num_bases
    if first == last:
        return content[at + head : at + tail]
    end = offset + last * num_bytes
    # all lines but the last, which may be short, as one strided array that leaves out the line ends
    lines = np.ndarray((last - first, num_bases), np.uint8, content, at, (num_bytes, 1))
    if last - first == 1:
        return np.concatenate([lines[0, head:], content[end : end + tail]])
    return np.concatenate([lines.reshape(-1)[head:], content[end : end + tail]])


@functools.lru_cache(maxsize=8)
def _opened(task: DNATask, key: str, folder: Path) -> tuple[dict[str, Array], list[Array]]:
    arrays = {name: np.array(array) for name, array in task.arrays().items()}
    return arrays, [_mapped(plain(path, key)) for path in task.fasta_files(folder)]


def covered(records: Array, starts: Array, ends: Array) -> int:
    """Number of bases in the union of intervals, given by record, start and end."""
    total = 0
    for record in np.unique(records):
        here = records == record
        order = starts[here].argsort()
        low, high = starts[here][order], np.maximum.accumulate(ends[here][order])
        before = np.concatenate([low[:1], high[:-1]])
        total += int(np.maximum(high - np.maximum(low, before), 0).sum())
    return total


def shared_bases(intervals: Mapping[str, tuple[Array, Array, Array]]) -> dict[str, int]:
    """Number of bases that the intervals (records, starts, ends) of two splits share, for every pair of splits."""
    result = {}
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        both = [np.concatenate(pair) for pair in zip(intervals[first], intervals[second], strict=True)]
        apart = covered(*intervals[first]) + covered(*intervals[second])
        result[f"bases of {first} & {second}"] = apart - covered(*both)
    return result
