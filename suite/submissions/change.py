"""Checks that a revision, such as the head of a pull request, changes the folder of one submission alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from subquad.suite.registry import few
from subquad.suite.store.revisions import commit_of, extract, git
from subquad.suite.submissions.folder import LARGEST_PART, MANIFEST, NAME, REPEATED, files_in, read_manifest, unexpected


def taken_from(checkout: Path, home: str, revision: str, place: Path) -> Path:
    """Writes the submission that a revision changes below a folder, and returns where. ValueError for another change.

    home: the folder of the submissions, within the checkout. The revision is compared with the commit where it left
    HEAD; what is checked out stays as it is.
    """
    commit = commit_of(checkout, revision)
    if commit is None:
        raise ValueError(f"--revision {revision}: this checkout has no such commit")
    listed = git(checkout, "diff", "--name-only", "--no-renames", "-z", f"HEAD...{commit}")
    if listed is None:
        raise ValueError(f"--revision {revision}: has no commit in common with HEAD; fetch its history, too")
    name = _the_one(home, revision, [text for text in listed.decode(errors="replace").split("\0") if text])
    within = f"{home}/{name}"
    _check_tree(checkout, commit, within)
    if not extract(checkout, commit, place, within) or not (place / within / MANIFEST).is_file():
        raise ValueError(f"{within}: has no {MANIFEST}; `submit` writes it")
    folder = place / within
    # a file .gitattributes can keep others out of what is extracted, so names are taken from the commit
    there = (git(checkout, "ls-tree", "-r", "-z", "--name-only", commit, f"{within}/") or b"").decode(errors="replace")
    names = [text.removeprefix(f"{within}/") for text in there.split("\0") if text]
    if strange := unexpected(names, read_manifest(folder)):
        raise ValueError(f"{within}: {few(strange)} belongs to no submission; remove it")
    if sorted(names) != files_in(folder):
        raise ValueError(f"{within}: its files cannot be extracted; commit them as they are")
    return folder


def _the_one(home: str, revision: str, changed: Sequence[str]) -> str:
    """The name of the one submission to which all changed files belong."""
    found = {match[1] for text in changed if (match := re.match(f"{re.escape(home)}/({NAME})/.", text))}
    others = [text for text in changed if not re.match(f"{re.escape(home)}/{NAME}/.", text)]
    if others:
        raise ValueError(
            f"{revision} also changes {few(others)}; a submission changes {home}/<name>/ alone, so put the rest into "
            "a pull request of its own"
        )
    if len(found) != 1:
        raise ValueError(f"{revision} changes {len(found)} folders below {home} ({few(sorted(found))}); send one")
    (name,) = found
    repeats = [text for text in changed if text.startswith(f"{home}/{name}/{REPEATED}/")]
    if repeats and len(repeats) < len(changed):
        raise ValueError(
            f"{home}/{name}/{REPEATED} is for rows of a maintainer, which come after the submission; leave it out"
        )
    return name


def _check_tree(checkout: Path, commit: str, within: str) -> None:
    """Raises ValueError for a link, a submodule or a large file in a folder of a commit, before it is extracted."""
    listed = (git(checkout, "ls-tree", "-r", "-l", "-z", commit, f"{within}/") or b"").decode(errors="replace")
    for line in filter(None, listed.split("\0")):
        head, _, path = line.partition("\t")
        mode, _, _, size = head.split()
        if mode not in ("100644", "100755"):
            raise ValueError(f"{path}: is a link or a submodule; commit the file itself")
        if int(size) > LARGEST_PART:
            raise ValueError(f"{path}: has {int(size):,} bytes, at most {LARGEST_PART:,} are allowed")
