"""The cache of downloads and prepared arrays, which several processes may use at once.

    <root>/v1/files/<source>/<name>         a complete download, and <name>.json with its size and hash
    <root>/v1/unpacked/<source>-<sha256>/   what was unpacked from it
    <root>/v1/prepared/<task>-<key>/        arrays ready to train on; the key is a hash of content and options
    <root>/v1/index/                        hashes of folders, so that unchanged folders are not read again

Everything is written under a temporary name and then renamed, so that what has its final name is complete. A process
that writes holds a file lock. `v1` changes when this layout does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subquad.suite.identity import file_digest
from subquad.suite.store.documents import read_object
from subquad.suite.store.target import replacing
from subquad.tasks.data.faults import DataError, disk_faults

VERSION = "v1"


def root() -> Path:
    """The folder of the cache: `SUBQUAD_DATA`, or else `subquad` in the user's cache folder (XDG)."""
    if named := os.environ.get("SUBQUAD_DATA"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification says that a relative path must be ignored
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "subquad"


def place(*parts: str) -> Path:
    """A path in the cache with the present layout."""
    return root() / VERSION / Path(*parts)


def offline() -> bool:
    """Whether `SUBQUAD_OFFLINE` forbids the network."""
    return os.environ.get("SUBQUAD_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Holds the lock of this name, which only one process can hold. It is released when its process ends."""
    from filelock import FileLock

    path = place("locks", f"{name.replace('/', '-')}.lock")
    with disk_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(path)
        held.acquire()
    try:
        yield
    finally:
        held.release()


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Gives a temporary folder that is renamed to target when the block ends, or removed when the block raises.

    The caller holds the lock of target, so temporary folders that are already there were left by a killed process.
    """
    with disk_faults(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".{target.name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        # `tempfile` makes a folder that only its owner may read, and users may share a cache
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        temporary.mkdir()
        try:
            yield temporary
            if target.exists():
                shutil.rmtree(target)
            os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file completely or not at all."""
    with disk_faults(path), replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes values as JSON, completely or not at all."""
    write_bytes(path, json.dumps(values, indent=1, sort_keys=True).encode())


def read_json(path: Path) -> dict[str, Any]:
    """The values in a JSON file; empty where the file is missing or cannot be read."""
    try:
        return read_object(path)
    except ValueError:
        return {}


def files_in(folder: Path, *suffixes: str) -> list[Path]:
    """The files of a folder with one of these endings, in any case, sorted by name. It is fast for 100,000 files.

    Hidden ones are left out: systems leave files of their own beside a user's, such as `._1.wav`.
    """
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name.lower().endswith(suffixes))
    return [folder / name for name in names if not hidden(name)]


def hidden(name: str) -> bool:
    """Whether a file or folder of this name is no part of the data, such as `.ipynb_checkpoints` or `__MACOSX`."""
    return name.startswith(".") or name == "__MACOSX"


def folder_hash(base: Path, files: list[Path], *, fresh: bool = False) -> str:
    """SHA-256 over names below base, sizes and contents of files; it does not depend on where the folder lies.

    Contents are read once: the result is kept together with names, sizes, times of change and inode numbers, and is
    used again while these stay the same.

    fresh: read the contents again in any case.
    """
    look = hashlib.sha256()
    for name, path in _named(base, files):
        with _readable(path):
            seen = os.stat(path)
        look.update(f"{name} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns} {seen.st_ino}\n".encode())
    where = hashlib.sha256(str(base.resolve()).encode()).hexdigest()[:16]
    memory = place("index", f"{where}-{len(files)}.json")
    known = read_json(memory)
    if not fresh and known.get("look") == look.hexdigest():
        return str(known["content"])
    content = content_hash(base, files)
    # whoever may not write here reads them each time
    with contextlib.suppress(DataError):
        write_json(memory, {"base": str(base), "look": look.hexdigest(), "content": content})
    return content


def content_hash(base: Path, files: list[Path]) -> str:
    """The hash of `folder_hash`, of files that are read now."""
    total = hashlib.sha256()
    for name, path in _named(base, files):
        with _readable(path):
            total.update(f"{name} {os.stat(path).st_size} {file_digest(Path(path))}\n".encode())
    return total.hexdigest()


def _named(base: Path, files: list[Path]) -> Iterator[tuple[str, str]]:
    """Names below base and paths of files, sorted."""
    start = len(str(base)) + 1
    for path in sorted(map(str, files)):
        yield path[start:].replace(os.sep, "/"), path


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Makes a DataError of an OSError that arises while a file is read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); restore the file.") from None
