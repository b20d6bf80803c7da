"""Faults of data: one line that names the file, the reason and what to do; the command line exits with 2 on them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path


class DataError(ValueError):
    """Data that are missing, damaged, out of reach, or not what they should be."""


@contextlib.contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Says what to do where the disk is full or a folder cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"{path}: no space left on the disk; free some, or set SUBQUAD_DATA to a folder on another one."
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DataError(
                f"{path}: cannot be written ({error.strerror}); set SUBQUAD_DATA to a folder of yours."
            ) from None
        raise
