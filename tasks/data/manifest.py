"""The manifest of data sources, `sources.yaml`, checked when it is read."""

from __future__ import annotations

import functools
import os
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import yaml
from pydantic import Field

from subquad.suite.options import Config, parse, read_yaml
from subquad.suite.registry import nearest
from subquad.tasks.data.faults import DataError

HUB = r"hf://datasets/(?P<repository>[^/]+/[^/@]+)@(?P<revision>[0-9a-f]{40})/(?P<path>.+)"
"""Pattern of a file on the hub. Its revision is a commit, because a branch or tag may move."""

PATH = Path(__file__).with_name("sources.yaml")
"""The manifest of this repository."""


class File(Config):
    """One file of a source."""

    url: str = Field(pattern=rf"^(https?://|{HUB}$)")
    """`hf://` names a file of the hub at one commit, which is fetched by the hub's own client."""
    name: str = ""
    """Name of the file in the cache. Empty: the name in the URL."""
    bytes: int | None = Field(gt=0)
    sha256: str | None = Field(pattern=r"^[0-9a-f]{64}$")
    md5: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    hash_source: str = ""
    unpack: tuple[str, ...] = ()
    """Prefixes of the paths that are taken out of an archive. Empty: the file is no archive."""

    @property
    def filename(self) -> str:
        return self.name or PurePosixPath(urlsplit(self.url).path).name

    @property
    def place(self) -> str:
        """The name of the file, with repository and commit for a file of the hub."""
        return self.url.removeprefix("hf://datasets/") if self.url.startswith("hf://") else self.filename


class Source(Config):
    """A data set and where it is published."""

    about: str
    licence: str
    homepage: str
    used_by: tuple[str, ...]
    note: str = ""
    files: tuple[File, ...] = Field(min_length=1)
    hub: tuple[File, ...] = ()
    """The files of the same data set on the hub, which `--from hub` fetches instead."""


def sources() -> dict[str, Source]:
    """The sources by name, in the order of the manifest.

    `SUBQUAD_SOURCES` names another manifest, such as one with the addresses of a mirror.
    """
    return _read(Path(os.environ.get("SUBQUAD_SOURCES") or PATH))


@functools.cache
def _read(path: Path) -> dict[str, Source]:
    where = str(path) if path == PATH else f"SUBQUAD_SOURCES={path}"
    what_to_do = f"name a manifest such as {PATH}, or unset it."
    try:
        known = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise DataError(f"{where}: cannot be read as YAML ({reason}); {what_to_do}") from None
    if not isinstance(known, dict) or not all(
        isinstance(name, str) and isinstance(values, dict) for name, values in known.items()
    ):
        raise DataError(f"{where}: needs the name of every source with its options below it; {what_to_do}")
    try:
        return {name: parse(Source, values, f"{where}: {name}") for name, values in known.items()}
    except ValueError as error:
        raise DataError(f"{error}; correct the file.") from None


def source(name: str) -> Source:
    """The source of this name; a DataError lists the names that exist."""
    if name not in sources():
        raise DataError(f"unknown source {name!r}{nearest(name, sources())}; there are: {', '.join(sources())}.")
    return sources()[name]
