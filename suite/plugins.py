"""Models, tasks and operators from outside this repository.

A plugin is a Python file or an importable module with one or more of these dictionaries:

    MODELS = {"my-mixer": MyMixerConfig}      # name to configuration class, a `suite.contracts.ModelConfig`
    TASKS = {"my-task": MyTask}               # name to class, a `suite.contracts.Task`
    OPERATORS = {"my_op": WORKLOAD}           # name to `kernels.workload.Workload`

It is named by `--plugin`, or by an installed package through the entry points `subquad.plugins`. Its names stand beside
those of the suite in every command. The resolved settings of a run that uses a name of a plugin have the plugin's
identity in them, so a changed plugin makes new runs instead of passing for the old ones, and so does a changed module
of the user's own that it imports (`suite.imports`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from subquad.suite.environment import REPOSITORY
from subquad.suite.identity import files_digest
from subquad.suite.imports import digests_of, edited
from subquad.suite.registry import PLUGGABLE, Entry

GROUP = "subquad.plugins"
"""Group of the entry points with which an installed package offers a plugin."""
FOLDERS = ("suite", "tasks", "models", "kernels", "reports", "run_suite")
"""Parts of the package `subquad`."""
TABLES = {kind: f"{kind.upper()}S" for kind in PLUGGABLE}
"""Kind of a name to the dictionary of the plugin that defines it."""


_imported: dict[ModuleType, tuple[str, frozenset[str]]] = {}
"""Modules of plugins with the digest and the names that their own files had when they were imported."""


class PluginError(ValueError):
    """A process that is to carry out a run cannot import its plugins as the plan knows them."""


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin."""

    name: str
    """Path or module as the user gave it, for messages."""
    identity: str
    """`my_mixer.py sha256 0123456789abcdef`, or `my-package 1.2` for a module of an installed distribution."""
    entries: Mapping[str, Mapping[str, Entry]]
    """Kind (`model`, `task`, `operator`) to its names and their places."""


def load_plugins(names: Iterable[str]) -> list[Plugin]:
    """The plugins that installed packages offer and those of these names. ValueError for one that cannot be loaded."""
    offered = _offered(tuple((folder, _changed_at(folder)) for folder in sys.path))
    return [load_plugin(name) for name in dict.fromkeys([*offered, *names])]


@lru_cache(maxsize=1)
def _offered(path: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The modules that installed packages offer, where `sys.path` has these folders, which changed at these times.

    All packages are read for it, which takes longer than many a call from Python.
    """
    return tuple(entry.value for entry in importlib.metadata.entry_points(group=GROUP))


def _changed_at(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def load_plugin(name: str) -> Plugin:
    """The plugin in a file (`examples/my_mixer.py`) or a module (`my_package.mixers`).

    The folder of a file is appended to `sys.path`, where worker processes find the module again.
    """
    path = Path(name)
    is_file = path.suffix == ".py" or path.exists()
    module = _import_file(path) if is_file else _import_module(name)
    identity = identity_of(module)
    if changed := _changed(module):
        # the process has the old code, whose runs would get the identity of the new one
        raise ValueError(f"--plugin {name}: {changed} has changed since it was imported; restart Python (the kernel)")
    entries: dict[str, dict[str, Entry]] = {}
    for kind, table in TABLES.items():
        found = getattr(module, table, {})
        if not isinstance(found, Mapping):
            raise ValueError(f"--plugin {name}: {table} must be a dictionary of names, got {type(found).__name__}")
        entries[kind] = {key: _entry(name, identity, module, table, key, value) for key, value in found.items()}
    if not any(entries.values()):
        raise ValueError(f"--plugin {name}: it defines none of {', '.join(TABLES.values())}, so it adds nothing")
    return Plugin(name, identity, entries)


def changed_since_planned(identities: Iterable[str], *, ended: bool = False) -> str:
    """Returns in one line which of the plugins this process has imported in another form than the plan knows, or "".

    A process that carries out runs imports a plugin when it gets the first run that uses it, which may be much later.
    ended: a run has ended, which may have imported modules of the plugin that were edited since the run began.
    """
    for identity in identities:
        name, _, digest = identity.partition(" ")
        module = sys.modules.get(name) if digest.startswith("sha256 ") else None
        if module is not None and identity_of(module, refresh=not ended) != identity:
            return f"the plugin {name} has changed since the run was planned; give the command again"
    return ""


def unloaded(plugins: Iterable[str], reason: str) -> str:
    """Returns in one line that a process cannot import the code of a run, why (`reason_of`), and what to do.

    plugins: the identities of those that the run uses.
    """
    names = ", ".join(identity.partition(" ")[0] for identity in plugins)
    what = f"the plugin {names}" if names else "the code of the run"
    return f"{what} cannot be imported any more: {reason}; mend the file and give the command again"


def only_on_this_machine(entries: Iterable[Entry]) -> list[str]:
    """The plugins among these names that another machine of a cluster cannot import: files outside of the repository.

    A node of a cluster has the repository and the installed packages, and nothing else.
    """
    found = []
    for entry in entries:
        module = entry.target.partition(":")[0]
        file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
        below = Path(*module.removeprefix("subquad.").split("."))
        inside = {REPOSITORY / below.with_suffix(".py"), REPOSITORY / below / "__init__.py"}
        if entry.plugin and "site-packages" not in file.parts and file not in inside:
            found.append(str(file))
    return sorted(set(found))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"--plugin {path}: no such file of Python; name a .py file or an importable module")
    stem, path = path.stem, path.resolve()
    if not stem.isidentifier():
        raise ValueError(f"--plugin {path}: a module cannot be called {stem!r}; rename the file, e.g. my_mixer.py")
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    # an earlier module of this name would be imported in its place, here and in every worker process
    spec = None if stem in sys.modules else importlib.util.find_spec(stem)
    found = getattr(sys.modules.get(stem), "__file__", None) if spec is None else spec.origin
    if found is None or Path(found).resolve() != path:
        raise ValueError(f"--plugin {path}: there is another module {stem!r} ({found}); rename the file")
    return _import(stem, str(path))


def _import_module(name: str) -> ModuleType:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ValueError(f"--plugin {name}: no such file, and no module of this name can be imported")
    return _import(name, name)


def _import(module: str, shown: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--plugin {shown}: cannot be imported: {reason_of(error)}") from None


def reason_of(error: BaseException) -> str:
    """Returns in one line why an import failed, given the error as the caller of the import has caught it."""
    frames = traceback.extract_tb(error.__traceback__)
    # a SyntaxError names its file and line, and an error of the caller's own frame has no other place
    has_place = len(frames) > 1 and not isinstance(error, SyntaxError)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if has_place else ""
    # names of before version 0.2; a module of the user's own may have one, too
    module = (error.name or "").split(".")[0] if isinstance(error, ImportError) else ""
    hint = f"; Subquad's own is subquad.{module}" if module in FOLDERS else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}{hint}"


def _entry(plugin: str, identity: str, module: ModuleType, table: str, key: object, value: Any) -> Entry:
    if not isinstance(key, str) or not key:
        raise ValueError(f"--plugin {plugin}: {table}: a name must be a word, got {key!r}")
    if isinstance(value, type):
        _check_importable(f"--plugin {plugin}: {table}[{key!r}]", value)
    lines = (getattr(value, "__doc__", None) or "").strip().splitlines()
    # the dictionary itself is the place, because a value need not have a name of its own in the module
    return Entry(f"{module.__name__}:{table}[{key}]", lines[0] if lines else f"from {plugin}", identity)


def identity_of(module: ModuleType, *, refresh: bool = True) -> str:
    """The identity of a plugin, or of any module that is not Subquad's, which this process has loaded.

    It is the name and version of the distribution that installed the module, else name and digest of its source files
    with those of the user's own modules that it imports (`suite.imports.digests_of`, also for `refresh`).
    """
    file = Path(getattr(module, "__file__", None) or "")
    if "site-packages" in file.parts:
        # this reads the list of files of every package that is installed
        distributions = importlib.metadata.packages_distributions().get(module.__name__.partition(".")[0])
        if distributions:
            return f"{distributions[0]} {importlib.metadata.version(distributions[0])}"
    digest, own = _imported.setdefault(module, _own(module))
    if others := {name: text for name, text in digests_of(own, refresh=refresh).items() if name not in own}:
        text = "".join(f"{name}\0{others[name]}\0" for name in sorted(others))
        digest = hashlib.sha256(f"{digest}\0{text}".encode()).hexdigest()
    return f"{module.__name__} sha256 {digest[:16]}"


def _own(module: ModuleType) -> tuple[str, frozenset[str]]:
    """The digest of the source files of a plugin as they are now, and the names of their modules."""
    file, name = Path(getattr(module, "__file__", None) or ""), module.__name__
    if file.name != "__init__.py":
        return files_digest([file], file.parent), frozenset({name})
    files = list(file.parent.rglob("*.py"))
    parts = (path.relative_to(file.parent).with_suffix("").parts for path in files)
    names = frozenset(".".join((name, *part)).removesuffix(".__init__") for part in parts)
    return files_digest(files, file.parent), names


def _changed(module: ModuleType) -> str:
    """Names in words a part of a plugin that this process has in another form than its files now; "" for none."""
    if module not in _imported:
        # an installed one, which has a version
        return ""
    if _own(module) != _imported[module]:
        return "its file"
    other = edited(digests_of(_imported[module][1]))
    return f"the module {other}, which it imports," if other else ""


def _check_importable(place: str, value: Any) -> None:
    """Raises ValueError for a class that worker processes, to which runs are sent, cannot import."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError):
        raise ValueError(
            f"{place}: worker processes cannot import {value.__qualname__}; define the class at the top of the module"
        ) from None
