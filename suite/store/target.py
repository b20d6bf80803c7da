"""Places of results: a folder, or any place that fsspec can write to, by its address (`s3://bucket/folder`).

A place that is not a folder of this machine is a `UPath` of universal_pathlib, which has the methods of
`pathlib.Path`. What the two do not share stands here: files that appear whole, that only one process can create, and
that are renewed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from subquad.suite.environment import with_extra

STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "memory")
"""Protocols of object stores, which have no folders to be made."""


def target(text: str | Path) -> Path:
    """The place of this name. ValueError for an empty one, and for an address that cannot be used here."""
    if text == "":
        # as a path it would be the working directory
        raise ValueError("the name of a folder is empty; name one, or leave it out")
    if isinstance(text, Path) or "://" not in str(text):
        return Path(text)
    address = str(text)
    if address.startswith(("http://", "https://")):
        raise ValueError(
            f"{address}: a web page holds no folder; name a folder, or a bucket such as s3://bucket/folder"
        )
    try:
        from upath import UPath

        # a listing that was kept would not show what other machines write
        place = UPath(address, use_listings_cache=False)
        _ = place.fs
        if place.protocol in STORES and not place.path.strip("/"):
            raise ValueError("the name of the bucket is missing")
    except ImportError as error:
        raise ValueError(f"{address} needs {error.name or error}; install the extra: {with_extra('s3')}.") from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{address}: {reason}; name a folder, or a bucket such as s3://bucket/folder") from None
    return cast(Path, place)


def is_remote(path: Path) -> bool:
    """Whether a path is none of this machine's file system."""
    return not isinstance(path, Path)


class StoreError(OSError):
    """A remote place that cannot be reached or used."""


@contextlib.contextmanager
def as_oserror(path: Path) -> Iterator[None]:
    """Errors of a remote place as OSError, as those of a folder are; each library has its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise StoreError(f"{path}: {' '.join(str(error).split())[:200]}") from error


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, where there are folders."""
    if not (is_remote(folder) and _protocol(folder) in STORES):
        folder.mkdir(parents=True, exist_ok=True)


def is_folder(path: Path) -> bool:
    """Whether there is a folder. Raises OSError where that cannot be asked."""
    with as_oserror(path):
        return path.is_dir()


def files_like(folder: Path, pattern: str) -> list[Path]:
    """The sorted paths below a folder that fit a pattern of `Path.glob`.

    Raises OSError where the folder, or one below it that the pattern asks for, cannot be read.
    """
    with as_oserror(folder):
        if not is_remote(folder):
            # `Path.glob` takes a folder that it may not read for an empty one
            above = pattern.rpartition("/")[0]
            for place in [folder, *(folder.glob(f"{above}/") if above else ())]:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.scandir(place).close()
        return sorted(folder.glob(pattern))


def _protocol(path: Path) -> str:
    return str(cast(Any, path).protocol)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path whose file takes the place of `path` at the end; after an error, nothing is left of it.

    A link is replaced, and not what it points to. A device, a pipe, and a name for an open file such as /dev/stdout are
    written themselves. What has its final name is on the disk: it outlives a loss of power.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder, path.name)
            yield temporary
            with as_oserror(path):
                make_folder(path.parent)
                cast(Any, path).fs.put_file(str(temporary), cast(Any, path).path)
        return
    make_folder(path.parent)
    # /dev/stdout is a link in a folder of the system, which nobody wants to lose, to a file if output goes to one
    is_open = str(path.parent) in ("/dev", "/dev/fd", "/proc/self/fd") and path.is_file()
    if is_open or (path.exists() and not path.is_file() and not path.is_dir()):
        yield path
        return
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    # the name is new, so nobody can have put a link there
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk, where the file system can tell."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # some file systems know this for no folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def private_folder(name: str) -> Path | None:
    """A folder of this name for temporary files that only this user can read and write, or None if another has it."""
    folder = Path(tempfile.gettempdir(), name)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    known = folder.lstat()
    ours = stat.S_ISDIR(known.st_mode) and known.st_uid == os.getuid() and not stat.S_IMODE(known.st_mode) & 0o077
    return folder if ours else None


@contextlib.contextmanager
def writable(flag: str, path: Path) -> Iterator[None]:
    """Makes a ValueError of an OSError that arises while the file or folder given by an option is written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written ({error.strerror or error})") from None


def probe(root: Path) -> None:
    """Raises OSError unless files can be written below the place; a folder is made if it is missing."""
    if not is_remote(root):
        make_folder(root)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(bytes(4096))
        return
    with as_oserror(root):
        path = root / f".probe.{uuid.uuid4().hex}"
        make_folder(root)
        path.write_bytes(bytes(16))
        path.unlink()


def readable(path: Path) -> Path | BinaryIO:
    """The path of a file, or its bytes where it is remote, for libraries that read either."""
    if not is_remote(path):
        return path
    with as_oserror(path):
        return io.BytesIO(path.read_bytes())


def create(path: Path, text: str) -> bool:
    """Creates a file, which only one process can do. Returns whether this one did."""
    try:
        if is_remote(path):
            with as_oserror(path):
                cast(Any, path).fs.pipe_file(cast(Any, path).path, text.encode(), mode="create")
        else:
            with path.open("x") as file:
                file.write(text)
    except FileExistsError:
        return False
    return True


def renew(path: Path) -> None:
    """Sets the time of a file to now."""
    if is_remote(path):
        with as_oserror(path):
            path.write_bytes(path.read_bytes())
    else:
        os.utime(path)


def time_at(folder: Path) -> float:
    """The time that a new file gets there, or that of this machine where nothing can be written."""
    try:
        if is_remote(folder):
            with as_oserror(folder):
                path = folder / f".time.{uuid.uuid4().hex}"
                path.write_bytes(b"")
                known = path.stat().st_mtime
                path.unlink()
                return known
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def stamp(path: Path) -> tuple[str, ...] | None:
    """A value that changes whenever a file is replaced; None where there is none."""
    try:
        if is_remote(path):
            with as_oserror(path):
                return (str(cast(Any, path).fs.ukey(cast(Any, path).path)),)
        known = path.stat()
    except FileNotFoundError:
        return None
    return str(known.st_mtime_ns), str(known.st_ino)
