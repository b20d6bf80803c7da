"""Folders of other git revisions."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path


def git(checkout: Path, *arguments: str) -> bytes | None:
    """The output of git in a checkout, or None where it fails."""
    command = ["git", "-C", str(checkout), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def commit_of(checkout: Path, revision: str) -> str | None:
    """The commit that a branch, a tag or `HEAD~3` names, or None."""
    # git takes a word that begins with a dash for an option
    found = None if revision.startswith("-") else git(checkout, "rev-parse", "--verify", "-q", f"{revision}^{{commit}}")
    return found.decode().strip() if found else None


def extract(checkout: Path, commit: str, folder: Path, *paths: str) -> bool:
    """Writes a commit, or some paths of it, below `folder`. Returns whether the commit has them."""
    archive = git(checkout, "archive", commit, "--", *paths)
    if not archive:
        return False
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return True
