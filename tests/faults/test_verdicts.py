"""The verdicts of `python -m tests.faults`, on a source of two lines."""

import os
import subprocess
import sys

from tests.faults.lists import HOME
from tests.processes import with_subquad

JUDGE = """
import sys
from pathlib import Path
from tests.faults.__main__ import judge
from tests.faults.lists import Fault

edits = [line.split(" -> ") for line in sys.argv[2:]]
faults = [Fault("source.py", f"to {new}", old, new, ("test_source.py",)) for old, new in edits]
sys.exit(judge(faults, [Path(sys.argv[1])]))
"""

BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Pytest without plugins, each of which would be imported once a fault."""


def verdicts(tree, *edits, test="assert double(2) == 4"):
    tree.mkdir(exist_ok=True)
    (tree / "source.py").write_text("def double(x):\n    return x * 2\n")
    # a source is older than its faults: Python compiles anew where the second or the size differs
    os.utime(tree / "source.py", (0, 0))
    (tree / "test_source.py").write_text(f"from source import double\n\n\ndef test_it():\n    {test}\n")
    done = subprocess.run(
        [sys.executable, "-c", JUDGE, tree, *edits], cwd=HOME, env=with_subquad() | BARE, capture_output=True, text=True
    )
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_survivor_a_text_that_is_gone_and_a_source_that_cannot_be_read_are_no_kills(tmp_path):
    code, said = verdicts(tmp_path / "tree", "x * 2 -> x * 3", "x * 2 -> x + x", "y * 2 -> 1", "x * 2 -> x *")
    assert [line.split()[0] for line in said.splitlines() if ": to " in line] == [
        "killed",
        "survived",
        "does",
        "broken",
    ]
    assert "test_source.py::test_it" in said
    assert said.splitlines()[-1] == "1 killed, 1 survived, 1 does not apply, 1 broken"
    assert code == 1
    assert "return x * 2" in (tmp_path / "tree" / "source.py").read_text()


def test_the_tests_must_pass_without_a_fault(tmp_path):
    code, said = verdicts(tmp_path / "tree", "x * 2 -> x * 3", test="assert double(2) == 5")
    assert (code, "killed" in said) == (1, False)
    assert said.splitlines()[-1] == "without any fault, these tests fail: pytest test_source.py"
