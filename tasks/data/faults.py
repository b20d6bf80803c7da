"""Faults of data. Their message is one line with the file, the reason and what to do; the command line exits with 2."""

from __future__ import annotations

import contextlib
import errno
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subquad.suite.contracts import MissingDataError
from subquad.suite.environment import with_extra


class DataError(ValueError):
    """Data are missing, damaged, unreachable or not what they should be."""


class NoDataError(DataError, MissingDataError):
    """No data are there: neither in the cache nor named by the user."""


def needed(module: str, use: str, extra: str) -> Any:
    """Imports an optional module. A DataError says what needs it and which extra of this package brings it."""
    try:
        return importlib.import_module(module)
    # a build for other versions of its libraries fails while it is loaded
    except (ImportError, OSError, AttributeError) as error:
        name = {"sklearn": "scikit-learn"}.get(name := module.partition(".")[0], name)
        reason = " ".join(str(error).split())
        raise DataError(f"{use} needs {name} ({reason}); install the extra: {with_extra(extra)}.") from None


@contextlib.contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turns errors of a full disk or of a folder that cannot be written into a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"{path}: no space left on the disk; free some, or set SUBQUAD_DATA to a folder on another one."
            ) from None
        # the last three: a file or an impossible name in place of a folder
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG):
            raise DataError(
                f"{path}: cannot be written ({error.strerror}); set SUBQUAD_DATA to a folder of yours."
            ) from None
        raise
