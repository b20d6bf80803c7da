"""Processes that a test starts."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from subquad.suite.environment import import_path

HOME = Path(__file__).parents[1]


def with_subquad(*folders: Path) -> dict[str, str]:
    """The environment of this process, in which `subquad` can be imported, and modules below these folders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([import_path(), *map(str, folders)])}


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The end and the output of a Python process with `subquad`, in the root of the repository."""
    command, surroundings = [sys.executable, "-c", code], with_subquad() | environment
    return subprocess.run(command, cwd=HOME, env=surroundings, capture_output=True, text=True, timeout=240)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until the condition holds, at most so long, and returns whether it did."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
