"""LRA ListOps: the value of a nested expression over digits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from subquad.suite.bounds import Count, Seed, Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import SPLITS, Array, token_dtype
from subquad.tasks.data import DataError
from subquad.tasks.data.parallel import in_order
from subquad.tasks.data.stored import ChosenTask
from subquad.tasks.lra.expressions import CHUNK, END, PAD, TOKENS, Language, draw
from subquad.tasks.lra.text import sequence_segment, table_of, tables_of

FILES = {"train": "basic_train.tsv", "valid": "basic_val.tsv", "test": "basic_test.tsv"}
ENDINGS = ("", ".gz", ".xz")
SIZES = {"train": 96_000, "valid": 2_000, "test": 2_000}


class LRAListOps(ChosenTask):
    """The value of a nested expression of minima, maxima, medians and sums modulo 10, LRA's `ListOps`.

        input   [MAX 2 9 [MIN 4 7 ] 0 ] <end> <pad> <pad>    (500 to 2000 tokens, brackets without parentheses)
        target  9                                            (one digit an expression, read where it ends)

    The language is that of LRA's generator. A node is an operator with probability 1/4, with 2 to `max_args` arguments,
    and no node is deeper than `max_depth`. An expression has more than `min_length` and fewer than `max_length` tokens.
    The median of an even number of digits is the mean of the middle two, rounded down. No expression occurs twice.
    Generated rows are other draws than the released ones, from the same distribution: tests/tasks/test_lra_listops.py
    compares the two. With the release's limits and numbers of rows they are therefore no stand-in.

    Source: Tay et al. 2021, section 2.1, and the generator of the release. Parentheses are dropped, as in the S4 code.
    Both policies use the validation split of the source.

    Departure: rows are padded to `length`, while the S4 and DSS code pad to the longest row of a batch.
    """

    name: ClassVar[str] = "lra-listops"
    version: ClassVar[int] = 1
    source: ClassVar[str] = "lra-release"

    rows: Literal["generated", "files"] = "generated"
    """`generated`: expressions generated here. `files`: the tsv files of the release."""
    length: int = Field(default=2000, ge=8, le=2**15)
    """Number of tokens of a row, the end mark included. Longer expressions are cut."""
    max_depth: int = Field(default=10, ge=2, le=100)
    max_args: int = Field(default=10, ge=2, le=1000)
    min_length: Count = 500
    max_length: Size = Field(default=2000, ge=4)
    num_train: Size = 96_000
    num_valid: Size = 2_000
    num_test: Size = 2_000
    data_seed: Seed = 0
    """Seed of the generated rows. The seed of a run does not change them, as it does not change the release."""

    def check_options(self) -> None:
        if self.max_length < self.min_length + 2:
            raise ValueError(
                f"lra-listops: no length lies between min_length={self.min_length} and max_length={self.max_length}; "
                f"raise max_length."
            )

    @property
    def generated(self) -> bool:
        return self.rows == "generated"

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec("tokens", num_classes=10, readout="sequence", max_length=self.length, vocab_size=len(TOKENS))

    @property
    def stand_in(self) -> str:
        if self.generated:
            if self._language != Language() or self.length < self._language.max_length:
                return "expressions generated here, of other depths, arguments or lengths than the release's"
            counts = {"train": self.num_train, "valid": self.num_valid, "test": self.num_test}
        else:
            counts = self.counts()
        return "" if counts == SIZES else f"{sum(counts.values())} expressions; the release has {sum(SIZES.values())}"

    @property
    def _language(self) -> Language:
        return Language(self.max_depth, self.max_args, self.min_length, self.max_length)

    @property
    def prepared_by(self) -> str:
        return f"{self.name} --set rows={self.rows}"

    @property
    def folder(self) -> Path:
        names = ("listops-1000", "lra_release/listops-1000", "lra_release/lra_release/listops-1000", "listops")
        layout = "basic_{train,val,test}.tsv"
        return self.find(names, lambda path: table_of(path, FILES["train"], ENDINGS) is not None, layout)

    def files(self, folder: Path) -> list[Path]:
        return tables_of(self.name, folder, FILES.values(), ENDINGS)

    def reading(self) -> Mapping[str, Any]:
        if not self.generated:
            return {"length": self.length}
        return self.model_dump(exclude={"split_policy", "data"})

    def generate(self, workers: int) -> dict[str, Array]:
        language = self._language
        wanted = {"train": self.num_train, "valid": self.num_valid, "test": self.num_test}
        total = sum(wanted.values())
        seen: set[bytes] = set()
        parts: list[tuple[Array, Array, Array]] = []
        for tokens, lengths, values in in_order(draw, ((self.data_seed, i, language) for i in range(1 << 40)), workers):
            fresh = [i for i, row in enumerate(tokens) if _is_new(row, seen)][: total - sum(len(p[2]) for p in parts)]
            parts.append((tokens[fresh], lengths[fresh], values[fresh]))
            if sum(len(part[2]) for part in parts) == total:
                break
            if len(parts) >= 64 and not seen:
                raise ValueError(
                    f"{self.name}: of {64 * CHUNK} trees none has between {self.min_length} and {self.max_length} "
                    f"tokens; change min_length, max_length, max_depth or max_args."
                )
        tokens, lengths, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        # a random order, so that all splits have the same distribution whatever the order of the stream
        order = numpy_generator(self.data_seed, "lra-listops/split").permutation(total)
        arrays: dict[str, Array] = {}
        start = 0
        for split, count in wanted.items():
            chosen = order[start : start + count]
            arrays |= self._arrays(split, tokens[chosen], lengths[chosen], values[chosen])
            start += count
        return arrays

    def _arrays(self, split: str, tokens: Array, lengths: Array, values: Array) -> dict[str, Array]:
        """The arrays of a split: rows of `length` tokens with an end mark, where they end, and values."""
        rows = np.full((len(tokens), self.length), PAD, dtype=np.uint8)
        width = min(self.length, tokens.shape[1])
        rows[:, :width] = tokens[:, :width]
        ends = np.minimum(lengths, self.length - 1)
        rows[np.arange(len(rows)), ends] = END
        return {
            f"{split}.inputs": rows,
            f"{split}.ends": ends.astype(token_dtype(self.length)),
            f"{split}.targets": values.astype(np.int8),
        }

    def read(self, folder: Path) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for split, path in zip(SPLITS, self.files(folder), strict=True):
            try:
                table = pd.read_csv(path, sep="\t", dtype=str, keep_default_na=False)
                expressions, targets = table["Source"], pd.to_numeric(table["Target"])
            except (pd.errors.ParserError, UnicodeDecodeError, EOFError, OSError, KeyError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise DataError(f"{path}: not a table of Source and Target ({reason}); fetch it again.") from None
            numbers = {token: number for number, token in enumerate(TOKENS)}
            tokens = np.full((len(table), self.length), PAD, dtype=np.uint8)
            lengths = np.empty(len(table), dtype=np.int64)
            for row, expression in enumerate(expressions):
                words = expression.replace("(", " ").replace(")", " ").split()
                unknown = [word for word in words if numbers.get(word, PAD) <= END]
                if unknown or not words:
                    raise DataError(f"{path}: line {row + 2} holds {unknown[:1] or 'nothing'}; fetch it again.")
                kept = words[: self.length]
                tokens[row, : len(kept)] = [numbers[word] for word in kept]
                lengths[row] = len(words)
            if not targets.isin(range(10)).all():
                raise DataError(f"{path}: a target is no digit; fetch it again.")
            arrays |= self._arrays(split, tokens, lengths, targets.to_numpy())
        return arrays

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        inputs, ends, targets = self.selected(split, "inputs", "ends", "targets")
        yield sequence_segment(inputs, ends[:, None], targets)


def _is_new(row: Array, seen: set[bytes]) -> bool:
    """Whether this row was not seen before; the row is added to those seen."""
    key = hashlib.blake2b(row.data, digest_size=16).digest()
    if key in seen:
        return False
    seen.add(key)
    return True
