"""The identity of a plugin has every module of the user's own that the plugin imports, and no other."""

import importlib
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES

import pytest
import torch

from subquad.run_suite import REPOSITORY
from subquad.suite.commands.planning import resolved_runs
from subquad.suite.identity import files_digest
from subquad.suite.plugins import load_plugin
from subquad.suite.runner import execute
from tests.suite.test_plugins import GRID

MINE = """
from subquad.models.linear_attention import LinearAttentionConfig

class Mine(LinearAttentionConfig):
    \"\"\"A model of mine.\"\"\"

MODELS = {"mine": Mine}
"""


@pytest.fixture
def folder(tmp_path):
    """A folder that is on `sys.path`; the modules that are loaded from it are forgotten at the end."""
    sys.path.append(str(tmp_path))
    yield tmp_path
    forget()
    sys.path[:] = [path for path in sys.path if not path.startswith(str(tmp_path))]


def forget():
    """Makes this process one that has loaded no module of these tests."""
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def identity_in_a_new_process(path):
    forget()
    return load_plugin(str(path)).identity


EXTENSION = f"my_part{EXTENSION_SUFFIXES[0]}"
LATER = "def later():\n    "


@pytest.mark.parametrize(
    ("plugin", "files", "edited"),
    [
        ("import my_part", {"my_part.py": "x = 1"}, "my_part.py"),
        (f"{LATER}from my_part import x", {"my_part.py": "x = 1"}, "my_part.py"),
        ("import my_part", {"my_part.py": "import my_other", "my_other.py": "x = 1"}, "my_other.py"),
        (
            "from my_parts.inner import x",
            {"my_parts/__init__.py": "y = 1", "my_parts/inner.py": "x = 1"},
            "my_parts/__init__.py",
        ),
        (
            f"{LATER}import my_parts.inner",
            {"my_parts/__init__.py": "", "my_parts/inner.py": "from . import deep", "my_parts/deep.py": "x = 1"},
            "my_parts/deep.py",
        ),
        (
            f"{LATER}import my_parts",
            {
                "my_parts/__init__.py": "from .a.b import x",
                "my_parts/a/__init__.py": "",
                "my_parts/a/b.py": "from ..c import x",
                "my_parts/c.py": "x = 1",
            },
            "my_parts/c.py",
        ),
        ("from my_parts.inner import x", {"my_parts/inner.py": "x = 1"}, "my_parts/inner.py"),
        (f"{LATER}from my_parts.deep.inner import x", {"my_parts/deep/inner.py": "x = 1"}, "my_parts/deep/inner.py"),
        (
            "from my_parts import *",
            {"my_parts/__init__.py": "__all__ = ['inner']", "my_parts/inner.py": "x = 1"},
            "my_parts/inner.py",
        ),
        ("import importlib\nimportlib.import_module('my_part')", {"my_part.py": "x = 1"}, "my_part.py"),
        ("import importlib\nimportlib.import_module('my_' + 'part')", {"my_part.py": "x = 1"}, "my_part.py"),
        (
            "import my_parts",
            {
                "my_parts/__init__.py": "import pkgutil\nlist(pkgutil.iter_modules(__path__))",
                "my_parts/a/b.py": "x = 1",
            },
            "my_parts/a/b.py",
        ),
        (f"{LATER}import my_part", {EXTENSION: "machine code"}, EXTENSION),
    ],
)
def test_an_edited_module_of_the_users_own_is_another_identity(folder, plugin, files, edited):
    write(folder, {"my_plugin.py": f"{plugin}\n{MINE}", **files})
    before = identity_in_a_new_process(folder / "my_plugin.py")
    write(folder, {edited: f"{files[edited]}\nz = 2"})
    after = identity_in_a_new_process(folder / "my_plugin.py")
    assert before != after
    write(folder, {edited: files[edited]})
    assert identity_in_a_new_process(folder / "my_plugin.py") == before


def test_an_edited_module_in_an_archive_is_another_identity(folder):
    write(folder, {"my_plugin.py": f"import sys\nsys.path.append({str(folder / 'my.zip')!r})\nimport my_part\n{MINE}"})
    found = []
    for text in ("x = 1", "x = 2"):
        with zipfile.ZipFile(folder / "my.zip", "w") as archive:
            archive.writestr("my_part.py", text)
        found.append(identity_in_a_new_process(folder / "my_plugin.py"))
    assert found[0] != found[1]


def test_a_package_has_what_it_imports_from_outside_of_it(folder):
    files = {"my_package/__init__.py": f"{LATER}from .a import x\n{MINE}", "my_package/a.py": "import my_part"}
    write(folder, {**files, "my_part.py": "x = 1"})
    found = []
    for text in ("x = 1", "x = 2"):
        write(folder, {"my_part.py": text})
        forget()
        found.append(load_plugin("my_package").identity)
    assert found[0] != found[1]


def test_a_plugin_without_modules_of_the_users_own_keeps_its_identity(folder):
    text = (
        "import json, torch, typing, yaml.loader\nfrom typing import TYPE_CHECKING\n"
        f"if TYPE_CHECKING:\n    import my_part\n{LATER}import none_of_these\n{MINE}"
    )
    write(
        folder,
        {"my_plugin.py": text, "my_part.py": "x = 1", "my_package/__init__.py": "", "my_package/mixers.py": MINE},
    )
    digest = files_digest([folder / "my_plugin.py"], folder)
    assert identity_in_a_new_process(folder / "my_plugin.py") == f"my_plugin sha256 {digest[:16]}"
    digest = files_digest([folder / "my_package" / "mixers.py"], folder / "my_package")
    assert load_plugin("my_package.mixers").identity == f"my_package.mixers sha256 {digest[:16]}"
    # it may import any file of its own folder
    files = {"my_package/__init__.py": f"import pkgutil\nlist(pkgutil.iter_modules(__path__))\n{MINE}"}
    write(folder, {**files, "my_package/part/x.py": "x = 1"})
    forget()
    digest = files_digest((folder / "my_package").rglob("*.py"), folder / "my_package")
    assert load_plugin("my_package").identity == f"my_package sha256 {digest[:16]}"


def test_another_plugin_that_has_loaded_a_module_before_changes_no_identity(folder):
    write(folder, {"my_first.py": f"import my_part\n{MINE}", "my_second.py": f"{LATER}import my_part\n{MINE}"})
    write(folder, {"my_part.py": "x = 1"})
    alone = identity_in_a_new_process(folder / "my_second.py")
    identity_in_a_new_process(folder / "my_first.py")
    assert load_plugin(str(folder / "my_second.py")).identity == alone


def test_a_module_that_was_edited_after_its_import_is_refused(folder):
    write(
        folder,
        {"my_plugin.py": f"import my_part\n{MINE}", "my_third.py": f"import my_part\n{MINE}", "my_part.py": "x = 1"},
    )
    load_plugin(str(folder / "my_plugin.py"))
    write(folder, {"my_part.py": "x = 2"})
    # this process has the old code also for a plugin that it has not seen before
    for name in ("my_plugin.py", "my_third.py"):
        with pytest.raises(ValueError, match="the module my_part, which it imports, has changed since it was imported"):
            load_plugin(str(folder / name))
    (folder / "my_part.py").unlink()
    with pytest.raises(ValueError, match="the module my_part, which it imports, has changed since it was imported"):
        load_plugin(str(folder / "my_plugin.py"))


EDITED = """
from pathlib import Path
from subquad.models.linear_attention import LinearAttentionConfig
EARLY

class Mine(LinearAttentionConfig):
    \"\"\"A model of mine.\"\"\"

    def build(self, spec):
        Path(__file__).with_name("my_part.py").write_text("x = 2 # edited")
        import my_part
        return super().build(spec)

MODELS = {"mine": Mine}
"""


@pytest.mark.parametrize(("early", "status"), [("", "failed"), ("import my_part", "ok")])
def test_a_run_that_imports_a_module_edited_since_its_beginning_fails(folder, early, status):
    write(folder, {"my_plugin.py": EDITED.replace("EARLY", early), "my_part.py": "x = 1", "my-grid/grid.yaml": GRID})
    repository = REPOSITORY.with_plugins([str(folder / "my_plugin.py")])
    choice = {"scale": None, "only": ["model.name=mine"], "overrides": None, "seeds": None, "data": None}
    _, (run,) = resolved_runs(repository, str(folder / "my-grid"), **choice)
    finished = execute(run, folder / "results", torch.device("cpu"))
    assert finished.status == status, finished.error
    assert ("my_plugin has changed since the run was planned" in finished.error) == (status == "failed")
    assert not list(folder.rglob("*.checkpoint"))


def test_a_grid_is_repeated_for_an_edited_module(folder, command_line):
    write(folder, {"my_plugin.py": f"import my_part\n{MINE}", "my_part.py": "x = 1", "my-grid/grid.yaml": GRID})
    command = ("run", folder / "my-grid", "--plugin", folder / "my_plugin.py", "--results", folder / "results")
    done = command_line(*command)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 runs are already stored" in command_line(*command).stdout
    write(folder, {"my_part.py": "x = 2"})
    forget()
    assert "1 of 2 runs are already stored" in command_line(*command).stdout
