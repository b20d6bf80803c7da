"""Allowed imports between the folders (DESIGN section 2), read from the sources."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[2]
OURS = {"suite", "tasks", "models", "kernels", "reports", "run_suite", "tests"}
ALLOWED = {
    "kernels": {"kernels"},
    "suite": {"suite"},
    "tasks": {"tasks", "suite"},
    "models": {"models", "kernels", "suite"},
    "reports": {"reports", "suite"},
}


@cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """All of a file, those inside functions and for the type checker alone, too."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(path: Path) -> set[str]:
    """Folders of this repository, and other root packages, that a file imports, anywhere in it."""
    found = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            found |= {folder_of(alias.name) for alias in node.names}
        elif node.module and not node.level:
            found |= {folder_of(f"{node.module}.{alias.name}") for alias in node.names}
    return found


def folder_of(module: str) -> str:
    """`kernels` for `subquad.kernels.norm`, `torch` for `torch.nn`."""
    return module.removeprefix("subquad.").split(".")[0]


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_it_may(folder):
    # the package that has all folders as its parts stands above them
    files = [path for path in (HOME / folder).rglob("*.py") if "package" not in path.parts]
    assert files
    for path in files:
        # names and rows suffice for a report
        wrong = imports(path) & (OURS | ({"torch"} if folder == "reports" else set())) - ALLOWED[folder]
        assert not wrong, f"{path.relative_to(HOME)} imports {sorted(wrong)}"


def modules_of(folder: str) -> dict[str, Path]:
    """Dotted name of every module below a folder, a package without its `__init__`, to its file."""
    files = {path.relative_to(HOME): path for path in (HOME / folder).rglob("*.py")}
    paths = {".".join(("subquad", *short.with_suffix("").parts)): path for short, path in files.items()}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def modules_imported(path: Path, among: Iterable[str]) -> set[str]:
    """Modules among those that a file imports."""
    found = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            # a part of a package is imported from its own file, where it has one
            found |= parts & set(among) or {node.module}
    return found & set(among)


@pytest.mark.parametrize("folder", ["suite", "tasks", "models", "reports"])
def test_no_module_imports_one_that_imports_it(folder):
    """An import that is put off is one all the same: whoever reads the one file has to read the other."""
    files = modules_of(folder)
    above = {name: modules_imported(path, files) - {name} for name, path in files.items()}
    while ready := [name for name, needs in above.items() if not needs]:
        for name in ready:
            del above[name]
        for needs in above.values():
            needs.difference_update(ready)
    assert not above, f"these import each other: {sorted(above)}"


def test_only_the_resolver_the_runner_and_the_commands_know_what_is_timed():
    """Everything else of the harness sees a run and its worker, but for the laws, which judge what is timed."""
    timed = modules_of("suite/bench")
    for path in (HOME / "suite").rglob("*.py"):
        name = str(path.relative_to(HOME / "suite"))
        if not name.startswith(
            ("bench/", "commands/", "settings/resolver.py", "runner.py", "laws/calls.py", "laws/operators.py")
        ):
            assert not modules_imported(path, timed), name


def test_the_top_level_is_the_fixed_one():
    folders = (path for path in HOME.iterdir() if path.is_dir() and not path.name.startswith("."))
    code = {path.name for path in folders if any(path.glob("*.py"))}
    assert code <= OURS | {"examples", "docs"}
