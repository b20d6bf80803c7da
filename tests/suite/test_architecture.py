"""Allowed imports between the folders (DESIGN section 2), read from the sources."""

import ast
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


def imports(path: Path) -> set[str]:
    """Root packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_it_may(folder):
    files = list((HOME / folder).rglob("*.py"))
    assert files
    for path in files:
        wrong = imports(path) & OURS - ALLOWED[folder]
        assert not wrong, f"{path.relative_to(HOME)} imports {sorted(wrong)}"


def modules_imported(path: Path) -> set[str]:
    """Modules of ours that a file imports when it is imported itself, imports inside functions left out."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_module_of_the_harness_imports_one_that_imports_it():
    files = {".".join(path.relative_to(HOME).with_suffix("").parts): path for path in (HOME / "suite").rglob("*.py")}
    above: dict[str, set[str]] = {name: modules_imported(path) & set(files) - {name} for name, path in files.items()}
    while ready := [name for name, needs in above.items() if not needs]:
        for name in ready:
            del above[name]
        for needs in above.values():
            needs.difference_update(ready)
    assert not above, f"these import each other: {sorted(above)}"


def test_only_the_resolver_and_the_commands_know_what_is_timed():
    """Everything else of the harness sees a run and its worker."""
    for path in (HOME / "suite").rglob("*.py"):
        name = str(path.relative_to(HOME / "suite"))
        if not name.startswith(("bench/", "commands/")) and name != "settings/resolver.py":
            assert not {module for module in modules_imported(path) if module.startswith("suite.bench")}, name


def test_the_top_level_is_the_fixed_one():
    folders = (path for path in HOME.iterdir() if path.is_dir() and not path.name.startswith("."))
    code = {path.name for path in folders if any(path.glob("*.py"))}
    assert code <= OURS | {"examples", "docs"}
