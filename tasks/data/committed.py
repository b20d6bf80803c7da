"""The committed rows of an installation: an archive of the release, which `results pull` brings into the cache.

A checkout has its rows in `results/reference`, and those of others in `submissions`. A wheel names the archive that has
the same in its file `ROWS.json` (`suite/packaging.py`). The archive is downloaded, checked and unpacked as data are,
into the same cache:

    <root>/v1/files/rows/subquad-rows-<sha256>.tar    the download
    <root>/v1/unpacked/rows-<sha256>/                 `results/reference` and `submissions`, as in the repository
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from subquad.suite.identity import file_digest
from subquad.suite.options import Config, parse
from subquad.suite.store.documents import read_object
from subquad.tasks.data import cache
from subquad.tasks.data.download import Progress, check, fetch
from subquad.tasks.data.faults import DataError
from subquad.tasks.data.manifest import File
from subquad.tasks.data.unpack import unpack

SOURCE = "rows"
"""Their name in the cache."""


class Archive(Config):
    """The archive of the rows with which a wheel was built."""

    url: str
    """Its address, or "" where the wheel was built without one."""
    name: str = Field(pattern=r"^subquad-rows-[0-9a-f]{16}\.tar$")
    bytes: int = Field(gt=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    def folder(self) -> Path:
        """The folder of its rows in the cache, which need not be there."""
        return cache.place("unpacked", f"{SOURCE}-{self.sha256[:16]}")


def archive_of(file: Path) -> Archive:
    """The archive that a wheel names in its file `ROWS.json`. ValueError where the file is damaged."""
    try:
        return parse(Archive, read_object(file), str(file))
    except ValueError as error:
        raise DataError(f"{error}; install Subquad anew.") from None


def pull(
    archive: Archive, given: str = "", *, force: bool = False, progress: Progress = lambda done, total: None
) -> Path:
    """Brings the rows of an archive into the cache, unless they are there, and returns their folder.

    given: a file, or an address that begins with http:// or https://, in place of the address in the wheel.
    force: download and unpack them again.

    Raises DataError for what is not this archive, to the byte, and where it cannot be fetched.
    """
    folder = archive.folder()
    with cache.lock(f"source-{SOURCE}"):
        if folder.is_dir() and not force and not given:
            return folder
        if given and not given.startswith(("http://", "https://")):
            path = _given(archive, Path(given))
        elif url := given or archive.url:
            file = File(url=url, name=archive.name, bytes=archive.bytes, sha256=archive.sha256)
            path = cache.place("files", SOURCE, archive.name)
            fetch(file, path, progress, force=force)
            # a download of an earlier call may have been damaged since
            check(path, file)
        else:
            raise DataError(
                f"this build of Subquad does not know where its rows are published; get {archive.name} from a release, "
                "and give --from FILE_OR_URL."
            )
        unpack(path, folder)
        return folder


def _given(archive: Archive, path: Path) -> Path:
    """The archive on this machine. DataError where it is another file."""
    if not path.is_file():
        raise DataError(f"--from {path}: there is no such file; name one, or an address that begins with https://.")
    if (found := file_digest(path)) != archive.sha256:
        raise DataError(
            f"--from {path}: its sha256 is {found}, and the rows of this version have {archive.sha256}; "
            f"get {archive.name}."
        )
    return path
