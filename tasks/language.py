"""Language modelling: predict the next byte or token of WikiText or of any text."""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import json
import lzma
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from subquad.suite.contracts import IGNORE, Segment, TaskSpec
from subquad.suite.identity import file_digest
from subquad.suite.store.documents import read_tokenizer
from subquad.tasks.base import SPLITS, Array, token_dtype, token_spec
from subquad.tasks.data import DataError, NoDataError, cache, find, needed
from subquad.tasks.data.overlap import shared_bytes
from subquad.tasks.data.stored import StoredTask
from subquad.tasks.data.tables import LOADERS, rows, split_tables

SPACE = 0x20
WHITESPACE = b" \t\n\r\v\f"
"""The bytes between words, as in `bytes.split`."""

COUNTS = {
    "wikitext-2": {"train": 2_088_628, "valid": 217_646, "test": 245_569},
    "wikitext-103": {"train": 103_227_021, "valid": 217_646, "test": 245_569},
}
"""Official word counts, in which the end mark of every line counts as a word (Merity et al. 2016)."""


def _tokenizers() -> Any:
    return needed("tokenizers", "every vocabulary but bytes", "data")


def train_bpe(text: str, vocab_size: int) -> Any:
    """A tokenizer that merges byte pairs by frequency within words (Sennrich et al. 2016), over bytes as in GPT-2.

    No token is unknown to it.
    """
    library = _tokenizers()
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    model.train_from_iterator(text.splitlines(keepends=True), trainer)
    return model


def encode(model: Any, text: str) -> Array:
    """The tokens of a text [N], int32, encoded line by line."""
    lines = text.splitlines(keepends=True) or [""]
    parts = [
        np.fromiter(
            (i for line in model.encode_batch(lines[start : start + 4096], add_special_tokens=False) for i in line.ids),
            dtype=np.int32,
        )
        for start in range(0, len(lines), 4096)
    ]
    return np.concatenate(parts)


def _byte_letters() -> dict[str, int]:
    """The bytes by the letter that byte-level tokenizers write for each: itself if it is printed, else behind 255."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {**{chr(byte): byte for byte in printed}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


def spelled(model: Any) -> list[bytes]:
    """The bytes that every token of a tokenizer stands for; none for an id that it leaves out.

    Tokens that were added to a vocabulary are written as they are. Others are written with one letter per byte, as by
    GPT-2, or with U+2581 for a space and `<0x0A>` for a byte, as by SentencePiece.
    """
    facts = json.loads(model.to_str())
    by_bytes = '"ByteLevel"' in json.dumps([facts["pre_tokenizer"], facts["decoder"]])
    fallback = bool(facts["model"].get("byte_fallback"))
    added = {int(token["id"]): token["content"].encode() for token in facts["added_tokens"]}
    letters = _byte_letters()

    def spell(i: int, name: str) -> bytes:
        if i in added:
            return added[i]
        if by_bytes and all(letter in letters for letter in name):
            return bytes(letters[letter] for letter in name)
        if fallback and (byte := re.fullmatch("<0x([0-9A-F]{2})>", name)):
            return bytes([int(byte[1], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    size = max(model.get_vocab(with_added_tokens=True).values()) + 1
    return [spell(i, model.id_to_token(i) or "") for i in range(size)]


def counts_of(tokens: list[bytes]) -> dict[str, Array]:
    """Counts in every token its bytes, its spaces, ends of words inside of it, and whether it begins (1) and ends (2)
    with whitespace."""
    inside = [len(re.findall(rb"(?<=\S)\s", token)) for token in tokens]
    borders = [(token[:1] in WHITESPACE) + 2 * (token[-1:] in WHITESPACE) if token else 0 for token in tokens]
    columns = {
        "sizes": [len(token) for token in tokens],
        "spaces": [token.count(SPACE) for token in tokens],
        "inside": inside,
        "borders": borders,
    }
    return {name: np.array(column, dtype=np.int64) for name, column in columns.items()}


class LanguageTask(StoredTask):
    """Base class of language modelling: each split is a text, cut into rows of `length` tokens that predict the next
    one.

    The last row of a split is padded with 0, and the padding has no label, so every token but the first counts once.
    Every split has to fill one row.
    """

    vocabulary: Literal["bytes", "bpe", "file"] = "bytes"
    """`bpe`: byte pairs that are trained on the training text. `file`: the tokens of `tokenizer`. Both need
    `tokenizers`."""
    vocab_size: int = Field(default=256, ge=2, le=2**20)
    """Number of tokens of `file` and of `bpe`, whose first 256 are the bytes; 256 for bytes."""
    tokenizer: Path | None = None
    """A tokenizer.json whose tokens spell the text byte for byte, such as GPT-2's. Its content is part of a run's
    identity, its path is not."""
    length: int = Field(default=1024, ge=2, le=2**20)
    """Number of tokens of a row."""

    reader: ClassVar[int] = 2
    left_out_when_off: ClassVar[tuple[str, ...]] = ("tokenizer",)

    exponentials: ClassVar[Mapping[str, str]] = {"perplexity": "loss", "word_perplexity": "nats_per_word"}
    """Metrics that are the exponential of the mean of another one, by name."""

    @property
    def spec(self) -> TaskSpec:
        if self.vocabulary == "bytes" and self.vocab_size != 256:
            raise ValueError(f"{self.name}: vocab_size={self.vocab_size} with vocabulary=bytes; leave it at 256.")
        if (self.vocabulary == "file") != (self.tokenizer is not None):
            raise ValueError(f"{self.name}: vocabulary=file and tokenizer belong together; give both or neither.")
        size = self.vocab_size
        return token_spec(size, self.length)

    @property
    def tokens_from(self) -> Literal["options", "data", "tokenizer"]:
        if self.tokenizer is not None:
            return "tokenizer"
        return "options" if self.vocabulary == "bytes" else "data"

    def given_tokenizer(self) -> Any:
        """Loads the file `tokenizer`. DataError where it cannot be read or has more tokens than `vocab_size`."""
        assert self.tokenizer is not None
        _tokenizers()
        try:
            found = read_tokenizer(self.tokenizer)
        except ValueError as error:
            raise DataError(f"{self.name}: {error}.") from None
        if found.get_vocab_size() > self.vocab_size:
            raise DataError(
                f"{self.name}: {self.tokenizer} has {found.get_vocab_size()} tokens, more than "
                f"vocab_size={self.vocab_size}; raise it."
            )
        return found

    def fingerprint(self) -> str:
        content = super().fingerprint()
        if self.tokenizer is None:
            return content
        if not self.tokenizer.is_file():
            raise DataError(f"{self.name}: {self.tokenizer}: there is no such file; give tokenizer a tokenizer.json.")
        return hashlib.sha256(f"{content} {file_digest(self.tokenizer)}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, cut as the training text is."""
        if self.tokenizer is not None:
            tokens: list[int] = encode(self.given_tokenizer(), text).tolist()
            return tokens
        self._check_bytes()
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        if self.tokenizer is not None:
            text = str(self.given_tokenizer().decode(tokens, skip_special_tokens=False))
        else:
            self._check_bytes()
            text = bytes(tokens).decode("utf-8", errors="replace")
        # a character of several bytes may not be complete yet
        return text.rstrip("\N{REPLACEMENT CHARACTER}")

    def _check_bytes(self) -> None:
        if self.vocabulary != "bytes":
            raise ValueError(
                f"{self.name}: vocabulary={self.vocabulary} keeps no tokenizer; give `generate` token ids and --ids, "
                "`evaluate` a file with --tokenizer, or train with vocabulary=file."
            )

    def texts(self, folder: Path) -> dict[str, bytes]:
        """The text of each split."""
        raise NotImplementedError

    def reading(self) -> Mapping[str, Any]:
        return {"vocabulary": self.vocabulary, "vocab_size": self.vocab_size}

    def read(self, folder: Path) -> dict[str, Array]:
        texts = self.texts(folder)
        if self.vocabulary == "bytes":
            streams = {split: np.frombuffer(text, dtype=np.uint8) for split, text in texts.items()}
            tokens = [bytes([i]) for i in range(256)]
        else:
            words = {split: self._decoded(split, text) for split, text in texts.items()}
            given = self.vocabulary == "file"
            if not given and self.vocab_size < 256:
                raise ValueError(
                    f"{self.name}: vocab_size={self.vocab_size} with vocabulary=bpe; byte pairs are made of the 256 "
                    "bytes, give at least 256."
                )
            model = self.given_tokenizer() if given else train_bpe(words["train"], self.vocab_size)
            tokens = spelled(model)
            if given:
                # ids that a tokenizer leaves out never occur
                tokens += [b""] * (self.vocab_size - len(tokens))
            if len(tokens) != self.vocab_size:
                raise DataError(
                    f"{self.name}: the training text gives {len(tokens)} byte pairs only, not "
                    f"vocab_size={self.vocab_size}; lower it."
                )
            streams = {split: encode(model, text).astype(token_dtype(self.vocab_size)) for split, text in words.items()}
        tables = counts_of(tokens)
        if self.vocabulary == "file":
            for split in texts:
                self._check_spelling(
                    split, words[split], [tables[name][streams[split]].sum() for name in ("sizes", "spaces")]
                )
        return {f"{split}.stream": stream for split, stream in streams.items()} | tables

    def _decoded(self, split: str, text: bytes) -> str:
        words = text.decode("utf-8", errors="replace")
        # a cut between splits may go through a character, whose bytes are at most six such marks
        lost = words.count("\N{REPLACEMENT CHARACTER}") - text.count("\N{REPLACEMENT CHARACTER}".encode())
        if lost > 6:
            raise DataError(f"{self.name}: the {split} text is not UTF-8 ({lost} characters are not); convert it.")
        return words

    def _check_spelling(self, split: str, text: str, found: list[int]) -> None:
        wanted = [len(text.encode()), text.count(" ")]
        if found != wanted:
            raise DataError(
                f"{self.name}: the tokens of {self.tokenizer} do not spell the {split} text: they have {found[0]} "
                f"bytes and {found[1]} spaces, the text {wanted[0]} and {wanted[1]}, so nothing can be counted per "
                "byte or word. It drops or changes characters, or puts a space before every line; give a byte-level "
                "tokenizer."
            )

    def plan(self) -> None:
        for split in SPLITS:
            self.require_row(split, self.length)

    def require_row(self, split: str, length: int) -> None:
        """Raises DataError where a text does not fill a single row."""
        count = len(self.arrays()[f"{split}.stream"])
        if count <= length:
            shorter = f", or set a length of at most {count - 1}" if count > 2 else ""
            raise DataError(
                f"{self.name}: the {split} text of {self.data or self.folder} has {count} tokens, and a row of "
                f"{length} takes {length + 1}; give more text{shorter}."
            )

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        self.check_split(split)
        yield self.cut(split, self.length)

    def cut(self, split: str, length: int) -> Segment:
        """The text of a split in rows of a length."""
        stream = self.arrays()[f"{split}.stream"]
        num_rows = -(-(len(stream) - 1) // length)
        inputs = np.zeros(num_rows * length, dtype=stream.dtype)
        targets = np.full(num_rows * length, IGNORE, dtype=token_dtype(self.vocab_size))
        inputs[: len(stream) - 1] = stream[:-1]
        targets[: len(stream) - 1] = stream[1:]
        return Segment(
            inputs=torch.from_numpy(inputs.reshape(num_rows, length)),
            targets=torch.from_numpy(targets.reshape(num_rows, length)),
        )

    def shared_rows(self) -> dict[str, int]:
        """Bytes of a later split in passages of `overlap.PASSAGE` bytes or more that an earlier one has as well."""
        texts = self.texts(self.folder)
        pairs = (("train", "valid"), ("train", "test"), ("valid", "test"))
        return {f"bytes of {one} & {other}": shared_bytes(texts[one], texts[other]) for one, other in pairs}

    def score(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The metrics of every task, and bits per byte and nats per word, which do not depend on the vocabulary."""
        metrics = super().score(logits, targets)
        labelled = targets != IGNORE
        tables = _tables(self, logits.device)
        known = torch.where(labelled, targets, 0).long()
        num_bytes = (tables["sizes"][known] * labelled).sum()
        num_words = self.word_ends(tables, known, labelled)
        nats = metrics["loss"][0]
        return metrics | {"bits_per_byte": (nats / math.log(2), num_bytes), "nats_per_word": (nats, num_words)}

    def word_ends(
        self, tables: Mapping[str, torch.Tensor], tokens: torch.Tensor, counted: torch.Tensor
    ) -> torch.Tensor:
        """The number of words that end in the tokens [..., T] of rows which are `counted`.

        A word ends with the first byte of whitespace behind it. What stands before a row, or before a token that is
        not counted, is taken for a word.
        """
        borders = tables["borders"][tokens]
        before = torch.nn.functional.pad((borders[..., :-1] >= 2) & counted[..., :-1], (1, 0))
        return ((tables["inside"][tokens] + ((borders % 2 == 1) & ~before)) * counted).sum()


_on_device: dict[tuple[str, str], dict[str, torch.Tensor]] = {}


def _tables(task: LanguageTask, device: torch.device) -> dict[str, torch.Tensor]:
    """The counts of `counts_of`, on the device.

    They are read once, so that no file is read while a CUDA graph is recorded.
    """
    key = (task.model_dump_json() + task.name, str(device))
    if key not in _on_device:
        arrays = task.arrays()
        _on_device[key] = {name: torch.from_numpy(np.array(arrays[name])).to(device) for name in counts_of([b""])}
    return _on_device[key]


def _split_file(folder: Path, split: str) -> list[Path]:
    """The text file of a split in a list, or its tables."""
    for name in (f"wiki.{split}.tokens", f"wiki.{split}.raw", f"{split}.txt"):
        if (folder / name).is_file():
            return [folder / name]
    return split_tables(folder, split)


PACKED: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\0": lzma.decompress,
}
"""First bytes of a file, to the function that unpacks it."""
NO_TEXT = {
    b"PK\x03\x04": "a zip archive or a document of an office program",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"7z\xbc\xaf": "a 7z archive",
    b"%PDF": "a PDF",
    b"{\\rtf": "RTF",
    b"PAR1": "a parquet table, which needs the ending .parquet",
    b"ARROW1": "an Arrow table",
    b"SQLite format 3": "a database",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
}
"""First bytes of a file that is no text, to its kind in words."""


def plain_text(path: Path) -> bytes:
    """The bytes of a text file in UTF-8, unpacked where it is packed. DataError for what is no text, by its name.

    UTF-16 and UTF-32 are recognised by their byte order mark.
    """
    content = path.read_bytes()
    for start, unpacked in PACKED.items():
        if content.startswith(start):
            if Path(path.stem).suffix.lower() in (*LOADERS, ".tar"):
                raise DataError(f"{path}: a table or an archive that is packed; unpack it.")
            try:
                content = unpacked(content)
            except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
                raise DataError(f"{path}: damaged ({error}); fetch it again.") from None
            if content.startswith(tuple(PACKED)):
                raise DataError(f"{path}: packed twice; unpack it.")
            break
    else:
        if path.suffix.lower() in (".gz", ".bz2", ".xz"):
            raise DataError(f"{path}: not packed, as its name says; fetch it again, or give it the name of a text.")
    for start, kind in NO_TEXT.items():
        if content.startswith(start):
            raise DataError(f"{path}: no text but {kind}; give its text.")
    if content[257:262] == b"ustar":
        raise DataError(f"{path}: no text but a tar archive; unpack it.")
    marks = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
    marks |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    for mark, encoding in marks.items():
        if content.startswith(mark):
            try:
                return content.decode(encoding).encode()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: damaged {encoding.upper()} ({error.reason}); fetch it again.") from None
    # every second byte of English in UTF-16, and some bytes of any program or picture
    if (at := content.find(0)) >= 0:
        raise DataError(
            f"{path}: no text, for its byte {at} is 0: it holds binary data, or UTF-16 without a byte order mark; "
            "convert it to UTF-8."
        )
    return content


def _text(paths: list[Path], column: str = "text", end: str = "", empty: str = "") -> bytes:
    """The content of a text file, or the rows of tables in one text.

    column: where a table has its text. end: what is written behind every row. empty: what replaces an empty row.
    """
    if paths[0].suffix.lower() not in LOADERS:
        return plain_text(paths[0])
    lines = []
    for number, (line,) in enumerate(rows(paths, (column,)), start=1):
        if not isinstance(line, str):
            raise DataError(f"{paths[0]}: row {number} of {column} holds no text; name another column or restore it.")
        lines.append((line or empty) + end)
    return "".join(lines).encode()


class WikiText(LanguageTask):
    """The next byte or token of Wikipedia articles.

        input   _ = _ H o m a r u s _ = _    (1024 bytes or byte pairs per row)
        target  = _ H o m a r u s _ = _ \\n   (the next one, everywhere)

    Source: Merity et al. 2016, the word-level files with <unk> (`wiki.{train,valid,test}.tokens`), or the parquet files
    of the hub, or `{train,valid,test}.txt`. Perplexity is per token. `word_perplexity` is what papers print for
    word-level models: the same sum, divided by the official number of words, which is that of spaces. `bits_per_byte`
    makes vocabularies comparable. The data set has a validation split of its own, which both policies use.
    """

    name: ClassVar[str] = "wikitext"
    version: ClassVar[int] = 1

    corpus: Literal["wikitext-2", "wikitext-103"] = "wikitext-2"

    def word_ends(
        self, tables: Mapping[str, torch.Tensor], tokens: torch.Tensor, counted: torch.Tensor
    ) -> torch.Tensor:
        # each line ends with a space, its end mark, which counts as a word
        return (tables["spaces"][tokens] * counted).sum()

    @property
    def sources(self) -> tuple[str, ...]:
        return () if self.data is not None else (self.corpus,)

    @property
    def prepared_by(self) -> str:
        return f"{self.name} --set corpus={self.corpus}"

    @property
    def folder(self) -> Path:
        names = (self.corpus, self.corpus.replace("-", ""), f"{self.corpus}-v1")
        layout = "wiki.{train,valid,test}.tokens, {train,valid,test}.txt or the hub's parquet files"
        return find(
            self.name,
            self.data,
            self.corpus,
            names,
            lambda path: bool(_split_file(path, "test")),
            layout,
            self.prepared_by,
        )

    def files(self, folder: Path) -> list[Path]:
        found = []
        for split in SPLITS:
            paths = _split_file(folder, split)
            if not paths:
                raise DataError(f"{self.name}: no {split} text in {folder}; restore it.")
            found += paths
        return found

    def texts(self, folder: Path) -> dict[str, bytes]:
        # rows of the hub are lines with their line breaks, except that a blank line, " \n", is an empty row there
        return {split: _text(_split_file(folder, split), empty=" \n") for split in SPLITS}

    def reading(self) -> Mapping[str, Any]:
        return {**super().reading(), "corpus": self.corpus}

    @property
    def stand_in(self) -> str:
        arrays = self.arrays()
        found = {split: int(arrays["spaces"][arrays[f"{split}.stream"]].sum()) for split in SPLITS}
        wrong = [split for split in SPLITS if found[split] != COUNTS[self.corpus][split]]
        if not wrong:
            return ""
        split = wrong[0]
        return f"{found[split]} words of {split}; {self.corpus} has {COUNTS[self.corpus][split]}"


def _shown(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` without hidden folders, into links as well. DataError where links lead back to a folder on the way."""
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not cache.hidden(name)]
        for name in folders:
            below = Path(place, name)
            on_the_way = (Path(place), *Path(place).parents)
            if below.is_symlink() and any(above.resolve().is_relative_to(below.resolve()) for above in on_the_way):
                raise DataError(f"{below}: links to a folder above it, which has no end; remove the link.")
        yield place, folders, names


def _documents(folder: Path) -> list[Path]:
    """The text files in those folders at or below this one that have no folders in them, in an order of their names."""
    found = [
        Path(place, name)
        for place, folders, names in _shown(folder)
        if not folders
        for name in names
        if name.lower().endswith(".txt") and name != "SOURCE.txt" and not cache.hidden(name)
    ]
    return sorted(found, key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest())


class TextFile(LanguageTask):
    """The next byte or token of any text.

        input   F i r s t _ C i t i z e    (1024 bytes or byte pairs per row)
        target  i r s t _ C i t i z e n    (the next one, everywhere)

    Source: the file that `data` names, or the only one in the folder that it names. It is a text file (*.txt) or a
    table (*.parquet, *.csv, *.jsonl) whose `column` holds one text per row; a line break is added behind every row.
    Under either policy, the first 90 % are for training, and 5 % each for validation and testing. A folder with one
    file or table for each of `{train,valid,test}` is split in that way instead. No published number belongs to this
    task.

    A folder of documents, such as that of the film reviews of LRA Text, is every text file in those of its folders that
    have no folders in them. Documents are split whole, in an order that depends on their names alone and mixes the
    folders.
    """

    name: ClassVar[str] = "text-file"
    version: ClassVar[int] = 1

    column: str = "text"
    """The column of a table that holds the text."""

    @property
    def folder(self) -> Path:
        if self.data is None:
            raise NoDataError(f"{self.name}: no data; give --data FILE, any text.")
        if not self.data.exists():
            raise DataError(f"{self.name}: {self.data}: there is no such file or folder; give --data FILE.")
        return self.data.parent if self.data.is_file() else self.data

    def files(self, folder: Path) -> list[Path]:
        if self.data is not None and self.data.is_file():
            return [self.data]
        parts = [_split_file(folder, split) for split in SPLITS]
        if all(parts):
            return [path for part in parts for path in part]
        endings = (".txt", *LOADERS)
        found = [p for p in cache.files_in(folder, *endings) if p.name != "SOURCE.txt"] if folder.is_dir() else []
        documents = _documents(folder)
        if len(documents) > 1:
            return documents
        if len(found) != 1:
            raise DataError(f"{self.name}: {folder} holds no text; give --data FILE, or a folder of text files.")
        return found

    def reading(self) -> Mapping[str, Any]:
        return {**super().reading(), "column": self.column}

    def texts(self, folder: Path) -> dict[str, bytes]:
        files = self.files(folder)
        if all(_split_file(folder, split) for split in SPLITS) and len(files) > 1:
            return {split: _text(_split_file(folder, split), self.column, "\n") for split in SPLITS}
        if len(files) > 1:
            first, second = round(0.90 * len(files)), round(0.95 * len(files))
            parts = {"train": files[:first], "valid": files[first:second], "test": files[second:]}
            if not all(parts.values()):
                raise DataError(
                    f"{self.name}: {folder} holds {len(files)} documents, and 90, 5 and 5 % of them leave a split "
                    f"empty; give 16 documents or more, or one file."
                )
            return {split: b"".join(plain_text(path) + b"\n" for path in part) for split, part in parts.items()}
        text = _text(files, self.column, "\n")
        first, second = round(0.90 * len(text)), round(0.95 * len(text))
        return {"train": text[:first], "valid": text[first:second], "test": text[second:]}

    @property
    def stand_in(self) -> str:
        files = self.files(self.folder)
        if len(files) > len(SPLITS):
            return f"{len(files)} documents of {self.folder.name}"
        return f"the text {', '.join(path.name for path in files)}"
