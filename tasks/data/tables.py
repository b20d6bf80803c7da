"""Tables (parquet, CSV, JSON lines), folders of pictures and files of the hub, read by the library `datasets`.

Local files are read as streams, so that `datasets` keeps no copy of them. Nothing here uses the network except
`from_hub`, which downloads one file of one fixed revision.
"""

from __future__ import annotations

import glob
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from subquad.suite.identity import file_digest
from subquad.tasks.data import cache
from subquad.tasks.data.faults import DataError, disk_faults, needed
from subquad.tasks.data.manifest import HUB, source

LOADERS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json"}
"""Endings of tables and the names of their readers in `datasets`."""

WORDS = {"train": ("train",), "valid": ("validation", "valid", "val"), "test": ("test",)}
"""Names of the files and folders of a split."""


def _datasets(use: str) -> Any:
    datasets = needed("datasets", use, "datasets")
    # it also logs what it raises, and the message of a fault should be one line
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _streams(library: Any, kind: str, files: Any, **options: Any) -> Any:
    """Streams of rows by split. The cache folder only holds locks, since a stream keeps no rows."""
    place = str(cache.place("datasets"))
    return library.load_dataset(kind, data_files=files, streaming=True, cache_dir=place, **options)


def _escaped(path: Path) -> str:
    """The path as `datasets` takes it. A DataError where it would take it for something else."""
    full = str(path.absolute())
    if "::" in full:
        raise DataError(f"{path}: a name with '::', which `datasets` takes for a chain of addresses; rename it.")
    return glob.escape(full)


def split_tables(folder: Path, split: str) -> list[Path]:
    """The tables of a split, in order: `train.csv`, or `train-00000-of-00002.parquet` and what follows it."""
    for word in WORDS[split]:
        for suffix in LOADERS:
            if (folder / f"{word}{suffix}").is_file():
                return [folder / f"{word}{suffix}"]
            if found := sorted(folder.glob(f"{word}-*-of-*{suffix}")):
                told = found[0].stem.rpartition("-")[2]
                if not told.isdigit() or int(told) != len(found):
                    raise DataError(f"{folder}: {len(found)} of {told} tables {word}-*{suffix}; restore the others.")
                return found
    return []


def rows(paths: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """The values of these columns, for every row of every table in order. Pictures are decoded."""
    library = _datasets(f"reading {paths[0].name}")
    for path in paths:
        kind = LOADERS[path.suffix.lower()]
        # without this, pandas would read the text NA as a missing value
        options = {"keep_default_na": False} if kind == "csv" else {}
        files = _escaped(path)
        try:
            table = _streams(library, kind, files, **options)["train"]
            for batch in table.select_columns(list(columns)).iter(batch_size=1000):
                yield from zip(*(batch[name] for name in columns), strict=True)
        # the readers of the three formats raise many kinds of errors
        except Exception as error:
            raise DataError(
                f"{path}: cannot be read as {kind} with {', '.join(columns)} as columns ({_reason(error)}); "
                f"restore the file."
            ) from None


def labelled_texts(paths: Sequence[Path], classes: int) -> tuple[list[bytes], list[int]]:
    """The columns `text` and `label` (0 ... classes - 1) of tables. A DataError names a row that has other values."""
    texts, labels = [], []
    for number, (text, label) in enumerate(rows(paths, ("text", "label")), start=1):
        if not isinstance(text, str) or label not in range(classes):
            raise DataError(
                f"{paths[0]}: row {number} has the label {label!r} and a text of type {type(text).__name__}; needs a "
                f"string and 0 to {classes - 1}."
            )
        texts.append(text.encode())
        labels.append(int(label))
    return texts, labels


def pictures(files: Mapping[str, Sequence[Path]]) -> dict[str, Iterator[tuple[Any, int]]]:
    """(picture, class) of the files of each split, in their order.

    The class of a picture is the folder that it lies in. Classes are numbered in alphabetical order over all splits, as
    `imagefolder` does.
    """
    library = _datasets("reading a folder of pictures")
    wanted = {split: [_escaped(path) for path in paths] for split, paths in files.items()}
    found = _streams(library, "imagefolder", wanted, drop_labels=False)

    def decoded(split: str) -> Iterator[tuple[Any, int]]:
        done = 0
        try:
            for example in found[split]:
                yield example["image"], example["label"]
                done += 1
        except Exception as error:
            raise DataError(f"{files[split][done]}: not a readable picture ({_reason(error)}); restore it.") from None

    return {split: decoded(split) for split in files}


def from_hub(url: str, part: Path) -> None:
    """Downloads `hf://datasets/<owner>/<name>@<commit>/<path>` to part. It continues what an earlier call left.

    This uses the client of `datasets` itself, so the settings HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE apply.
    """
    where = re.fullmatch(HUB, url)
    assert where is not None, "the manifest accepts no other URL"
    library = _datasets("fetching from the hub")
    import huggingface_hub

    if library.config.HF_HUB_OFFLINE:
        raise DataError(f"{url}: HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids the network; unset it.")
    beside = part.parent / ".hub"
    try:
        with disk_faults(part):
            huggingface_hub.hf_hub_download(
                where["repository"],
                where["path"],
                repo_type="dataset",
                revision=where["revision"],
                local_dir=beside,
                library_name="subquad",
            )
            (beside / where["path"]).replace(part)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{url}: cannot be fetched ({_reason(error)}); prepare again later to continue, or give --data DIR, a "
            f"folder with the file."
        ) from None
    shutil.rmtree(beside, ignore_errors=True)


def _reason(error: Exception) -> str:
    """The kind and the message of an error, in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def unpublished(paths: Sequence[Path], name: str) -> str:
    """Says which of these tables are not the files of the hub in the manifest under this name; empty where all are."""
    known = {file.sha256 for file in source(name).hub}
    others = [path.name for path in paths if file_digest(path) not in known]
    return f"{', '.join(others)}: other than the hub's {name}" if others else ""
