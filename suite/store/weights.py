"""Finds, reads and writes the files with the weights of runs; each file says whose weights it has."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from subquad.suite.registry import few
from subquad.suite.store import endings
from subquad.suite.store.documents import settings_in
from subquad.suite.store.target import files_like, readable, replacing

if TYPE_CHECKING:
    import torch
    from torch import Tensor


ENDINGS = (".weights", ".checkpoint")
"""Files that hold weights: those of a run that ended (`run --keep-weights`), and of one that was interrupted."""


def save_weights(path: Path, resolved: Mapping[str, Any], weights: Mapping[str, Tensor], tokenizer: str = "") -> None:
    """Writes the weights of a model and the settings of its run (`Run.resolved`), whole or not at all.

    tokenizer: SHA-256 of the tokenizer file of the run; "" without one.
    """
    import torch

    with replacing(path) as temporary:
        torch.save({"config": json.dumps(resolved), "model": dict(weights), **kept_tokenizer(tokenizer)}, temporary)


def kept_tokenizer(digest: str) -> dict[str, str]:
    """The digest of a tokenizer file, as weights and checkpoints keep it. It is no setting and changes no identity."""
    return {"tokenizer": digest} if digest else {}


def model_settings(path: Path) -> tuple[str, dict[str, Any]]:
    """Name and options of the model in a file of weights."""
    options = dict(read_weights(path)[0]["model"])
    return options.pop("name"), options


def without_version(section: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a task or a model in a file of weights, as a grid would say them."""
    return {key: value for key, value in section.items() if key != "version"}


def tokenizer_of(path: Path) -> str:
    """SHA-256 of the tokenizer file with which weights were trained; "" where none is kept. ValueError for another
    file."""
    import torch

    with _named(path):
        return str(read(path, torch.device("meta"), verify=False).get("tokenizer", ""))


def read_weights(path: Path, device: torch.device | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights in a file, or the shapes of these where no device is given. ValueError for another file."""
    import torch

    with _named(path):
        stored = read(path, device or torch.device("meta"), verify=device is not None)
        settings, weights = settings_in(stored["config"]), stored["model"]
        if not settings.keys() >= {"task", "model"}:
            raise ValueError("its settings are those of no task and model")
        if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
            raise ValueError("its weights are no tensors by name")
        return settings, weights


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Makes a ValueError that names the file of any error that arises while it is read."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"{path}: holds no weights with their settings ({type(error).__name__}: {reason}); name another file"
        ) from None


def find_weights(name: str, roots: Sequence[Path], hint: str = "") -> Path:
    """The file that is named, or that of the run whose id begins so below one of the folders.

    hint: ends the message of the ValueError where there is no such run.
    """
    if not name:
        raise ValueError("the name of the weights is empty; give the beginning of a run id, or a file of weights")
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir() and set(name) - set("0123456789abcdef"):
        raise ValueError(
            f"{name}: this is a folder; name a run or a file of weights, which `weights import` makes of a checkpoint"
        )
    if path.suffix in ENDINGS or set(name) - set("0123456789abcdef"):
        raise ValueError(f"{name}: no such file, and no run id, which is hexadecimal")
    found = [path for root in roots for path in files_like(root, f"**/{name}*") if path.suffix in ENDINGS]
    ids = {path.stem for path in found} | {run_id for run_id, _ in endings.find(roots, name, lambda reason: None)}
    if not ids:
        raise ValueError(f"no stored run begins with {name!r} below {', '.join(map(str, roots))}{hint}")
    if len(ids) > 1:
        raise ValueError(f"{name!r} is ambiguous: {few(sorted(ids))}; give more of the id")
    for ending in ENDINGS:
        for path in found:
            if path.suffix == ending:
                return path
    raise ValueError(
        f"run {ids.pop()} kept no weights; repeat it with: run EXPERIMENT --force --keep-weights, or name a file"
    )


def mark(path: Path) -> dict[str, str]:
    """Returns what identifies a file of weights: a hash of its content. Neither its name nor its place is part of it.

    Raises ValueError where the file holds no weights.
    """
    read_weights(path)
    with _named(path):
        seen = path.stat()
        return {"sha256": _content(path, seen.st_size, seen.st_mtime)}


@functools.lru_cache(maxsize=64)
def _content(path: Path, size: int, changed: float) -> str:
    """The hash of what a file of weights holds, read once for all runs of a grid."""
    total = hashlib.sha256()
    with zipfile.ZipFile(readable(path)) as archive:
        # torch names the outermost folder as the file, and writes a mark of its own beside the tensors
        members = {member.filename.partition("/")[2]: member for member in _members(archive)}
        for inner in sorted(name for name in members if not name.startswith(".")):
            with archive.open(members[inner]) as member:
                total.update(f"{inner} {hashlib.file_digest(cast(Any, member), 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The members of an archive. ValueError where torch would read something else than `zipfile`."""
    members = archive.infolist()
    if len({member.filename for member in members}) < len(members):
        raise ValueError("it has a name twice")
    for member in members:
        if member.external_attr:
            # torch reads nothing of a member that is marked as a folder, and returns memory as it was
            raise ValueError(f"{member.filename} is no plain file")
    return members


def read(path: Path, device: torch.device, *, verify: bool = True) -> dict[str, Any]:
    """Returns what `torch.save` wrote. Raises BadZipFile where a checksum is wrong, and other errors for other damage.

    verify: False where only names and shapes are wanted, so that the elements of tensors are not read.
    """
    import torch

    source = readable(path)
    # torch verifies no checksum
    with zipfile.ZipFile(source) as archive:
        for member in _members(archive):
            if verify or "/data/" not in member.filename:
                with archive.open(member) as file:
                    while file.read(2**20):
                        pass
    if isinstance(source, io.IOBase):
        source.seek(0)
    content: dict[str, Any] = torch.load(source, map_location=device, weights_only=True)
    return content
