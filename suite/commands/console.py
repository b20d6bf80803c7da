"""The console on which commands print their tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 100_000
"""Characters of a line that no table needs."""


def table_console() -> Console:
    """As wide as the terminal. A pipe or a file has no width, and a cut number is worse than a long line there."""
    # rich takes a tenth of a second to import
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=UNLIMITED)
