"""Takes files out of archives that nobody vouches for.

Only plain files and folders below the target come out. A path that leads elsewhere, a link or a device refuses the
whole archive, whichever part of it was asked for: nothing that we read needs one.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from tasks.data import cache
from tasks.data.faults import DataError

Progress = Callable[[int], None]
"""Called with the number of files that are out."""


def unpack(archive: Path, target: Path, wanted: Sequence[str] = ("",), progress: Progress = lambda files: None) -> int:
    """Unpacks tar (also gz, bz2, xz), zip or a single gz into the new folder target; returns the number of files.

    wanted: prefixes of the paths inside that are taken.
    """
    with _readable(archive), cache.new_folder(target) as folder:
        members = _tar if tarfile.is_tarfile(archive) else _zip if zipfile.is_zipfile(archive) else _gzip
        count = 0
        for name, content in members(archive):
            path = _inside(archive, name)
            if content is None or not any(_below(path, prefix) for prefix in wanted):
                continue
            out = folder / path
            out.parent.mkdir(parents=True, exist_ok=True)
            if out.exists():
                raise DataError(f"{archive}: holds {name!r} twice; fetch another copy.")
            with out.open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
            count += 1
            if count % 100 == 0:
                progress(count)
        if not count:
            raise DataError(
                f"{archive}: holds none of {', '.join(wanted)}; it is another archive, fetch the right one."
            )
        progress(count)
    return count


Members = Iterator[tuple[str, IO[bytes] | None]]
"""Path inside and content; None for a folder."""


def _tar(archive: Path) -> Members:
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            if not (member.isfile() or member.isdir()):
                kind = "link" if member.issym() or member.islnk() else "device"
                raise DataError(f"{archive}: {member.name!r} is a {kind}, which is refused; fetch another copy.")
            yield member.name, tar.extractfile(member) if member.isfile() else None


def _zip(archive: Path) -> Members:
    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            # the upper half holds the Unix mode: 0o10 is a plain file, 0o4 a folder, 0 unknown
            if member.external_attr >> 28 not in (0, 0o4, 0o10):
                raise DataError(f"{archive}: {member.filename!r} is a link or device, which is refused.")
            if member.is_dir():
                yield member.filename, None
                continue
            # reading to the end checks the CRC
            with packed.open(member) as content:
                yield member.filename, content


def _gzip(archive: Path) -> Members:
    with archive.open("rb") as file:
        # an empty file would pass for an empty archive
        if file.read(2) != b"\x1f\x8b":
            raise gzip.BadGzipFile("it is no tar, zip or gz file")
    with gzip.open(archive) as content:
        yield archive.name.removesuffix(".gz"), content  # type: ignore[misc]


def _inside(archive: Path, name: str) -> PurePosixPath:
    """The path below the target; one that leads out of it is an error."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or path.parts[:1] == () or ":" in path.parts[0] or "\0" in name:
        if path == PurePosixPath("."):
            return path
        raise DataError(f"{archive}: {name!r} leads out of its folder, which is refused; fetch another copy.")
    return path


def _below(path: PurePosixPath, prefix: str) -> bool:
    return path.parts[: len(PurePosixPath(prefix).parts)] == PurePosixPath(prefix).parts


@contextlib.contextmanager
def _readable(archive: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{archive}: there is no such file.") from None
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{archive}: damaged or no archive ({reason}); remove it and fetch it again.") from None
