"""The code of another revision, with which `bench --compare` compares this tree: of Subquad or of a plugin.

The base of an operator of Subquad is the folder `kernels` of that revision with the workloads of this tree, so that
both compute the same. The base of a plugin's operator is the repository that holds the plugin, as it was in that
revision, with the plugin's own workloads; `Workload.version` says whether they are the same.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import subquad
from subquad.suite.store.revisions import commit_of, extract, git

HOME = Path(__file__).resolve().parents[2]
OLD_IMPORT = re.compile(r"^(\s*(?:from|import)) kernels\b", re.MULTILINE)


@dataclass(frozen=True)
class Base:
    """Another version of the code below `root`."""

    root: Path
    """The folder of this tree that it stands for."""
    folder: Path
    """Path of the checkout."""
    commit: str
    """Its commit, or the path of a folder that is no checkout."""
    plugin: bool = False
    """Whether it is that of a plugin."""

    def take_effect(self) -> None:
        """Makes this process import the base's modules in place of those of this tree."""
        if self.plugin:
            sys.path[:] = self.import_path(sys.path)
        else:
            subquad.__path__.insert(0, str(self.folder))

    def import_path(self, path: Sequence[str]) -> list[str]:
        """Returns the import path with the base of a plugin. path: the import path of this tree."""

        def there(entry: str) -> str:
            place = Path(entry)
            # a checkout of Subquad inside the plugin's repository remains the one that carries out the comparison
            if not entry or place == HOME or not place.is_relative_to(self.root):
                return entry
            other = self.folder / place.relative_to(self.root)
            return str(other) if other.is_dir() else entry

        return list(map(there, path))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "root": str(self.root), "folder": str(self.folder)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "root": Path(data["root"]), "folder": Path(data["folder"])})


def base_of(revision: str, plugins: Iterable[Path], folder: Path) -> Base:
    """The base of operators.

    revision: a git revision, or a folder with another checkout.
    plugins:  for each operator the file of its plugin; `HOME` stands for an operator of Subquad.
    folder:   an empty folder to write the files of a revision to.

    ValueError where there is no such revision or folder, or where the operators lie in several repositories.
    """
    files = dict.fromkeys(plugins)
    if list(files) == [HOME]:
        return tree_of(revision, folder)
    roots = {HOME if file == HOME else root_of(file, revision) for file in files}
    if len(roots) > 1:
        raise ValueError(
            f"{revision!r} cannot be a revision of several repositories ({', '.join(sorted(map(str, roots)))}); "
            "name the operators of one of them"
        )
    (root,) = roots
    if all(Path(revision, file.relative_to(root)).is_file() for file in files if file != HOME):
        other = Path(revision).resolve()
        return Base(root, other, _commit_of(other), plugin=True)
    commit = _extract(root, revision, folder, "the plugin's repository")
    return Base(root, folder.resolve(), commit, plugin=True)


def tree_of(revision: str, folder: Path) -> Base:
    """The kernels of a git revision of Subquad, or of a folder that holds another checkout of it.

    ValueError where there is no such revision or folder.
    """
    if Path(revision, "kernels").is_dir():
        source = Path(revision).resolve()
        shutil.copytree(source / "kernels", folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        commit = _commit_of(source)
    else:
        commit = _extract(HOME, revision, folder, "this checkout that has kernels", "kernels")
    for path in (folder / "kernels").rglob("*.py"):
        # revisions of before 2026-11-29 have `kernels` at the top of the import path
        path.write_text(OLD_IMPORT.sub(r"\1 subquad.kernels", path.read_text()))
    for path in (HOME / "kernels").rglob("workload*.py"):
        target = folder / path.relative_to(HOME)
        if target.parent.is_dir():
            shutil.copyfile(path, target)
    return Base(HOME, folder, commit)


def root_of(file: Path, revision: str) -> Path:
    """The repository that holds a plugin. Where it is in none, its folder, if the revision is a folder, too."""
    found = git(file.parent, "rev-parse", "--show-toplevel")
    if found:
        return Path(found.decode().strip()).resolve()
    if Path(revision).is_dir():
        return file.parent
    raise ValueError(f"{file}: it is in no git repository, so {revision!r} must be a folder with another version of it")


def _extract(root: Path, revision: str, folder: Path, where: str, *paths: str) -> str:
    if root == HOME and (HOME / "COMMIT").is_file():
        # it may lie in a repository of somebody else, whose revisions would be found
        raise ValueError(f"{revision!r}: an installed Subquad has no other revisions; give the folder of a checkout")
    commit = commit_of(root, revision)
    if commit is None or not extract(root, commit, folder, *paths):
        raise ValueError(
            f"{revision!r} is neither a git revision of {where} nor a folder with another checkout; "
            "fetch it first, or give a folder"
        )
    return commit


def _commit_of(folder: Path) -> str:
    name = git(folder, "rev-parse", "HEAD") if (folder / ".git").exists() else None
    return name.decode().strip() if name else str(folder)
