"""Builds a wheel with grids and rows in one package, `subquad`.

A checkout has the folders `suite`, `tasks`, `models`, `kernels` and `reports` at its top level. In a wheel they lie in
the folder of the package (`suite/package/subquad/__init__.py`), with `run_suite.py`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from setuptools.command.build_py import build_py

HOME = "subquad"
FOLDERS = ("suite", "tasks", "models", "kernels", "reports", "results/reference")


class BuildPy(build_py):
    """Copies the folders whole, with grids, the papers' numbers and committed rows; an editable install needs none."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        root, target = Path.cwd(), Path(self.build_lib)
        missing = [name for name in FOLDERS if not (root / name).is_dir()]
        if missing or not any((root / "reports").rglob("grid.yaml")):
            raise SystemExit(
                "subquad: a wheel is built from a checkout, which has grids and rows; `git clone` it first"
            )
        # files of an earlier build would be installed, too
        shutil.rmtree(target, ignore_errors=True)
        for name in FOLDERS:
            shutil.copytree(root / name, target / HOME / name, ignore=shutil.ignore_patterns("__pycache__", "package"))
        for file in (root / "run_suite.py", root / "suite" / "package" / "subquad" / "__init__.py"):
            shutil.copyfile(file, target / HOME / file.name)
        command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        (target / HOME / "COMMIT").write_text(found.stdout.strip())
