"""Downloads that resume, and that get their final name only when size and hash are right."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.suite.identity import file_digest
from subquad.tasks.data import cache
from subquad.tasks.data.faults import DataError, disk_faults
from subquad.tasks.data.manifest import File
from subquad.tasks.data.tables import from_hub

if TYPE_CHECKING:
    import requests

Progress = Callable[[int, int | None], None]
"""A function that is called with the number of bytes so far and, if known, with the total."""

ATTEMPTS = 5
CHUNK = 1 << 16
"""Number of bytes written at a time, and so the most that is lost when a connection breaks."""
TIMEOUT_S = (10.0, 60.0)
"""Longest wait for a connection, and between two chunks."""
SPARE = 1 << 30
"""Number of bytes that a download of unknown length leaves free on its disk."""


def fetch(
    file: File,
    target: Path,
    progress: Progress = lambda done, total: None,
    *,
    force: bool = False,
    delay_s: float = 2.0,
) -> dict[str, Any]:
    """Downloads a file to target and returns its record. It continues what an earlier call left in `<target>.part`.

    The record (`<target>.json`) holds URL, size and hashes. Hashes in the manifest are checked. Where the manifest has
    none, the hash of the first download is recorded, and later downloads must have the same.

    force: download anew even if the file is there, and continue nothing. A file that is there is replaced only by a
        download that is complete and checked.
    delay_s: seconds to wait before the second attempt; every further attempt waits twice as long.
    """
    record_path = target.with_name(f"{target.name}.json")
    known = cache.read_json(record_path)
    is_there = target.exists() and known.get("url") == file.url
    if is_there and not force:
        return known
    if cache.offline():
        why = "--force downloads it again" if is_there else "not in the cache"
        raise DataError(f"{file.url}: {why}, and SUBQUAD_OFFLINE forbids the network; unset it.")
    part = target.with_name(f"{target.name}.part")
    with disk_faults(part):
        part.parent.mkdir(parents=True, exist_ok=True)
        if force:
            _forget(part)
        _room(file, part)
        if file.url.startswith("hf://"):
            from_hub(file.url, part)
        else:
            _transfer(file, part, progress, delay_s)
        record = check(part, file, recorded=known.get("sha256"))
        # the record is written first, so that a file with its final name always has one
        cache.write_json(record_path, record)
        part.replace(target)
    _memory(part).unlink(missing_ok=True)
    return record


def check(path: Path, file: File, recorded: str | None = None, *, remove: bool = True) -> dict[str, Any]:
    """The record of the file at path, which should be `file`. Another file is a DataError and, with `remove`, removed.

    recorded: the SHA-256 of an earlier download.
    """
    size = path.stat().st_size
    record = {"url": file.url, "bytes": size, "sha256": file_digest(path), "official": True}
    wanted = [("size", file.bytes, size), ("sha256", file.sha256 or recorded, record["sha256"])]
    if file.md5 is not None:
        wanted.append(("md5", file.md5, file_digest(path, "md5")))
    for what, expected, found in wanted:
        if expected is not None and expected != found:
            whose = "manifest" if file.sha256 or what != "sha256" else "first download"
            if remove:
                _forget(path)
            raise DataError(
                f"{path.name.removesuffix('.part')} from {file.url}: {what} is {found}, the {whose} says {expected}; "
                f"{'it was removed; give the command again' if remove else 'prepare again with --force'}. "
                f"If it stays so, the host serves another file: see docs/data.md."
            )
    return record


def _memory(part: Path) -> Path:
    """The file that keeps the server's version tag of a partial download."""
    return part.with_name(f"{part.name}.json")


def _forget(part: Path) -> None:
    """Removes a partial download and what is known about it."""
    part.unlink(missing_ok=True)
    _memory(part).unlink(missing_ok=True)


def _room(file: File, part: Path) -> None:
    """Raises a DataError where the disk has no room for the missing bytes."""
    there = part.stat().st_size if part.exists() else 0
    free = shutil.disk_usage(part.parent).free
    if file.bytes is not None and file.bytes - there > free:
        raise DataError(
            f"{file.filename}: {file.bytes - there:,} bytes are missing and {part.parent} has {free:,} free; "
            f"free some, or set SUBQUAD_DATA to a folder on another disk."
        )


def _check_room(file: File, part: Path, done: int, total: int | None) -> None:
    """Raises a DataError for a body without end: longer than it was said to be, or than a disk that stays usable."""
    if total is not None and done > total:
        _forget(part)
        raise DataError(
            f"{file.url}: the server sends more than the {total:,} bytes of the file; fetch it from the homepage and "
            f"give --from FILE."
        )
    # asked once in 64 MiB
    if total is None and done % (1 << 26) < CHUNK and shutil.disk_usage(part.parent).free < SPARE:
        raise DataError(
            f"{file.url}: {done:,} bytes came, their end is not known, and {part.parent} has less than {SPARE:,} free; "
            f"free some, or set SUBQUAD_DATA to a folder on another disk."
        )


def _check_kind(file: File, answer: requests.Response) -> None:
    """Raises a DataError for a page in place of a file, and for a body that was packed though nobody asked for it."""
    kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind in ("text/html", "application/xhtml+xml") and not file.filename.endswith((".html", ".htm")):
        raise DataError(
            f"{file.url}: the server sends a page ({kind}) in place of the file; fetch it from the homepage and give "
            f"--from FILE."
        )
    packed = answer.headers.get("Content-Encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        raise DataError(
            f"{file.url}: the server packs the file ({packed}), so its bytes cannot be checked; fetch it yourself and "
            f"give --from FILE."
        )


def _length(text: str | None) -> int | None:
    """The number in the header Content-Length; None where there is none."""
    number = (text or "").strip()
    return int(number) if number.isascii() and number.isdigit() and len(number) < 19 else None


def _transfer(file: File, part: Path, progress: Progress, delay_s: float) -> None:
    """Downloads to part. After a broken connection it tries again and continues where the connection broke."""
    import requests

    reason = ""
    with requests.Session() as session:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(delay_s * 2.0 ** (attempt - 1))
            try:
                _one_transfer(session, file, part, progress)
                return
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
                reason = _innermost(error)
            except DataError:
                raise
            except (requests.RequestException, ValueError, UnicodeError) as error:
                # a redirect loop, a header that is none, an address that leads nowhere: it is so again next time
                reason = " ".join(str(error).split())[:200]
                raise DataError(
                    f"{file.url}: the answer cannot be used ({type(error).__name__}: {reason}); fetch the file "
                    f"yourself and give --from FILE."
                ) from None
    raise DataError(
        f"{file.url}: cannot be reached or broke off {ATTEMPTS} times ({reason}); give the command again later to "
        f"continue, or fetch it yourself and give --from FILE."
    )


def _innermost(error: Exception) -> str:
    """Why a request failed, in one line. The messages around it repeat the address and that there were attempts."""
    inner = getattr(error.args[0] if error.args else None, "reason", None)
    return " ".join(str(inner or error).split())[:200]


def _one_transfer(session: requests.Session, file: File, part: Path, progress: Progress) -> None:
    """One attempt to download what is missing in part."""
    import requests

    there = part.stat().st_size if part.exists() else 0
    version = cache.read_json(_memory(part)).get("version", "")
    # a partial file may be continued only with bytes of the same version, or where a hash is checked in the end
    if there and not (version or file.sha256 or file.md5):
        there = 0
    # offsets would have no meaning in a compressed transfer
    headers = {"Accept-Encoding": "identity", "User-Agent": "subquad"}
    if there:
        headers["Range"] = f"bytes={there}-"
        if version:
            headers["If-Range"] = version
    with session.get(file.url, headers=headers, stream=True, timeout=TIMEOUT_S) as answer:
        if answer.status_code == 416:
            # the requested range begins at or behind the end: the download is complete, or the file has changed
            if answer.headers.get("Content-Range", "") == f"bytes */{there}":
                return
            _forget(part)
            raise requests.ConnectionError("the partial file does not belong to what the server has now")
        if answer.status_code >= 500 or answer.status_code == 429:
            raise requests.ConnectionError(f"the server answered {answer.status_code}")
        if answer.status_code not in (200, 206):
            raise DataError(
                f"{file.url}: the server answered {answer.status_code} {answer.reason}; fetch the file from the "
                f"homepage or another mirror and give --from FILE."
            )
        resumed = answer.status_code == 206
        if resumed and not answer.headers.get("Content-Range", "").startswith(f"bytes {there}-"):
            _forget(part)
            raise requests.ConnectionError("the server sent another range than was asked for")
        start = there if resumed else 0
        _check_kind(file, answer)
        length = _length(answer.headers.get("Content-Length"))
        total = start + length if length is not None else file.bytes
        if file.bytes is not None and total is not None and total != file.bytes:
            raise DataError(
                f"{file.url}: the server offers {total:,} bytes, the manifest says {file.bytes:,}; it is another "
                f"file (or a page about it). Fetch it from the homepage and give --from FILE."
            )
        found = answer.headers.get("ETag", "")
        # equal weak tags do not mean equal bytes
        found = answer.headers.get("Last-Modified", "") if found.startswith("W/") or not found else found
        cache.write_json(_memory(part), {"url": file.url, "version": found})
        done = start
        with part.open("ab" if resumed else "wb") as out:
            for chunk in answer.iter_content(CHUNK):
                done += len(chunk)
                _check_room(file, part, done, total)
                out.write(chunk)
                progress(done, total)
        if not done:
            raise requests.ConnectionError("the server sent nothing")
        if total is not None and done < total:
            raise requests.ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")
