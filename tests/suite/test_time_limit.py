"""The options `--limit-s` and `--until`: a quick test that computes for too long fails; late tests do not begin."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests import time_limit

TESTS = """
import subprocess, sys, time
import pytest

WORK = "import time; end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass"

def test_long():
    exec(WORK)

def test_long_in_a_child():
    subprocess.run([sys.executable, "-c", WORK], check=True)

@pytest.fixture
def long_fixture():
    exec(WORK)

def test_with_a_long_fixture(long_fixture):
    pass

@pytest.mark.slow
def test_marked():
    exec(WORK)

def test_waiting():
    time.sleep(0.3)

def test_short():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_only_a_test_that_computes_for_long_without_the_mark_fails_the_session(tmp_path, workers):
    shutil.copy(time_limit.__file__, tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", "-n", workers, "--limit-s", "0.15"]
    # no other plugins, whose import takes longer than the tests
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert found.returncode == pytest.ExitCode.TESTS_FAILED
    assert "6 passed" in found.stdout
    summary = found.stdout.split("more than 0.15 s without the mark `slow`")[1]
    named = [line.split("::")[1] for line in summary.splitlines() if "::" in line]
    assert named == ["test_long", "test_long_in_a_child", "test_with_a_long_fixture"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_no_test_begins_after_the_time_and_the_number_of_them_is_said(tmp_path, workers):
    shutil.copy(time_limit.__file__, tmp_path / "conftest.py")
    (tmp_path / "test_it.py").write_text("".join(f"def test_{name}(): pass\n" for name in "abcd"))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "xdist.plugin", "-n", workers, "--until"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def said(until):
        return subprocess.run(
            [*command, str(until)], cwd=tmp_path, capture_output=True, text=True, env=environment
        ).stdout

    assert "4 tests had no time left to begin" in said(4_000)
    late = said(4_000_000_002)
    assert "4 passed" in late
    assert "no time" not in late
    if workers == "0":
        assert re.findall(r"::test_(.) PASSED", late) == ["c", "d", "a", "b"]
