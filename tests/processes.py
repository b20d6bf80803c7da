"""The environment of a process that a test starts."""

import os
from pathlib import Path

from subquad.suite.environment import import_path


def with_subquad(*folders: Path) -> dict[str, str]:
    """The environment of this process, in which `subquad` can be imported, and modules below these folders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([import_path(), *map(str, folders)])}
