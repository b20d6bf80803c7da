"""The folder of a submission: one plugin, a manifest, and one part of rows for each board.

    submissions/my-mixer/manifest.json                                    what is claimed
    submissions/my-mixer/my_mixer.py                                      the mixer
    submissions/my-mixer/rows/leaderboard/parameters/paper/part-*.parquet rows of its author
    submissions/my-mixer/repeated/leaderboard/parameters/paper/part-*.parquet    rows that we made with its code

Nothing here imports the plugin, because a report reads submissions, too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from subquad.suite.bounds import Count
from subquad.suite.identity import file_digest, files_digest
from subquad.suite.options import Config, parse
from subquad.suite.registry import few
from subquad.suite.store.documents import read_object
from subquad.suite.store.target import replacing

MANIFEST = "manifest.json"
ROWS, REPEATED = "rows", "repeated"
NAME = r"[a-z0-9][a-z0-9-]{1,39}"
"""Names of submissions, which are folders, labels of a table and words of a command."""
PART = r"part-[0-9a-f]{16}\.parquet"
LARGEST_PLUGIN = 256 * 1024
LARGEST_PART = 32 * 1024**2
"""Bytes of a plugin or a manifest, and of a part. The rows of the 27 runs of a board take about a hundredth of that."""
IMPORTS = ("subquad", "torch", "numpy", "triton")
"""Packages that a submitted plugin may import beside the standard library: those that every check has."""

Text = Annotated[str, Field(max_length=200)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(Config):
    """The claims about the mixer on one board."""

    scale: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")]
    options: dict[Annotated[str, Field(pattern=r"^model\.\w+$")], Any]
    """Dotted keys of the model and their values, where they are not those of the board."""
    num_parameters: Count
    state_size: Count
    """The size of the state of the network on the task that the budget of the board names, at the task's length."""
    part: Annotated[str, Field(pattern=f"^{PART}$")]
    """Name of the file with the rows, below `rows/<board>/<scale>`."""
    part_sha256: Digest
    num_runs: Count
    devices: tuple[Text, ...]
    """The devices of the runs, each once; so are the next three."""
    torch: tuple[Text, ...]
    python: tuple[Text, ...]
    commits: tuple[Text, ...]
    processor: Text = ""
    """The processor of the machine that wrote the submission (`suite.submissions.rerun.processor`)."""


class Manifest(Config):
    """The file `manifest.json`."""

    format: Literal[1] = 1
    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    """Name of the folder, and of the mixer in the plugin's MODELS."""
    plugin: Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,60}\.py$")]
    plugin_sha256: Digest
    boards: dict[Annotated[str, Field(pattern=r"^[a-z0-9-]+(/[a-z0-9-]+)*$")], Entry] = Field(min_length=1)
    """Experiment to what is claimed there."""


def plugin_identity(plugin: Path) -> str:
    """The identity that runs of this file have in their settings, as `suite.plugins` makes it, without an import."""
    return f"{plugin.stem} sha256 {files_digest([plugin], plugin.parent)[:16]}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a submission. ValueError, which begins with its path, where it is missing or wrong."""
    path = folder / MANIFEST
    # a link may lead to a device, which has no end
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path}: missing, or no regular file; `submit` writes it")
    if path.stat().st_size > LARGEST_PLUGIN:
        raise ValueError(f"{path}: has {path.stat().st_size:,} bytes, at most {LARGEST_PLUGIN:,} are allowed")
    manifest = parse(Manifest, read_object(path), str(path))
    if manifest.name != folder.name:
        raise ValueError(f"{path}: name is {manifest.name!r}, and its folder is {folder.name!r}; they must be the same")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of a submission, whole or not at all."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False)
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(f"{text}\n")


def part_of(folder: Path, board: str, entry: Entry) -> Path:
    """The file with the author's rows."""
    return folder / ROWS / board / entry.scale / entry.part


def repeated_parts(folder: Path, board: str, scale: str) -> list[Path]:
    """The files with rows that we made with the code of a submission."""
    return sorted((folder / REPEATED / board / scale).glob("part-*.parquet"))


def submissions_below(home: Path) -> list[Path]:
    """The folders of all submissions."""
    return sorted(path.parent for path in home.glob(f"*/{MANIFEST}"))


def unexpected(names: Iterable[str], manifest: Manifest) -> list[str]:
    """Files of a submission, named within its folder, that do not belong there."""
    known = {MANIFEST, manifest.plugin}
    known |= {f"{ROWS}/{board}/{entry.scale}/{entry.part}" for board, entry in manifest.boards.items()}
    repeats = [f"{REPEATED}/{board}/{entry.scale}/" for board, entry in manifest.boards.items()]

    def belongs(name: str) -> bool:
        start, _, last = name.rpartition("/")
        return name in known or (f"{start}/" in repeats and bool(re.fullmatch(PART, last)))

    return sorted(name for name in names if not belongs(name))


def files_in(folder: Path) -> list[str]:
    """Names, within the folder, of everything below it that is no folder. What Python compiled is left out."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in paths if "__pycache__" not in path.parts)


def file_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """A sentence on each file that is missing, too large, no regular file, not what the manifest says, or strange."""
    names = files_in(folder)
    if strange := unexpected(names, manifest):
        yield f"{few(strange)}: a submission has a manifest, one Python file, and rows; remove what is beside them"
    for name in names:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            yield f"{name}: a link or no regular file; put the file itself there"
    claims = [(manifest.plugin, manifest.plugin_sha256, LARGEST_PLUGIN)]
    for board, entry in manifest.boards.items():
        name = part_of(folder, board, entry).relative_to(folder).as_posix()
        claims.append((name, entry.part_sha256, LARGEST_PART))
    for name, digest, most in claims:
        path = folder / name
        if name not in names or path.is_symlink() or not path.is_file():
            yield f"{name}: missing; `submit` writes it"
        elif path.stat().st_size > most:
            yield f"{name}: has {path.stat().st_size:,} bytes, at most {most:,} are allowed"
        elif file_digest(path) != digest:
            yield f"{name}: its SHA-256 is not the one in {MANIFEST}; write the submission again with `submit`"


def import_faults(plugin: Path) -> Iterator[str]:
    """A sentence on each import of a plugin that a check cannot carry out. Nothing for a file with a syntax error.

    Imports that are made at run time (`importlib`) are not seen here, and fail where the check imports the plugin.
    """
    try:
        tree = ast.parse(plugin.read_bytes())
    except (SyntaxError, ValueError):
        return
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found[(node.module or "").partition(".")[0] if not node.level else "."] = None
    for name in found:
        if name in IMPORTS or name in sys.stdlib_module_names:
            continue
        own = name == "." or (plugin.parent / f"{name}.py").exists() or (plugin.parent / name).is_dir()
        if own:
            what = "relative to itself" if name == "." else f"{name}, which lies beside it"
            yield f"{plugin.name} imports {what}; a submission is one file, so put that code into it"
        else:
            there = f"{', '.join(IMPORTS)} and Python's own modules"
            yield f"{plugin.name} imports {name}, which the check does not have; it has {there}"
