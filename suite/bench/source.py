"""A digest of everything in the source of a kernel that can change its machine code.

The digest covers the function with its decorators, the functions that it calls, and the constants that it reads from
its module, recursively. What Triton itself provides is left out, because it changes only with the version of Triton.
Also left out are comments, docstrings, line breaks, and the file and line in which the function stands, so that a
kernel can be documented or moved without being compiled again. Triton has such a key, too (`JITFunction.cache_key`),
but that one changes with every comment and line number.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from types import FunctionType, ModuleType
from typing import Any


def source_digest(function: Any) -> str:
    """The digest of a Python function, or of what Triton's decorators made of one, in 16 hexadecimal digits."""
    functions = [_python_function(function)]
    texts = []
    # the list grows by the functions that its elements call
    for caller in functions:
        text, called = _definition(caller)
        functions += [callee for callee in dict.fromkeys(called.values()) if callee not in functions]
        texts += [text, *(f"{name}: function {functions.index(callee)}" for name, callee in called.items())]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


@cache
def _definition(function: FunctionType) -> tuple[str, dict[str, FunctionType]]:
    """The definition with the constants that it reads from its module as text, and the functions that it calls."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    # parameters and variables hide what has the same name outside
    scope = {name: value for name, value in scope.items() if name not in function.__code__.co_varnames}
    constants, called = {}, {}
    for name, value in _names(definition, scope):
        callee = _python_function(value)
        if not isinstance(callee, FunctionType):
            constants[name] = f"{name} = {value!r}"
        elif callee.__module__.partition(".")[0] != "triton":
            called[name] = callee
    _drop_docstring(definition)
    return "\n".join([ast.unparse(definition), *constants.values()]), called


def _python_function(value: Any) -> Any:
    """The Python function inside the objects that `triton.jit`, `autotune` and `heuristics` return."""
    # the attribute `fn` of a class, or of anything that is not a wrapper, may mean something else
    while not isinstance(value, (FunctionType, ModuleType, type)) and callable(getattr(value, "fn", None)):
        value = value.fn
    return value


def _names(definition: ast.AST, scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names that a definition reads from its module or closure, `helper` as well as `module.helper`."""

    def resolve(node: ast.AST) -> tuple[str, Any]:
        if isinstance(node, ast.Name):
            return node.id, scope.get(node.id)
        if isinstance(node, ast.Attribute):
            place, owner = resolve(node.value)
            if isinstance(owner, ModuleType):
                return f"{place}.{node.attr}", getattr(owner, node.attr, None)
        return "", None

    for node in ast.walk(definition):
        name, value = resolve(node)
        if value is not None and not isinstance(value, ModuleType):
            yield name, value


def _drop_docstring(definition: ast.AST) -> None:
    if isinstance(definition, ast.FunctionDef) and ast.get_docstring(definition, clean=False) is not None:
        definition.body = definition.body[1:] or [ast.Pass()]
