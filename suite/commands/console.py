"""The consoles on which commands print: one for their tables, and one for a grid that must not end with its output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, cast

from subquad.suite.options import visible

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 100_000
"""Characters of a line that no table needs."""


def table_console() -> Console:
    """The console is as wide as the terminal. A pipe or a file has no width: a cut number is worse than a long line."""
    # rich takes a tenth of a second to import
    from rich.console import Console

    return Console(width=_width())


def _width() -> int | None:
    """Returns the width of a console on standard output; None means that of the terminal."""
    return None if sys.stdout is not None and sys.stdout.isatty() else UNLIMITED


def skipped(reason: str) -> None:
    """Says that a file is left out. reason: a sentence that names it."""
    print(f"skipped: {visible(reason)}", file=sys.stderr)


def lost_output(text: str = "") -> bool:
    """Returns whether standard output, with this text, cannot be written; then the process can end without it.

    One line says why, unless its reader has ended (`| head`).
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _send_nowhere(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            print(f"error: standard output cannot be written ({error.strerror or error})", file=sys.stderr)
        return True
    return False


def _send_nowhere(stream: IO[str]) -> None:
    # Python writes what it has buffered at the end of the process, which would fail as well
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def lasting_console(quiet: bool = False) -> Console:
    """Returns a console for a grid, which goes on where standard output is closed (`| head`) or its disk is full."""
    from rich.console import Console

    file = None if sys.stdout is None else cast(IO[str], _Lasting(sys.stdout))
    return Console(quiet=quiet, file=file, width=_width())


class _Lasting:
    """A stream whose errors of writing end its output alone, with one line on standard error."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._kept_going():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._kept_going():
            self.stream.flush()

    @contextlib.contextmanager
    def _kept_going(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.is_lost:
                return
            self.is_lost = True
            _send_nowhere(self.stream)
            with contextlib.suppress(OSError):
                reason = error.strerror or error
                print(f"standard output cannot be written ({reason}); the runs go on without it", file=sys.stderr)
