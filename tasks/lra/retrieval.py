"""LRA Retrieval: whether one paper cites the other, read from the bytes of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from subquad.suite.contracts import Segment, TaskSpec
from subquad.tasks.base import Array
from subquad.tasks.data import DataError
from subquad.tasks.data.stored import ChosenTask
from subquad.tasks.lra.text import END, VOCAB_SIZE, pack, sequence_segment, table_of, tables_of

FILES = {"train": "new_aan_pairs.train.tsv", "valid": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
PAIRS = {"train": 147_086, "valid": 18_090, "test": 17_437}
"""Number of pairs in the release."""
ENDINGS = ("", ".gz")
LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}


class LRARetrieval(ChosenTask):
    """Whether two papers of the ACL Anthology Network are linked by a citation, LRA's `Retrieval`.

        input   P a p e r _ o n e ... <end> <pad> | A n o t h e r ... <end> <pad>    (2 x 4000 bytes, two towers)
        target  linked                                                             (one label per pair)

    The two texts stand side by side in a row of 2 x `length`. `spec.towers` = 2 tells the network to read each of them
    with the same weights and to compare the two summaries.

    Source: Tay et al. 2021, section 2.3. Files have five columns (label, id, id, text, text) without header or quoting.
    The release has a validation split of its own, which both policies use.

    Departure: rows are bytes; S4 and DSS read characters, 98 of them.
    """

    name: ClassVar[str] = "lra-retrieval"
    version: ClassVar[int] = 1
    source: ClassVar[str] = "lra-release"

    length: int = Field(default=4000, ge=2, le=2**15)
    """Number of bytes of each text, the end mark included."""

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(
            input="tokens", num_classes=2, readout="sequence", max_length=self.length, vocab_size=VOCAB_SIZE, towers=2
        )

    @property
    def folder(self) -> Path:
        names = ("tsv_data", "lra_release/tsv_data", "lra_release/lra_release/tsv_data", "aan")
        layout = "new_aan_pairs.{train,eval,test}.tsv"
        return self.find(names, lambda path: table_of(path, FILES["train"], ENDINGS) is not None, layout)

    def files(self, folder: Path) -> list[Path]:
        return tables_of(self.name, folder, FILES.values(), ENDINGS)

    @property
    def stand_in(self) -> str:
        counts = self.counts()
        return "" if counts == PAIRS else f"{sum(counts.values())} pairs; the release has {sum(PAIRS.values())}"

    def reading(self) -> Mapping[str, Any]:
        return {"length": self.length}

    def read(self, folder: Path) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for split, path in zip(FILES, self.files(folder), strict=True):
            inputs, ends, targets = self._pairs(path)
            arrays |= {f"{split}.inputs": inputs, f"{split}.ends": ends, f"{split}.targets": targets}
        return arrays

    def _pairs(self, path: Path) -> tuple[Array, Array, Array]:
        """Rows [R, 2 length], ends [R, 2] and targets [R] of a file."""
        import pyarrow as pa
        from pyarrow import csv

        columns = ["label", "id_1", "id_2", "text_1", "text_2"]
        try:
            # read in blocks, because the release has gigabytes of text, of which 4000 bytes per text are kept
            with csv.open_csv(
                path,
                csv.ReadOptions(column_names=columns, block_size=1 << 26),
                csv.ParseOptions(delimiter="\t", quote_char=False),
                csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=False),
            ) as reader:
                parts, line = [], 1
                for block in reader:
                    parts.append(self._block(path, block, line))
                    line += len(block)
        except (pa.ArrowInvalid, EOFError, OSError) as error:
            reason = " ".join(str(error).split())[:120]
            raise DataError(
                f"{path}: cannot be read as five columns between tabs ({reason}); fetch it again."
            ) from None
        inputs, ends, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
        return inputs, ends, targets

    def _block(self, path: Path, block: Any, line: int) -> tuple[Array, Array, Array]:
        """The same of one block of the file at path, which begins at this line."""
        labels = np.array([LABELS.get(label, -1) for label in block["label"].to_pylist()], dtype=np.int8)
        bad = np.flatnonzero(labels < 0)
        if len(bad):
            label = block["label"][int(bad[0])].as_py()
            raise DataError(f"{path}: line {line + int(bad[0])} has the label {label!r}, not 0 or 1; fetch it again.")
        # control characters become spaces, because two of them are the marks of padding and end
        table = bytes(b" "[0] if b <= END else b for b in range(256))
        sides = [
            pack([text.encode().translate(table) for text in block[name].to_pylist()], self.length)
            for name in ("text_1", "text_2")
        ]
        return np.concatenate([rows for rows, _ in sides], axis=1), np.stack([e for _, e in sides], axis=1), labels

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        yield sequence_segment(*self.selected(split, "inputs", "ends", "targets"))
