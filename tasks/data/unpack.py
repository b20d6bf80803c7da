"""Safe unpacking of untrusted archives.

Only plain files and folders below the target are written. An archive that contains a path out of the target, a link or
a device is refused as a whole, even where that part is not wanted; no data set needs one.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import lzma
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Literal, Self

from subquad.tasks.data import cache
from subquad.tasks.data.faults import DataError

DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, struct.error),
    # the libraries raise these for a member that is encrypted or packed by an unknown method, a size that no file has
    *(RuntimeError, OverflowError),
)
"""Exceptions that reading a damaged archive raises."""

GZIP = b"\x1f\x8b"
"""The first bytes of a gz."""

MOST_RATIO = 200
"""Largest ratio of what an archive holds to its own size. That of text is at most 20, that of zeros 1000 and more."""
MOST_FREE = 1 << 26
"""Number of bytes that an archive may hold whatever its size."""

Progress = Callable[[int], None]
"""A function that is called with the number of files unpacked so far."""


def unpack(archive: Path, target: Path, wanted: Sequence[str] = ("",), progress: Progress = lambda files: None) -> int:
    """Unpacks a tar (also gz, bz2, xz), a zip or a single gz into the new folder target. Returns the number of files.

    wanted: prefixes of the paths in the archive that are unpacked.
    """
    with _readable(archive), cache.new_folder(target) as folder:
        members = _tar if _is_tar(archive) else _zip if zipfile.is_zipfile(archive) else _gzip
        count, bounded = 0, _Bounded(archive)
        for name, content in members(archive):
            path = _inside(archive, name)
            if content is None or not any(_below(path, prefix) for prefix in wanted):
                continue
            with _room_for(archive, name, folder / path) as file:
                bounded.content = content
                shutil.copyfileobj(bounded, file, 1 << 20)
            count += 1
            if count % 100 == 0:
                progress(count)
        if not count:
            raise DataError(
                f"{archive}: holds none of {', '.join(wanted)}; it is another archive, fetch the right one."
            )
        progress(count)
    return count


class _Bounded:
    """The members of an archive, read one after the other: a DataError where they are far larger than the archive."""

    def __init__(self, archive: Path) -> None:
        self.archive, self.left = archive, MOST_RATIO * archive.stat().st_size + MOST_FREE
        self.content: IO[bytes] | None = None

    def read(self, size: int = -1, /) -> bytes:
        assert self.content is not None
        block = self.content.read(size)
        self.left -= len(block)
        if self.left < 0:
            raise DataError(f"{self.archive}: holds more than {MOST_RATIO} times its own size, as no data set does.")
        return block


Members = Iterator[tuple[str, IO[bytes] | None]]
"""The path in the archive and the content of every member; the content of a folder is None."""


@contextlib.contextmanager
def _room_for(archive: Path, name: str, path: Path) -> Iterator[IO[bytes]]:
    """A new file for a member of an archive."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("xb")
    except (FileExistsError, NotADirectoryError):
        raise DataError(f"{archive}: holds {name!r} twice or below a file; fetch another copy.") from None
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL):
            raise
        raise DataError(f"{archive}: {name[:60]!r}... is no name of a file here ({error.strerror}).") from None
    with file:
        yield file


class _Member(tarfile.TarInfo):
    """A member whose damaged header is an error. The library takes it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            # the end is a block of zeros
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise tarfile.ReadError(f"{error} at byte {tarfile_.offset}") from None


def _opened(archive: Path) -> tarfile.TarFile:
    """The tar, packed or not. TarError where it is none."""
    with archive.open("rb") as file:
        # the packed bytes of a gz can by chance have the checksum of a tar's header, which is a sum
        mode: Literal["r:gz", "r:*"] = "r:gz" if file.read(2) == GZIP else "r:*"
    return tarfile.open(archive, mode, tarinfo=_Member)


def _is_tar(archive: Path) -> bool:
    try:
        _opened(archive).close()
    except tarfile.TarError:
        return False
    return True


def _tar(archive: Path) -> Members:
    with _opened(archive) as tar:
        for member in tar:
            if not (member.isfile() or member.isdir()):
                kind = "link" if member.issym() or member.islnk() else "device"
                raise DataError(f"{archive}: {member.name!r} is a {kind}, which is refused; fetch another copy.")
            if member.issparse():
                # it may say that it has any size
                raise DataError(f"{archive}: {member.name!r} has holes, which is refused; fetch another copy.")
            yield member.name, tar.extractfile(member) if member.isfile() else None
        assert tar.fileobj is not None
        # a header that was overwritten with zeros looks like the end, but something follows it
        while block := tar.fileobj.read(1 << 20):
            if block.strip(b"\0"):
                raise tarfile.ReadError("something follows its end")


def _zip(archive: Path) -> Members:
    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            # the upper half holds the Unix mode: 0o10 means a plain file, 0o4 a folder, 0 unknown
            if member.external_attr >> 28 not in (0, 0o4, 0o10):
                raise DataError(f"{archive}: {member.filename!r} is a link or device, which is refused.")
            if member.is_dir():
                yield member.filename, None
                continue
            # the CRC is checked when the content has been read to its end
            with packed.open(member) as content:
                yield member.filename, content


def _gzip(archive: Path) -> Members:
    with archive.open("rb") as file:
        # otherwise an empty file would be accepted as an empty archive
        if file.read(2) != GZIP:
            raise gzip.BadGzipFile("it is no tar, zip or gz file")
    with gzip.open(archive) as content:
        name = archive.stem if archive.suffix.lower() == ".gz" else archive.name
        yield name, content  # type: ignore[misc]


def _inside(archive: Path, name: str) -> PurePosixPath:
    """The path of a member below the target. A path that leads out of the target is a DataError."""
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
    """Turns errors of a missing or damaged archive into a DataError."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{archive}: there is no such file.") from None
    except (OSError, *DAMAGE) as error:
        # a damaged archive leads to places that it does not have; any other fault of the system is none of it
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{archive}: damaged or no archive ({reason}); remove it and fetch it again.") from None
