"""Tasks whose rows come from files, which are read once and then kept in the cache as arrays."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from subquad.suite.contracts import PreparedTask, Segment
from subquad.suite.plugins import identity_of
from subquad.tasks.base import SPLITS, Array, TaskBase
from subquad.tasks.data import cache, find
from subquad.tasks.data.faults import DataError

_planned: set[str] = set()
"""Tasks, with their content, that this process has checked (`StoredTask.plan`)."""


class StoredTask(TaskBase, PreparedTask):
    """A task with one fixed set of rows, which does not depend on the seed of a run.

    A derived task gives `files` (what it reads in `folder`) and `read` (the arrays made of them). The arrays are kept
    in the cache under a key of content and options, and `segments` selects the rows of the splits from them. Files are
    read while runs are planned, so that damage is found before any run starts.
    """

    source: ClassVar[str] = ""
    """Name of the source in the manifest; empty where the user must name a folder."""
    reader: ClassVar[int] = 1
    """Raised whenever `read` or `generate` makes other arrays of the same content."""
    data: Path | None = None
    """A folder with the official layout, or one above it. Default: the folder in the cache (`data prepare`)."""

    @property
    def generated(self) -> bool:
        """Whether the rows are generated instead of read."""
        return False

    @property
    def prepared_by(self) -> str:
        """The arguments of `data prepare` that fetch what these options read, for messages."""
        return self.name

    @property
    def folder(self) -> Path:
        """The folder with the files. A DataError says what is missing."""
        raise NotImplementedError

    def find(self, below: Sequence[str], holds: Callable[[Path], bool], layout: str) -> Path:
        """The folder with the official layout, from `data` or the cache (`tasks.data.find`)."""
        return find(self.name, self.data, self.source, below, holds, layout, self.prepared_by)

    def files(self, folder: Path) -> list[Path]:
        """The files of this folder that are read."""
        raise NotImplementedError

    def read(self, folder: Path) -> dict[str, Array]:
        """The arrays made of these files by name, in their smallest dtypes."""
        raise NotImplementedError

    def generate(self, workers: int) -> dict[str, Array]:
        """The generated arrays by name. Their bytes do not depend on the number of worker processes."""
        raise NotImplementedError

    def reading(self) -> Mapping[str, Any]:
        """The options on which `read` and `generate` depend."""
        return {}

    def plan(self) -> None:
        """Makes the arrays of files, and asserts that every split has a row.

        A derived task checks, instead or as well, that its options go with the content.
        """
        # before anything is read, where files can be counted
        for split, count in self.counts().items():
            if not count:
                raise DataError(f"{self.name}: {self.folder} leaves no row for the {split} split; add data.")
        self.arrays()

    def _hash_of_files(self) -> str:
        folder = self.folder
        return cache.folder_hash(folder, self.files(folder))

    def _key(self, content: str) -> str:
        return f"{self.name} {self.model_dump_json()} {content} {cache.root()}"

    def fingerprint(self) -> str:
        if self.generated:
            return "generated"
        content = self._hash_of_files()
        key = self._key(content)
        if key not in _planned:
            # added first, because what follows asks for the fingerprint itself
            _planned.add(key)
            try:
                # raises where options contradict each other or need what is missing
                _ = self.spec
                self.plan()
            except BaseException:
                _planned.discard(key)
                raise
        return content

    def arrays(self, workers: int = 1, *, force: bool = False) -> dict[str, Array]:
        """The arrays by name: mapped from the cache, or else made now and kept there.

        force: make them in any case. The ones that are there stay until the new ones are complete.
        """
        if force and not self.generated:
            # the stored arrays may be damaged, so they are made again before a plan reads them
            key = self._key(self._hash_of_files())
            _planned.add(key)
            try:
                made = self._stored_arrays(workers, force)
            finally:
                _planned.discard(key)
            self.fingerprint()
            return made
        return self._stored_arrays(workers, force)

    def _read_unchanged(self, content: str) -> dict[str, Array]:
        """Reads the files that have this fingerprint. DataError where they change meanwhile."""
        folder = self.folder
        before = self._hash_of_files()
        made = self.read(folder)
        if self._hash_of_files() != before or self.fingerprint() != content:
            raise DataError(f"{folder}: a file changed while it was read; wait until it is complete, and start again.")
        return made

    def _stored_arrays(self, workers: int, force: bool) -> dict[str, Array]:
        facts: dict[str, Any] = {
            "task": self.name,
            "reader": self.reader,
            "content": self.fingerprint(),
            "options": dict(self.reading()),
        }
        module = type(self).__module__
        if not module.startswith("subquad."):
            # whoever edits `read` in a file of their own need not raise a number
            facts["code"] = identity_of(sys.modules[module])
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        target = cache.place("prepared", f"{self.name}-{key}")
        if force or not target.is_dir():
            with cache.lock(f"prepared-{self.name}-{key}"):
                # another process may have made it while this one waited for the lock
                if force or not target.is_dir():
                    made = self.generate(workers) if self.generated else self._read_unchanged(facts["content"])
                    with cache.new_folder(target) as temporary:
                        for name, array in made.items():
                            np.save(temporary / f"{name}.npy", array, allow_pickle=False)
                        digest = cache.content_hash(temporary, sorted(temporary.glob("*.npy")))
                        cache.write_json(temporary / "facts.json", {**facts, "arrays": digest})
        files = sorted(target.glob("*.npy"))
        known = cache.read_json(target / "facts.json")
        try:
            # older versions kept no digest of the arrays
            if not known or ("arrays" in known and known["arrays"] != cache.folder_hash(target, files)):
                raise ValueError("the arrays are not those that were made")
            return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in files}
        except (OSError, ValueError) as error:
            raise DataError(f"{target}: damaged ({error}); call `data prepare --force`.") from None

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that must be in the cache; none where `data` names a folder or the rows are generated."""
        return () if self.generated or self.data is not None or not self.source else (self.source,)

    def verify(self, workers: int = 1) -> None:
        """Makes the arrays again and compares them with those in the cache. A difference is a DataError."""
        folder = None if self.generated else self.folder
        if folder is not None:
            before = self.fingerprint()
            if cache.folder_hash(folder, self.files(folder), fresh=True) != before:
                raise DataError(f"{folder}: a file has other content than when it was prepared; prepare again.")
        kept = self.arrays(workers)
        made = self.generate(workers) if folder is None else self.read(folder)
        for name, array in made.items():
            if name not in kept or not np.array_equal(kept[name], array):
                raise DataError(
                    f"{self.name}: {name} in the cache differs from what its source gives; call `data prepare --force`."
                )

    def counts(self) -> dict[str, int]:
        """Number of rows of every split."""
        return {split: sum(len(segment) for segment in self.segments(split, 0)) for split in SPLITS}


class ChosenTask(StoredTask):
    """A stored task whose splits are rows of its arrays, so that they can be counted without making any."""

    def chosen(self, split: str) -> tuple[str, Array]:
        """The name before those of the arrays, such as `train`, and the rows of a split in them: by default all."""
        return split, np.arange(len(self.arrays()[f"{split}.targets"]))

    def selected(self, split: str, *names: str) -> list[Array]:
        """The rows of a split in the arrays of these names."""
        self.check_split(split)
        part, rows = self.chosen(split)
        arrays = self.arrays()
        return [arrays[f"{part}.{name}" if part else name][rows] for name in names]

    def counts(self) -> dict[str, int]:
        return {split: len(self.chosen(split)[1]) for split in SPLITS}


def _row_hashes(segments: list[Segment]) -> list[bytes]:
    """A hash of the inputs of every row."""
    return [
        hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=16).digest()
        for segment in segments
        for row in segment.inputs.numpy()
    ]


@runtime_checkable
class TellsLeakage(Protocol):
    """A task with its own count of the data that its splits share, because its training rows are an endless stream."""

    def shared_rows(self) -> dict[str, int]:
        """Amount of data that each pair of splits shares, such as a number of bases."""
        ...


def leakage(task: TaskBase) -> dict[str, int]:
    """Number of rows of a later split whose inputs are also in an earlier one, and of rows that train repeats.

    `{"train & valid": 3, ...}` counts rows of the second split, not pairs of rows. A task that is
    `TellsLeakage` gives its own counts.
    """
    if isinstance(task, TellsLeakage):
        return task.shared_rows()
    hashes = {split: _row_hashes(list(task.segments(split, 0))) for split in SPLITS}
    known = {split: set(found) for split, found in hashes.items()}
    result = {"repeats in train": len(hashes["train"]) - len(known["train"])}
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        result[f"{first} & {second}"] = sum(row in known[first] for row in hashes[second])
    return result
