"""Data from outside: sources and their hashes, downloads that resume, safe unpacking, and a cache.

A task names its source. `obtain` brings a source into the cache, and `find` gives the folder with the official layout,
which the user has named or which is in the cache. `docs/data.md` describes this for users.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from subquad.suite.environment import CALL
from subquad.suite.identity import file_digest
from subquad.tasks.data import cache
from subquad.tasks.data.download import check, fetch
from subquad.tasks.data.faults import DataError, NoDataError, disk_faults, needed
from subquad.tasks.data.manifest import File, Source, source, sources
from subquad.tasks.data.unpack import unpack

__all__ = [
    "DataError",
    "File",
    "NoDataError",
    "Source",
    "Watch",
    "find",
    "needed",
    "obtain",
    "source",
    "sources",
    "state",
    "taken_from",
    "verify_source",
]


class Watch(Protocol):
    """A function that is told how far a long step is: its name, how much is done, and how much there is in all."""

    def __call__(self, what: str, done: int, total: int | None) -> None: ...


def _silent(what: str, done: int, total: int | None) -> None:
    pass


def state(name: str) -> dict[str, Any]:
    """The folder of a source in the cache and the records of its files; empty where the source is not prepared."""
    kept = cache.read_json(cache.place("sources", f"{name}.json"))
    if kept and not cache.place("unpacked", str(kept.get("folder"))).is_dir():
        return {}
    return kept


def taken_from(name: str, kept: dict[str, Any]) -> tuple[File, ...]:
    """The files of the manifest that a prepared source was made of; kept is its state."""
    from_hub = any(record.get("url", "").startswith("hf://") for record in kept.get("files", ()))
    return source(name).hub if from_hub else source(name).files


def folder(name: str) -> Path | None:
    """The folder of an unpacked source in the cache, or None."""
    kept = state(name)
    return cache.place("unpacked", str(kept["folder"])) if kept else None


def obtain(
    name: str, archives: Sequence[Path] = (), *, force: bool = False, watch: Watch = _silent
) -> tuple[Path, dict[str, Any]]:
    """Downloads and unpacks a source, or unpacks archives that the user has. Returns its folder and its state.

    A source that is prepared is left as it is, unless there are archives or `force` is set. The archive `hub` stands
    for the edition of the source on the hub.
    """
    wanted = source(name)
    with cache.lock(f"source-{name}"):
        kept = state(name)
        if kept and not archives and not force:
            return cache.place("unpacked", str(kept["folder"])), kept
        if list(archives) == [HUB]:
            if not wanted.hub:
                there = ", ".join(other for other, known in sources().items() if known.hub)
                raise DataError(f"--from hub: the manifest knows no place of {name} on the hub; it does of {there}.")
            taken = _fetched(name, wanted.hub, force, watch)
        else:
            taken = _given(wanted, archives) if archives else _fetched(name, wanted.files, force, watch)
        # the name depends on the chosen members, so that another choice does not find the folder of an older one
        text = "".join(f"{record['sha256']} {file.unpack}\n" for file, _, record in taken)
        target = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        path = cache.place("unpacked", target)
        if force or not path.is_dir():
            _unpack(taken, path, watch)
        kept = {"folder": target, "files": [record for _, _, record in taken]}
        cache.write_json(cache.place("sources", f"{name}.json"), kept)
        return path, kept


HUB = Path("hub")
"""The archive that stands for the edition on the hub."""

Taken = list[tuple[File, Path, dict[str, Any]]]
"""Files of a source: the entry of the manifest, the file on this machine, and its record."""


def _fetched(name: str, files: Sequence[File], force: bool, watch: Watch) -> Taken:
    """The files of a source, downloaded into the cache."""
    taken: Taken = []
    for file in files:
        target = cache.place("files", name, file.filename)

        def progress(done: int, total: int | None, what: str = file.filename) -> None:
            watch(f"fetch {what}", done, total)

        taken.append((file, target, fetch(file, target, progress, force=force)))
    return taken


def _given(wanted: Source, archives: Sequence[Path]) -> Taken:
    """Copies that the user has, in the order of the source's files; a record says whether a copy is official."""
    if len(archives) != len(wanted.files):
        names = ", ".join(file.filename for file in wanted.files)
        raise DataError(f"--from: {len(archives)} given, this source has {len(wanted.files)} ({names}); give all.")
    taken: Taken = []
    for file, path in zip(wanted.files, archives, strict=True):
        if not path.is_file():
            raise DataError(
                f"--from {path}: there is no such file; name an archive that you have, or leave out --from to download"
            )
        record = {"url": "", "name": path.name, "bytes": path.stat().st_size, "sha256": file_digest(path)}
        record["official"] = file.sha256 is not None and record["sha256"] == file.sha256
        taken.append((file, path, record))
    return taken


def _unpack(taken: Taken, target: Path, watch: Watch) -> None:
    """Unpacks the files of a source into one new folder."""
    with cache.new_folder(target) as whole:
        for file, path, record in taken:

            def progress(files: int, what: str = path.name) -> None:
                watch(f"unpack {what} (files)", files, None)

            # a copy may have another layout than the official file, and then everything in it is unpacked
            attempts = [file.unpack] if record.get("official") or not file.unpack else [file.unpack, ("",)]
            if not file.unpack:
                with disk_faults(whole):
                    shutil.copyfile(path, whole / path.name)
                continue
            part = whole / ".part"
            for last, members in enumerate(attempts, start=1):
                try:
                    unpack(path, part, members, progress)
                    break
                except DataError as error:
                    if "holds none of" not in str(error) or last == len(attempts):
                        raise
            for child in part.iterdir():
                if (whole / child.name).exists():
                    raise DataError(f"{path}: {child.name} is in two archives of this source; fetch another copy.")
                child.rename(whole / child.name)
            part.rmdir()


def verify_source(name: str) -> list[str]:
    """Compares the downloads in the cache with the manifest and with their records. Returns one line per file."""
    found = []
    kept = state(name)
    for file in taken_from(name, kept):
        path = cache.place("files", name, file.filename)
        record = cache.read_json(path.with_name(f"{path.name}.json"))
        if not path.exists():
            copies = [known for known in kept.get("files", ()) if not known.get("url")]
            told = (
                f"taken from {copies[0]['name']}, sha256 {copies[0]['sha256'][:12]}" if copies else "not in the cache"
            )
            found.append(f"{file.filename}: {told}")
            continue
        check(path, file, recorded=record.get("sha256"), remove=False)
        against = "manifest" if file.sha256 or file.md5 else "first download"
        found.append(f"{file.filename}: size and hash are those of the {against}")
    return found


def find(
    task: str,
    data: Path | None,
    source_name: str,
    names: Sequence[str],
    holds: Callable[[Path], bool],
    layout: str,
    prepared_by: str = "",
) -> Path:
    """The folder with the official layout: `data` or a folder below it with a usual name, or else the one in the cache.

    holds: tells whether a folder has the layout.
    layout: describes the layout in words, for messages.
    prepared_by: the arguments of `data prepare` that fetch this source; by default the task alone.
    """
    base = data if data is not None else folder(source_name)
    if base is None:
        call = f"{CALL} data prepare {prepared_by or task}"
        raise NoDataError(f"{task}: no data; call `{call}`, or give --data DIR ({layout}).")
    for name in ("", *names):
        if (base / name).is_dir() and holds(base / name):
            return base / name
    raise DataError(
        f"{task}: {base} does not hold {layout}, also not in {', '.join(names) or 'a folder below'}; "
        f"give another --data DIR or prepare anew."
    )
