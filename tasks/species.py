"""Species: which species a stretch of DNA comes from."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from subquad.suite.bounds import Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.environment import CALL
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import SPLITS, Array
from subquad.tasks.data import DataError, NoDataError, cache, sources
from subquad.tasks.data import folder as cached_folder
from subquad.tasks.dna import BASES, MASKED, DNATask, fasta_below, shared_bases

GROUPS = {
    "five-species": ("human", "lemur", "mouse", "pig", "hippo"),
    "great-apes": ("human", "chimpanzee", "gorilla", "orangutan", "bonobo"),
}
VALID_CHROMOSOMES = frozenset(("1", "3", "12", "13"))
TEST_CHROMOSOMES = frozenset(("5", "7", "9", "10", "11"))
"""The chromosomes of validation and of testing in every species; all others are for training (HyenaDNA)."""
CHUNK = 256
"""Number of places that are drawn from one generator."""
WHOLE_GENOME = 1_000_000_000
"""Number of bases below which a genome cannot be whole: a mammal has two to four times as many."""


def chromosome(name: str, about: str, stem: str) -> str:
    """The chromosome of a record, such as `2A` or `X`.

    It is found in the name of the record, in its header (`about`), or in the name of a file that holds no other record
    (`stem`). Empty for what belongs to no chromosome: mitochondria, scaffolds and patches.
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
    """Classifies a stretch of DNA by its species.

        input   A C G T T A G N A    (1024 bases, from anywhere in a chromosome)
        target  lemur                (one label per row: one of five species)

    Source: Nguyen et al. 2023 (HyenaDNA), section 4.4, for human, lemur, mouse, pig and hippo; Gu & Dao 2023 (Mamba),
    section 4.3.3 and appendix E.3.4, for the great apes (`group: great-apes`). `species` names any others. For every
    row, a species, one of its chromosomes and a place in that chromosome are drawn uniformly. Training rows are an
    endless stream.

    In every species, chromosomes 1, 3, 12 and 13 are for validation, 5, 7, 9, 10 and 11 for testing, and all others for
    training (`split_by: chromosome`). Where there are few records, each record can be cut instead (`split_by:
    position`, which no source does): the first 80 % are for training, and a tenth each for validation and testing.

    N is a token, lower case is read as upper case, and other IUPAC letters count as N. What belongs to no chromosome is
    left out, and so are chromosomes shorter than a row.

    Departures: HyenaDNA draws validation and test rows again in every epoch; here `num_eval` rows are drawn once.
    HyenaDNA cuts a row where the chromosome ends and pads it with N; here every row lies inside its chromosome. Mamba
    does not name its assemblies of the apes; those of the manifest are UCSC's of 2018 to 2020.

    Folder: `<species>/` with FASTA files in it, one per chromosome or the whole genome in one, or files `<species>.*`.
    """

    name: ClassVar[str] = "species"
    version: ClassVar[int] = 1

    group: Literal["five-species", "great-apes"] = "five-species"
    """The set of species: `five-species` is HyenaDNA's, `great-apes` is Mamba's."""
    species: tuple[str, ...] = ()
    """Any species, in the order of their classes. Empty: those of `group`."""
    length: int = Field(default=1024, ge=2, le=2**20)
    """Number of bases of a row."""
    split_by: Literal["chromosome", "position"] = "chromosome"
    """`chromosome`: each chromosome belongs to one split, as in HyenaDNA. `position`: each record is cut in three."""
    num_eval: Size = 1000
    """Number of rows of valid and of test."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The species, in the order of their classes."""
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
            raise NoDataError(
                f"{self.name}: no source is known for {unknown[0]!r}; give --data DIR with {unknown[0]}/*.fa."
            )
        return names

    @property
    def folder(self) -> Path:
        if self.data is None:
            for name in self.sources:
                if cached_folder(name) is None:
                    which = f"species=[{','.join(self.species)}]" if self.species else f"group={self.group}"
                    raise NoDataError(
                        f"{self.name}: {name} is not in the cache; call `{CALL} data prepare {self.name} --set "
                        f"'{which}'`, or give --data DIR (a folder of FASTA files a species)."
                    )
            return cache.place("unpacked")
        return self.find(
            ("species",),
            lambda path: any(self._of(path, kind) for kind in self.kinds),
            f"FASTA files {self.kinds[0]}/*.fa or {self.kinds[0]}.*.fa (also .fna, .fasta, .gz)",
        )

    def _of(self, folder: Path, kind: str) -> list[Path]:
        """The FASTA files of a species."""
        base = cached_folder(f"species-{kind}") if self.data is None else folder / kind
        if base is not None and base.is_dir():
            return fasta_below(base)
        return [path for path in fasta_below(folder) if path.name.startswith(f"{kind}.")]

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
        """The regions [K, 3] (record, start, end) of each species in which rows of a split may lie."""
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
        """Class, record and start of `count` random rows."""
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
        """Rows of the stream. Places are drawn `CHUNK` at a time, so that row i does not depend on the size of a
        block."""
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
        """Number of rows of valid and of test; those of train are endless."""
        return {split: len(self.evaluation(split)) for split in SPLITS[1:]}

    def shared_rows(self) -> dict[str, int]:
        """Number of bases that two splits share, for every pair of splits."""
        parts = {split: np.concatenate(self.regions(split)) for split in SPLITS}
        return shared_bases({split: (part[:, 0], part[:, 1], part[:, 2]) for split, part in parts.items()})
