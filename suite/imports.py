"""The modules of a user's own that a plugin imports, which decide its numbers as much as the plugin itself.

They are found in the source of each module and not among the modules that Python has loaded: a function may import its
modules later, and another plugin may have loaded them before. Left out are the modules of Python, of installed packages
and of Subquad.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import pkgutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.suite.identity import file_digest

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders into which packages are installed."""
PYTHON = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
"""Folders of Python's own modules."""
BY_NAME = ("import_module", "__import__")
"""Functions that import the module whose name they are given."""
BY_FILE = ("spec_from_file_location", "SourceFileLoader", "run_path", "run_module", "iter_modules", "walk_packages")
"""Functions that find or execute modules which no import statement names."""


@dataclass(frozen=True)
class _Source:
    """Content of a module: its digest ("" where it is empty), and the names of the modules that it may import."""

    digest: str = ""
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    """The file of a module (None for a package without `__init__.py`) and the folders of its submodules."""

    file: Path | None
    folders: tuple[str, ...]


_loaded: dict[str, tuple[Any, _Source]] = {}
"""Names of modules that this process has loaded, with the module and its content when it was first seen."""
_awaited: dict[str, _Source] = {}
"""Names of modules that this process has not loaded yet, with their content when it was last read."""


def digests_of(modules: Iterable[str], *, refresh: bool = True) -> dict[str, str]:
    """Digests, by name, of these modules and of those of the user's own that they import, directly or not.

    A module that this process has loaded has the digest that its file had when the module was first seen here.
    refresh: read the files of all other modules anew; else they have the digest of the last call.
    """
    found: dict[str, str] = {}
    places: dict[str, _Place | None] = {}
    waiting, seen = list(modules), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if source := _seen(name) or _source(name, _locate(name, places), refresh):
            if source.digest:
                found[name] = source.digest
            # an import of a.b executes a, too
            waiting += [*source.imports, *filter(None, [name.rpartition(".")[0]])]
    return found


def edited(modules: Iterable[str]) -> str:
    """The name of one of these modules whose file has changed since this process has loaded it; "" if there is none."""
    for name in modules:
        source = _seen(name)
        if source is not None and source != _read(name, _locate(name, {})):
            return name
    return ""


def content_of(modules: Iterable[str]) -> list[str]:
    """The digests of the files of those of these loaded modules that the user wrote."""
    places = [Path(file) for name in modules if (file := getattr(sys.modules[name], "__file__", None))]
    found = [place.file for path in places if (place := _own(_Place(path, ()))) and place.file]
    return [file_digest(file) for file in found]


def _seen(name: str) -> _Source | None:
    """The content that a module had when it was first seen to be loaded; None where that was not seen."""
    module, source = _loaded.get(name, (None, None))
    return source if module is sys.modules.get(name) else None


def _locate(name: str, places: dict[str, _Place | None]) -> _Place | None:
    """The place of a module that the user wrote; None for all others. places: those found before."""
    if name not in places:
        places[name] = None if name.partition(".")[0] == "subquad" else _find(name, places)
    return places[name]


def _find(name: str, places: dict[str, _Place | None]) -> _Place | None:
    parent = name.rpartition(".")[0]
    above = _locate(parent, places) if parent else None
    if parent and above is None:
        return None
    if above is not None and parent not in sys.modules:
        # the import system would import the parent
        return _among(name, above.folders)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = tuple(spec.submodule_search_locations or ())
    return _own(_Place(Path(spec.origin), folders) if spec.has_location and spec.origin else _Place(None, folders))


def _among(name: str, folders: Iterable[str]) -> _Place | None:
    portions: list[str] = []
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        spec = None if finder is None else finder.find_spec(name)
        if spec is None:
            continue
        if spec.loader is not None and spec.origin:
            return _own(_Place(Path(spec.origin), tuple(spec.submodule_search_locations or ())))
        portions += spec.submodule_search_locations or ()
    return _Place(None, tuple(portions)) if portions else None


def _own(place: _Place) -> _Place | None:
    """The place, if it is neither Python's nor that of an installed package, and has something to read."""
    if place.file is None:
        return place if place.folders else None
    # a module may lie in an archive
    file = next((path for path in (place.file, *place.file.parents) if path.is_file()), None)
    if file is None:
        return None
    true = file.resolve()
    if INSTALLED & {*file.parts, *true.parts} or any(true.is_relative_to(folder) for folder in PYTHON):
        return None
    return _Place(file, place.folders)


def _source(name: str, place: _Place | None, refresh: bool) -> _Source | None:
    if place is None:
        return None
    if (module := sys.modules.get(name)) is not None:
        _loaded[name] = module, _read(name, place)
        return _loaded[name][1]
    if refresh or name not in _awaited:
        _awaited[name] = _read(name, place)
    return _awaited[name]


def _read(name: str, place: _Place | None) -> _Source:
    if place is None or place.file is None:
        return _Source()
    content = place.file.read_bytes()
    # the empty file that makes a folder a package decides nothing
    digest = hashlib.sha256(content).hexdigest() if content.strip() else ""
    try:
        tree = ast.parse(content if place.file.suffix == ".py" else b"")
    except (SyntaxError, ValueError):
        # whoever imports it gets the error
        return _Source(digest)
    imports: list[str] = []
    for found in _imports(tree, name if place.folders else name.rpartition(".")[0]):
        imports += [found] if found is not None else _any_beside(name, place.file, bool(place.folders))
    return _Source(digest, tuple(dict.fromkeys(imports)))


def _any_beside(name: str, file: Path, is_package: bool) -> list[str]:
    """Names of all modules in the package of a module, or beside a module that is in none."""
    top = [name.partition(".")[0]] if is_package or "." in name else []
    folder = file.parents[name.count(".") - (not is_package) if top else 0]
    files = sorted(folder.rglob("*.py") if top else folder.glob("*.py"))
    parts = (file.relative_to(folder).with_suffix("").parts for file in files)
    return [".".join((*top, *part)).removesuffix(".__init__") for part in parts]


def _imports(tree: ast.Module, package: str) -> Iterator[str | None]:
    """Names that the code of a module of this package may import; None for each that is known at run time only."""
    for node in _nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                if base := _absolute("." * level + (module or ""), package):
                    # a name that is no module is an attribute, and is not found
                    yield from (base, *(f"{base}.{alias.name}" for alias in names))
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=parts) | ast.Tuple(elts=parts)):
                # `from package import *` imports these where they are modules
                yield from (f"{package}.{part.value!s}" for part in parts if isinstance(part, ast.Constant))
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=arguments):
                if called in BY_NAME:
                    match arguments:
                        case [ast.Constant(value=str(given))]:
                            yield _absolute(given, package)
                        case [ast.Constant(value=str(given)), *_] if called == "__import__":
                            yield given
                        case _:
                            yield None
                elif called in BY_FILE:
                    yield None


def _absolute(name: str, package: str) -> str | None:
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:
        return None


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The parts of a syntax tree without those that only type checkers read."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=others):
                waiting += others
            case _:
                waiting += ast.iter_child_nodes(node)
