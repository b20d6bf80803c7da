"""Budgets of compiled kernels: what each one may cost on a GPU, checked without one.

Every variant that the operators launch (`suite.bench.compile`) is compiled ahead of time for each target, and its
figures (`suite.bench.disassembly`) are held against those committed in a file:

    {"signatures": {VARIANT: "x:*bf16/16 T:i32/16 bias=None"},
     "budgets": {TRITON VERSION: {TARGET: {VARIANT: {"registers": 40, "spills": 0, "stack": 0, "shared": 0,
                                                     "instructions": 512, "matrix": {}, "loads": {"16": 8}}}}}}

A variant is `op/kernel[pointer types, constants, options]#digits`, the digits standing for its signature. Where it
cannot be compiled for a target, or takes more shared memory than that has, the reason stands in place of the figures.
One line a variant, so that a diff of the file is a list of what changed.

A figure may not exceed its budget (instructions: by 5 %, for they tell little of time), nor may matrix instructions of
a kind become fewer, nor the narrowest or the mean load narrower; and no code may read what nothing wrote. A variant
without a budget and a budget without a variant are violations too. Budgets hold for one version of Triton; with another
there is nothing to check.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from suite.bench.compile import TARGETS
from suite.bench.disassembly import Figures
from suite.environment import REPOSITORY

FILE = REPOSITORY / "kernels" / "budgets.json"
UPDATE = "python run_suite.py bench --update-budgets"
INSTRUCTIONS = 1.05
"""How far the number of instructions may exceed its budget."""
MAX_JOBS = 16
"""Each process takes seconds to start."""
KEPT_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME")
"""The only settings of Triton that reach the compiler: any other could change what it makes."""

Found = Figures | str
"""Figures, or the reason why the variant cannot be compiled."""


@dataclass(frozen=True)
class Collection:
    """What the compiler makes of the operators today."""

    triton: str
    ops: tuple[str, ...]
    signatures: dict[str, str]
    """By variant."""
    found: dict[str, dict[str, Found]]
    """By target and variant; a target that Triton cannot compile for is not there."""
    unavailable: dict[str, str]
    """The reason, by target."""
    failures: tuple[str, ...]
    """Cases whose kernels could not be seen."""


@dataclass(frozen=True)
class Violation:
    """One line: which kernel, which target, what."""

    variant: str
    target: str
    problem: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.variant, self.target))) + f": {self.problem}"


def triton_version() -> str | None:
    """None where Triton is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def reason(path: Path = FILE) -> str | None:
    """Why nothing can be checked here."""
    version = triton_version()
    if version is None:
        return "Triton is not installed"
    known = _read(path)["budgets"]
    if version not in known:
        return f"{path.name} has no budgets for Triton {version}, only for {', '.join(known) or 'none'}; {UPDATE}"
    return None


def collect(
    workloads: Mapping[str, str],
    targets: Sequence[str] | None = None,
    jobs: int | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Collection:
    """Compiles every variant of the operators, in `jobs` processes (default: one a core, MAX_JOBS at most).

    workloads: where the workload of an operator stands, `module:attribute`.
    progress:  is told how many of how many variants are done.
    """
    setting = {"workloads": dict(workloads), "targets": list(targets or TARGETS)}
    count = jobs or min(MAX_JOBS, os.cpu_count() or 1)
    processes = [_start(setting) for _ in range(count)]
    try:
        first = _answer(processes[0])
        variants: dict[str, dict[str, str]] = first["variants"]
        waiting: SimpleQueue[tuple[str, str]] = SimpleQueue()
        for target, known in variants.items():
            for name in known:
                waiting.put((target, name))
        total = waiting.qsize()
        done: list[str] = []
        found: dict[str, dict[str, Found]] = {target: dict.fromkeys(known, "") for target, known in variants.items()}

        def work(process: subprocess.Popen[str]) -> None:
            # each has seen the same launches, so a name is enough
            if process is not processes[0]:
                _answer(process)
            for target, name in _drain(waiting):
                answer = _answer(process, [target, name])
                found[target][name] = answer if isinstance(answer, str) else Figures(**answer)
                done.append(name)
                progress(len(done), total)

        with ThreadPoolExecutor(count) as threads:
            list(threads.map(work, processes))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    signatures = {name: signature for known in variants.values() for name, signature in known.items()}
    version = triton_version()
    assert version is not None
    return Collection(version, tuple(workloads), signatures, found, first["unavailable"], tuple(first["failures"]))


def _start(setting: Mapping[str, Any]) -> subprocess.Popen[str]:
    kept = {key: value for key, value in os.environ.items() if key in KEPT_VARIABLES or not key.startswith("TRITON_")}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "suite.bench.compile", json.dumps(setting)],
        cwd=REPOSITORY,
        env={**kept, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _answer(process: subprocess.Popen[str], question: Any = None) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    if question is not None:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the compiling process ended with code {process.wait()} at {question or 'its start'}")
    return json.loads(line)


def _drain(waiting: SimpleQueue[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    while True:
        try:
            yield waiting.get_nowait()
        except Empty:
            return


def check(collection: Collection, path: Path = FILE) -> list[Violation]:
    """What is over budget. ValueError where the file has no budgets for this version of Triton (see `reason`)."""
    budgets = _read(path)["budgets"]
    if collection.triton not in budgets:
        raise ValueError(f"{path.name} has no budgets for Triton {collection.triton}; {UPDATE}")
    violations = [Violation("", "", failure) for failure in collection.failures]
    for target, found in collection.found.items():
        known = _of_ops(budgets[collection.triton].get(target, {}), collection.ops)
        for name, figures in found.items():
            problems = _exceeded(figures, _load(known[name])) if name in known else [f"no budget; {UPDATE}"]
            violations += [Violation(name, target, problem) for problem in problems]
        gone = [name for name in known if name not in found]
        violations += [Violation(name, target, f"a budget that no kernel has; {UPDATE}") for name in gone]
    return violations


def _exceeded(figures: Found, budget: Found) -> Iterator[str]:
    if isinstance(figures, str) or isinstance(budget, str):
        if isinstance(figures, str) and not isinstance(budget, str):
            yield f"cannot be compiled any more: {figures}"
        elif isinstance(budget, str) and not isinstance(figures, str):
            yield f"can be compiled now; {UPDATE}"
        return
    if figures.unwritten:
        yield f"reads uniform registers that nothing wrote, {figures.unwritten} times: the compiler erred"
    for name in ("registers", "scalars", "spills", "stack", "shared"):
        if (value := getattr(figures, name)) > (limit := getattr(budget, name)):
            yield f"{name} {value} > budget {limit}"
    if figures.instructions > INSTRUCTIONS * budget.instructions:
        yield f"instructions {figures.instructions} > budget {budget.instructions} and 5 %"
    for kind, count in budget.matrix.items():
        if (value := figures.matrix.get(kind, 0)) < count:
            yield f"{kind} instructions {value} < budget {count}"
    for what, width, least in (
        ("narrowest", figures.narrowest_load, budget.narrowest_load),
        ("mean", figures.mean_load, budget.mean_load),
    ):
        # a kernel that no longer loads has lost nothing
        if width is not None and least is not None and width < least:
            yield f"{what} load {width:.3g} bytes < budget {least:.3g}"


def update(collection: Collection, path: Path = FILE) -> str:
    """Rewrites the budgets of these operators for this version of Triton and says what changed, a line a variant.

    ValueError where the kernels of a case could not be seen, for its budgets would be lost.
    """
    if collection.failures:
        raise ValueError(f"no budgets written: {collection.failures[0]}")
    data = _read(path)
    budgets = data["budgets"].setdefault(collection.triton, {})
    lines = [f"{target}: n/a ({why})" for target, why in collection.unavailable.items()]
    for target, found in collection.found.items():
        old = budgets.get(target, {})
        ours = _of_ops(old, collection.ops)
        new = {name: figures if isinstance(figures, str) else _dump(figures) for name, figures in found.items()}
        for name in sorted(ours.keys() | new.keys()):
            if (change := _change(ours.get(name), new.get(name))) is not None:
                lines.append(f"{name} {target}: {change}")
        rest = {name: value for name, value in old.items() if name not in ours}
        budgets[target] = dict(sorted({**rest, **new}.items()))
    signatures = {**data["signatures"], **collection.signatures}
    used = {name for targets in data["budgets"].values() for known in targets.values() for name in known}
    data["signatures"] = {name: signature for name, signature in sorted(signatures.items()) if name in used}
    # as deep as a variant
    sections = [f'"{key}": {_format(data[key], levels)}' for key, levels in (("signatures", 1), ("budgets", 3))]
    path.write_text("{" + ",\n".join(sections) + "}\n")
    return "\n".join(lines) or "no change"


def _change(old: Any, new: Any) -> str | None:
    """`registers 40 -> 48, spills 0 -> 2`, or None where nothing changed."""
    if old == new:
        return None
    if old is None or new is None or isinstance(old, str) or isinstance(new, str):
        return f"{_words(old)} -> {_words(new)}"
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} {old.get(key, 0)} -> {new.get(key, 0)}" for key in keys)


def _words(budget: Any) -> str:
    if budget is None:
        return "none"
    return (
        f"n/a ({budget})" if isinstance(budget, str) else ", ".join(f"{key} {value}" for key, value in budget.items())
    )


def _of_ops(budgets: Mapping[str, Any], ops: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in budgets.items() if name.split("/")[0] in ops}


def _load(value: Any) -> Found:
    return value if isinstance(value, str) else Figures(**value)


def _dump(figures: Figures) -> dict[str, Any]:
    """Figures that are zero on principle are left out."""
    return {key: value for key, value in asdict(figures).items() if key not in ("scalars", "unwritten") or value}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"signatures": {}, "budgets": {}}


def _format(value: Any, levels: int, indent: str = "") -> str:
    """JSON that has a line for every entry down to some level."""
    if not levels or not value:
        return json.dumps(value)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(key)}: {_format(item, levels - 1, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
