"""Plants faults in a copy of the sources, one at a time, and demands that the tests find each of them.

    python -m tests.faults                          # all faults
    python -m tests.faults delta_rule tasks/mqar    # those whose file or sentence contains one of these texts

The exit code is 1 if a fault survives, no longer applies, or breaks more than a test could find. The module
`tests.faults.lists` describes the lists.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.faults.lists import HOME, Fault, read

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "results", ".*_cache", ".hypothesis")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Demand that the tests find faults.")
    parser.add_argument("select", nargs="*", help="texts; only faults whose file or sentence contains one of them")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="runs of tests at a time (default: %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="only list the faults, with what pytest is given")
    arguments = parser.parse_args()
    every = read()
    if unknown := [text for text in arguments.select if not any(text in str(fault) for fault in every)]:
        parser.error(f"no fault has {unknown[0]!r} in its file or sentence")
    faults = [x for x in every if not arguments.select or any(text in str(x) for text in arguments.select)]
    if arguments.list:
        print(*(f"{fault}\n    pytest {' '.join(fault.tests)}" for fault in faults), sep="\n")
        return 0
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
            trees = [Path(folder, str(i)) for i in range(max(1, arguments.jobs))]
            for tree in trees:
                shutil.copytree(HOME, tree, ignore=LEFT_OUT, symlinks=True)
                # the committed rows are only read, and are larger than all sources together
                (tree / "results").mkdir()
                (tree / "results" / "reference").symlink_to(HOME / "results" / "reference")
        except OSError as error:
            reason = str(error)[:200]
            parser.error(
                f"cannot copy the sources ({reason}); set TMPDIR to a folder with room for {arguments.jobs} copies"
            )
        prepare()
        return judge(faults, trees)


def prepare() -> None:
    """Imports what takes long, once for all runs of tests, which are forks of this process.

    Kernels are interpreted, and a run of tests has one thread.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    import torch  # noqa: F401
    import triton  # noqa: F401


def judge(faults: list[Fault], trees: list[Path]) -> int:
    """Runs the tests without a fault, then with each; the exit code."""
    for tests, _, code, report in runs(dict.fromkeys(fault.tests for fault in faults), trees):
        if code != pytest.ExitCode.OK:
            print(report, f"without any fault, these tests fail: pytest {' '.join(tests)}", sep="\n")
            return 1
    counts = dict.fromkeys(["killed", "survived", "does not apply", "broken"], 0)
    for fault, seconds, code, report in runs(faults, trees):
        killer = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", report, re.M)
        if code is None:
            verdict, note = "does not apply", report
        elif code == pytest.ExitCode.OK:
            verdict, note = "survived", f"pytest {' '.join(fault.tests)}"
        elif code == pytest.ExitCode.TESTS_FAILED and killer:
            verdict, note = "killed", killer[1]
        else:
            # the sources cannot be imported, say: this proves nothing about the tests
            verdict, note = "broken", report
        counts[verdict] += 1
        print(f"{verdict:<9}{seconds:5.1f} s  {fault}\n{'':18}{note}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    return int(counts["killed"] < len(faults))


def runs(
    things: Iterable[Fault | tuple[str, ...]], trees: list[Path]
) -> Iterator[tuple[Fault | tuple[str, ...], float, int | None, str]]:
    """Runs pytest for faults or bare arguments, one in a tree at a time; yields seconds, exit code and output."""
    waiting, idle, running = list(things)[::-1], list(trees), {}
    try:
        while waiting or running:
            if waiting and idle:
                thing, tree = waiting.pop(), idle.pop()
                try:
                    undo = plant(thing, tree) if isinstance(thing, Fault) else None
                except (ValueError, OSError) as error:
                    idle.append(tree)
                    yield thing, 0.0, None, str(error)
                    continue
                tests = thing.tests if isinstance(thing, Fault) else thing
                if not (child := os.fork()):
                    run_tests(tests, tree, planted=undo is not None)
                running[child] = thing, tree, undo, time.perf_counter()
                continue
            child, status = os.wait()
            thing, tree, undo, start_s = running.pop(child)
            if undo:
                os.replace(*undo)
            idle.append(tree)
            report = Path(f"{tree}.log").read_text(errors="replace")
            yield thing, time.perf_counter() - start_s, os.waitstatus_to_exitcode(status), report
    finally:
        for child in running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def plant(fault: Fault, tree: Path) -> tuple[Path, Path]:
    """Makes the edit; the source without it is kept beside, with its date, and is to be renamed back."""
    path, kept = tree / fault.file, tree / f"{fault.file}.kept"
    planted = fault.planted(path.read_text())
    os.replace(path, kept)
    path.write_text(planted)
    return kept, path


def run_tests(tests: tuple[str, ...], tree: Path, planted: bool) -> NoReturn:
    """Runs pytest in a tree and ends this process with its exit code."""
    os.chdir(tree)
    # our own modules are imported from the tree
    sys.path[:1] = [str(tree / "suite" / "package"), str(tree)]
    for name in [x for x in sys.modules if x.split(".")[0] in ("subquad", "tests")]:
        del sys.modules[name]
    log = os.open(f"{tree}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # bytecode of the clean run stays valid for all sources but the changed one
    sys.dont_write_bytecode = planted
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1" if planted else ""
    # a list may name slow tests, `-m slow`
    code = pytest.main(["-x", "-p", "no:cacheprovider", "-m", "not slow and not timing", *tests])
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
