"""Faults of data. Their message is one line with the file, the reason and what to do; the command line exits with 2."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from suite.contracts import MissingDataError


class DataError(ValueError):
    """Data are missing, damaged, unreachable or not what they should be."""


class NoDataError(DataError, MissingDataError):
    """No data are there: neither in the cache nor named by the user."""


@contextlib.contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turns errors of a full disk or a read-only folder into a DataError that says what to do."""
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
