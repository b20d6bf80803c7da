"""The digest of a kernel's source changes with whatever changes its machine code, and with nothing else."""

import importlib.util

import pytest

from subquad.suite.bench.source import source_digest

triton = pytest.importorskip("triton")

MODULE = """
import triton
import triton.language as tl

import helpers

SCALE = tl.constexpr(2)
UNUSED = 1
y = 1


@triton.jit
def _scaled(x):
    return helpers.shifted(x) * SCALE


@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, _scaled(tl.load(x + i)))
"""
HELPERS = """
import triton


@triton.jit
def shifted(x):
    return x + 1
"""


def digest(folder, monkeypatch, module=MODULE, helpers=HELPERS):
    folder.mkdir(parents=True, exist_ok=True)

    def load(name, text):
        path = folder / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        loaded = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(__import__("sys").modules, name, loaded)
        spec.loader.exec_module(loaded)
        return loaded

    load("helpers", helpers)
    return source_digest(load("kernels_under_test", module).kernel)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i = tl.arange", "i = 0 + tl.arange"),
        ("* SCALE", "/ SCALE"),
        ("tl.constexpr(2)", "tl.constexpr(3)"),
        ("@triton.jit\ndef kernel", "@triton.jit(noinline=True)\ndef kernel"),
    ],
    ids=["body", "called function", "constant", "decorator"],
)
def test_an_edit_of_the_code_changes_the_digest(tmp_path, monkeypatch, old, new):
    assert MODULE.count(old) == 1
    edited = MODULE.replace(old, new)
    assert digest(tmp_path / "a", monkeypatch) != digest(tmp_path / "b", monkeypatch, edited)


def test_an_edit_of_a_function_in_another_module_changes_the_digest(tmp_path, monkeypatch):
    edited = HELPERS.replace("x + 1", "x + 2")
    assert digest(tmp_path / "a", monkeypatch) != digest(tmp_path / "b", monkeypatch, helpers=edited)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    i = tl", '    """Copies."""\n    # a comment\n    i = tl'),
        ("SCALE =", "\n\n\nSCALE ="),
        ("UNUSED = 1", "UNUSED = 2"),
        ("\ny = 1", "\ny = 2"),
        (
            "tl.store(y + i, _scaled(tl.load(x + i)))",
            "tl.store(\n        y + i,\n        _scaled(tl.load(x + i)),\n    )",
        ),
    ],
    ids=["docstring and comment", "lines", "unused constant", "hidden constant", "layout"],
)
def test_an_edit_beside_the_code_does_not(tmp_path, monkeypatch, old, new):
    assert MODULE.count(old) == 1
    edited = MODULE.replace(old, new)
    assert digest(tmp_path / "a", monkeypatch) == digest(tmp_path / "b", monkeypatch, edited)
