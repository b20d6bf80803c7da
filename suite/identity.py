"""The identity of a run: a hash of everything that can move its numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NOT_IN_IDS = ("data", "tokenizer")
"""Options of a task that name files."""


def identity(resolved: Mapping[str, Any]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the canonical JSON of a resolved run.

    The folder and the tokenizer that a task reads (`NOT_IN_IDS`) are left out: their paths differ between machines, and
    the fingerprint of their content is a setting of its own.
    """
    if "task" in resolved:
        task = {key: value for key, value in resolved["task"].items() if key not in NOT_IN_IDS}
        resolved = {**resolved, "task": task}
    text = json.dumps(resolved, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """The hash of the content of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def files_digest(paths: Iterable[Path], folder: Path) -> str:
    """Returns the SHA-256, in hexadecimal, of files below a folder: of their names in it and their contents."""
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        with path.open("rb") as file:
            while part := file.read(2**20):
                digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()


def path_digest(path: Path) -> str:
    """The digest of the content of a file, or of all files below a folder; of a path where nothing is, the path."""
    if path.is_dir():
        return files_digest(path.rglob("*"), path)
    return file_digest(path) if path.is_file() else str(path)


def likeness(scale: str, resolved: Mapping[str, Any]) -> tuple[str, str]:
    """Keys that a run shares with runs of about the same duration, from the nearest to the farthest.

    The identity without seed and data; then scale, task and model.
    """
    settings = {name: value for name, value in resolved.items() if name not in ("seed", "data")}
    names = (resolved.get(section, {}).get("name", "") for section in ("task", "model"))
    return identity(settings), " ".join((scale, *names))


def setting_of(config: Mapping[str, Any], without: Iterable[str] = ()) -> str:
    """The settings of a resolved run as text, without the seed, the folder of its data, and the dotted keys `without`.

    A run that was trained first is described by settings; its id has a seed in it and is left out too.
    """
    config = dict(config)
    for key in ("seed", "task.data", "task.tokenizer", "train.init_from.base", *without):
        *sections, name = key.split(".")
        tree = config
        for section in sections:
            if not isinstance(tree.get(section), dict):
                break
            # only what changes is copied; a report describes thousands of runs
            tree[section] = dict(tree[section])
            tree = tree[section]
        else:
            tree.pop(name, None)
    return json.dumps(config, sort_keys=True)
