"""Builds a wheel with all grids in one package, `subquad`, and what a release needs beside it.

A checkout has the folders `suite`, `tasks`, `models`, `kernels` and `reports` at its top level. In a wheel they lie in
the folder of the package (`suite/package/subquad/__init__.py`), with `run_suite.py`. The committed rows would be nine
tenths of a wheel. They are an archive of their own, whose name and digest are in the wheel (`ROWS`), and which
`subquad results pull` fetches from the release (`tasks/data/committed.py`).

    python -P suite/packaging.py build/dist           # source archive, wheel and archive of rows, as a release has them
    python -P suite/packaging.py build/dist v0.2.0    # the same, if that is the version
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HOME = "subquad"
FOLDERS = ("suite", "tasks", "models", "kernels", "reports")
FILES = ("run_suite.py", "README.md", "CHANGELOG.md", "CITATION.cff")
"""Files at the top level that a source archive has beside those that setuptools knows."""
REFERENCE = "results/reference"
"""The committed rows of a checkout."""
SUBMISSIONS = "submissions"
"""The mixers that others have submitted, with their rows."""
PACKAGE = Path("suite", "package", "subquad")
ROWS = "ROWS.json"
"""The file of a wheel that names the archive of the committed rows: its address, name, size and SHA-256."""
COMMIT = "COMMIT"
"""The file of a wheel that names the commit from which it was built."""


def archive(root: Path) -> bytes:
    """The committed rows and the submissions as a tar; parts are compressed already. Equal files give equal bytes."""
    content = io.BytesIO()
    found = [*(root / REFERENCE).rglob("*.parquet"), *(root / SUBMISSIONS).rglob("*")]
    files = [path for path in found if path.is_file() and not path.is_symlink() and path.suffix != ".pyc"]
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
            # owner, rights and time are those of no file
            member = tarfile.TarInfo(name)
            member.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(member, file)
    return content.getvalue()


def named(content: bytes, root: Path) -> dict[str, str | int]:
    """The name, the address, the size and the digest of the archive of rows, as a wheel gives them."""
    digest = hashlib.sha256(content).hexdigest()
    name = f"subquad-rows-{digest[:16]}.tar"
    address = _address(root)
    url = f"{address}/releases/download/{tag(root)}/{name}" if address else ""
    return {"url": url, "name": name, "bytes": len(content), "sha256": digest}


def tag(root: Path) -> str:
    """The tag of the version, `v0.2.0`."""
    return f"v{tomllib.loads((root / 'pyproject.toml').read_text())['project']['version']}"


def _address(root: Path) -> str:
    """The page of the repository, which has its releases: SUBQUAD_REPOSITORY_URL, or where it was cloned from."""
    named = os.environ.get("SUBQUAD_REPOSITORY_URL") or _git(root, "config", "--get", "remote.origin.url")
    # a clone may have been made with a password in the address
    found = re.fullmatch(r"(https?://)(?:[^/@]*@)?([^/@]+/.+?)(?:\.git)?/?", named)
    return found[1] + found[2] if found else ""


def _git(root: Path, *arguments: str) -> str:
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _write_origin(root: Path, target: Path) -> None:
    """Writes what a checkout knows and its source archive and its wheel do not: its commit and its rows."""
    for name in (ROWS, COMMIT):
        if (root / name).is_file():
            # this is a source archive, which may have been unpacked in a checkout of something else
            shutil.copyfile(root / name, target / name)
    if (root / ROWS).is_file():
        return
    (target / COMMIT).write_text(_git(root, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"))
    (target / ROWS).write_text(json.dumps(named(archive(root), root), indent=1) + "\n")


def _check_sources(root: Path) -> None:
    """Raises SystemExit unless a folder has the grids, and the rows or what names them."""
    missing = [name for name in FOLDERS if not (root / name).is_dir()]
    rows = (root / ROWS).is_file() or any((root / REFERENCE).rglob("*.parquet"))
    if missing or not rows or not any((root / "reports").rglob("grid.yaml")):
        raise SystemExit(
            "subquad: a wheel is built from a checkout or a source archive, which have grids and rows; "
            "`git clone` it first"
        )


class BuildPy(build_py):
    """Copies the folders whole, with grids and the papers' numbers; an editable install needs none."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        root, target = Path.cwd(), Path(self.build_lib)
        _check_sources(root)
        # files of an earlier build would be installed, too
        shutil.rmtree(target, ignore_errors=True)
        for name in FOLDERS:
            shutil.copytree(root / name, target / HOME / name, ignore=shutil.ignore_patterns("__pycache__", "package"))
        for file in (root / "run_suite.py", *(root / PACKAGE).iterdir()):
            if file.is_file():
                shutil.copyfile(file, target / HOME / file.name)
        _write_origin(root, target / HOME)


class Sdist(sdist):
    """A source archive from which a wheel can be built: the folders whole, and what the checkout knows about itself."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        root, target = Path.cwd(), Path(base_dir)
        _check_sources(root)
        super().make_release_tree(base_dir, files)
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / name, target / name, ignore=ignored, dirs_exist_ok=True)
        for name in FILES:
            shutil.copyfile(root / name, target / name)
        _write_origin(root, target)


def make(root: Path, out: Path) -> list[Path]:
    """Builds the source archive, the wheel from it, and the archive of rows that both name, into a new folder."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        first = _source_archive(root, Path(folder))
        with tarfile.open(first) as tar:
            tar.extractall(folder, filter="data")
        tree = Path(folder, first.name.removesuffix(".tar.gz"))
        if address := _address(root):
            (tree / "README.md").write_text(with_addresses((root / "README.md").read_text(), address, tag(root)))
        source = _source_archive(tree, out)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "-w", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", str(source), *options], check=True)
    (wheel,) = out.glob("*.whl")
    content = archive(root)
    rows = out / str(named(content, root)["name"])
    rows.write_bytes(content)
    check(source, wheel, rows)
    return [source, wheel, rows]


def _source_archive(root: Path, out: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return out / done.stdout.split()[-1]


def with_addresses(text: str, address: str, tag: str) -> str:
    """The README with addresses in place of paths, for the page of the package index, which has none of our files."""

    def whole(match: re.Match[str]) -> str:
        path = match[1]
        if path.startswith("../../"):
            return f"]({address}/{path.removeprefix('../../')})"
        return f"]({address}/{'raw' if path.endswith(('.png', '.svg')) else 'blob'}/{tag}/{path})"

    return re.sub(r"\]\((?!https?://|#)([^)\s]+)\)", whole, text)


def check(source: Path, wheel: Path, rows: Path) -> None:
    """Raises SystemExit unless the source archive and the wheel name these rows."""
    with tarfile.open(source) as tar, zipfile.ZipFile(wheel) as file:
        (member,) = (name for name in tar.getnames() if name.count("/") == 1 and name.endswith(f"/{ROWS}"))
        content = tar.extractfile(member)
        assert content is not None
        texts = {source: content.read(), wheel: file.read(f"{HOME}/{ROWS}")}
    digest = hashlib.sha256(rows.read_bytes()).hexdigest()
    for path, text in texts.items():
        known = json.loads(text)
        if (known["sha256"], known["name"], known["bytes"]) != (digest, rows.name, rows.stat().st_size):
            raise SystemExit(f"{path.name} names other rows than {rows.name}; build all of them from one commit")


def main(root: Path, out: Path, wanted: str = "") -> None:
    """Builds all of a release and prints its files. SystemExit where the version is not that of the wanted tag."""
    if wanted not in ("", tag(root)):
        raise SystemExit(f"the tag is {wanted}, and the version in pyproject.toml is that of {tag(root)}")
    for made in make(root, out):
        print(f"{made.name}\t{made.stat().st_size:,} bytes\tsha256 {hashlib.sha256(made.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main(Path(__file__).resolve().parents[1], Path(sys.argv[1]).resolve(), *sys.argv[2:])
