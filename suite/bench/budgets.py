"""Budgets of compiled kernels: what each kernel may cost on a GPU, checked on a machine without one.

Every variant that the operators launch (`suite.bench.compile`) is compiled ahead of time for each target, and its
figures (`suite.bench.disassembly`) are compared with those in a committed file:

    {"signatures": {VARIANT: "x:*bf16/16 T:i32/16 bias=None"},
     "budgets": {TRITON VERSION: {TARGET: {VARIANT: {"registers": 40, "spills": 0, "stack": 0, "shared": 0,
                                                     "instructions": 512, "matrix": {}, "loads": {"16": 8}}}}},
     "digests": {TRITON VERSION: {TARGET: {VARIANT: "91c4e0b7d2a35f68"}}},
     "calls": {TRITON VERSION: {TARGET: {CASE: "1 _fwd_kernel, 1 _sum_kernel; 1 zeros; 4096"}}}}

A variant is `op/kernel[pointer types, constants, options]#digits`, where the digits are a digest of its signature.
Where a variant cannot be compiled for a target, or takes more shared memory than the target has, the reason stands in
place of figures. Each variant has one line, so that a diff of the file lists what changed.

A figure may not exceed its budget; only instructions may, by 5 %, because their number says little about time. There
may not be fewer matrix instructions of a kind than the budget says, the narrowest load and the mean load may not be
narrower, and no instruction may read a register that nothing has written. A variant without a budget and a budget
without a variant are violations, too; where both are of one kernel, as after another tile, the line has both figures.
Budgets hold for one version of Triton; with another, nothing can be checked.

A launcher costs time, too: for a call of each case the file has the kernels, the other operations that start something
on a GPU, and the bytes that it allocates (`suite.bench.calls`). None of the three numbers may rise.

The digests are those of the source that the budgets were written from (`Launch.digest`). A variant with the same digest
would be compiled to the same machine code, so the quick tier of the tests does not compile it again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from subquad.suite.bench.calls import Calls, by_targets, compared
from subquad.suite.bench.compile import TARGETS
from subquad.suite.bench.disassembly import Figures
from subquad.suite.environment import REPOSITORY, import_path
from subquad.suite.store.documents import read_object

FILE = REPOSITORY / "kernels" / "budgets.json"
UPDATE = "python run_suite.py bench --update-budgets"
INSTRUCTIONS = 1.05
"""The factor by which the number of instructions may exceed its budget."""
MAX_JOBS = 16
"""The largest default number of processes; each takes seconds to start."""
KEPT_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME")
"""The only environment variables of Triton that the compiling processes inherit; others could change the code."""

Found = Figures | str
"""Figures, or the reason why the variant cannot be compiled."""


class Variant(NamedTuple):
    """A variant as the compiling process lists it."""

    signature: str
    digest: str


Digests = dict[str, dict[str, str]]
"""Digests of the source, by target and variant."""


@dataclass(frozen=True)
class Collection:
    """The variants that the operators launch, and the figures of those that were compiled.

    triton:      the version of Triton.
    ops:         the operators.
    signatures:  signature by variant.
    digests:     digest of the source by target and variant. It names every variant that is launched on a target; a
                 target for which Triton cannot compile is left out.
    found:       figures by target and variant, of the variants that were compiled.
    unavailable: by target, the reason why Triton cannot compile for it.
    failures:    a line for each case whose kernels could not be recorded.
    calls:       by target and case, what one call starts and allocates.
    """

    triton: str
    ops: tuple[str, ...]
    signatures: dict[str, str]
    digests: Digests
    found: dict[str, dict[str, Found]]
    unavailable: dict[str, str]
    failures: tuple[str, ...]
    calls: dict[str, dict[str, Calls]] = field(default_factory=dict)


@dataclass(frozen=True)
class Violation:
    """One line that says which kernel or call on which target violates what; without both, the problem says it."""

    variant: str
    target: str
    problem: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (f"{self.variant} {self.target}".strip(), self.problem)))


WRONG = "the compiler made wrong code"


def triton_version() -> str | None:
    """The installed version of Triton; None where it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def reason(path: Path = FILE, update: str = UPDATE) -> str | None:
    """Why nothing can be checked on this machine; None where budgets can be checked. update: rewrites the budgets."""
    version = triton_version()
    if version is None:
        return "Triton is not installed"
    known = _read(path)["budgets"]
    if version not in known:
        only = f", only for {', '.join(known)}" if known else ""
        return f"{path.name} has no budgets for Triton {version}{only}; {update}"
    return None


def digests(path: Path = FILE) -> Digests:
    """The digests of the source that the budgets for the installed version of Triton were written from."""
    return _read(path)["digests"].get(triton_version(), {})


def collect(
    workloads: Mapping[str, str],
    targets: Sequence[str] | None = None,
    jobs: int | None = None,
    *,
    unchanged: Mapping[str, Mapping[str, str]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Collection:
    """Lists the variants of the operators and compiles them, except those whose digest is in `unchanged`.

    workloads: the place of each operator's workload, as in `suite.registry.Entry`.
    targets:   names of GPUs; all of `TARGETS` by default.
    jobs:      number of processes; by default one for each core, but at most MAX_JOBS.
    unchanged: digests by target and variant, such as `digests` returns. None compiles all variants.
    progress:  called with the number of variants that are compiled and the number of all that will be.
    """
    setting = {"workloads": dict(workloads), "targets": list(targets or TARGETS), "path": sys.path}
    processes = [_start(setting)]
    try:
        first = _answer(processes[0])
        listed = {
            target: {name: Variant(*pair) for name, pair in known.items()}
            for target, known in first["variants"].items()
        }
        known = unchanged or {}
        tasks = [
            (target, name)
            for target, variants in listed.items()
            for name, variant in variants.items()
            if known.get(target, {}).get(name) != variant.digest
        ]
        count = min(jobs or min(MAX_JOBS, os.cpu_count() or 1), len(tasks))
        processes += [_start(setting) for _ in range(1, count)]
        waiting: SimpleQueue[tuple[str, str]] = SimpleQueue()
        for task in tasks:
            waiting.put(task)
        found: dict[str, dict[str, Found]] = {target: {} for target in listed}
        done: list[str] = []

        def work(process: subprocess.Popen[str]) -> None:
            # every process lists the same variants, so a name is enough from here on
            if process is not processes[0]:
                _answer(process)
            for target, name in _drain(waiting):
                answer = _answer(process, [target, name])
                found[target][name] = answer if isinstance(answer, str) else Figures(**answer)
                done.append(name)
                progress(len(done), len(tasks))

        with ThreadPoolExecutor(len(processes)) as threads:
            list(threads.map(work, processes))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    version = triton_version()
    assert version is not None
    return Collection(
        triton=version,
        ops=tuple(workloads),
        signatures={name: variant.signature for variants in listed.values() for name, variant in variants.items()},
        digests={
            target: {name: variant.digest for name, variant in variants.items()} for target, variants in listed.items()
        },
        found=found,
        unavailable=first["unavailable"],
        failures=tuple(first["failures"]),
        calls={
            target: {case: Calls.from_text(text) for case, text in known.items()}
            for target, known in first["calls"].items()
        },
    )


def _start(setting: Mapping[str, Any]) -> subprocess.Popen[str]:
    kept = {key: value for key, value in os.environ.items() if key in KEPT_VARIABLES or not key.startswith("TRITON_")}
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", "subquad.suite.bench.compile", json.dumps(setting)],
        cwd=REPOSITORY,
        env={**kept, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
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


def check(collection: Collection, path: Path = FILE, update: str = UPDATE) -> list[Violation]:
    """The violations of the budgets, of variants that were not compiled only whether they have a budget.

    update: the command that rewrites the budgets.

    ValueError where the file has no budgets for this version of Triton (see `reason`).
    """
    data = _read(path)
    budgets = data["budgets"]
    if collection.triton not in budgets:
        raise ValueError(f"{path.name} has no budgets for Triton {collection.triton}; {update}")
    violations = [Violation("", "", failure) for failure in collection.failures]
    for target, variants in collection.digests.items():
        known = _of_ops(budgets[collection.triton].get(target, {}), collection.ops)
        compiled = collection.found[target]
        successors = _successors(known, variants, {**data["signatures"], **collection.signatures})
        for name in variants:
            problems: Iterable[str] = ()
            if (old := successors.get(name)) and name in compiled:
                problems = [f"{_replaces(old)}, {_beside(known[old], _dump(compiled[name]))}; {update}"]
            elif name not in known:
                problems = [f"no budget; {update}"]
            elif name in compiled:
                problems = _exceeded(compiled[name], _load(known[name]), update)
            violations += [Violation(name, target, problem) for problem in problems]
        gone = [name for name in known if name not in variants and name not in successors.values()]
        violations += [Violation(name, target, f"a budget that no kernel has; {update}") for name in gone]
    return violations + _exceeded_calls(collection, data["calls"].get(collection.triton, {}), update)


def _exceeded_calls(collection: Collection, budgets: Mapping[str, Any], update: str) -> list[Violation]:
    """The violations of launchers."""
    if collection.calls and not budgets:
        return [Violation("", "", f"no budgets of launches, other operations and allocated bytes yet; {update}")]
    lines = []
    for target, calls in collection.calls.items():
        known = _of_ops(budgets.get(target, {}), collection.ops)
        for case, found in calls.items():
            if case not in known:
                lines.append((case, target, f"no budget ({found}); {update}"))
            else:
                lines += [(case, target, problem) for problem in compared(found, Calls.from_text(known[case]))[0]]
        lines += [(case, target, f"a budget that no call has; {update}") for case in known if case not in calls]
    return [Violation(*line) for line in by_targets(lines)]


def savings(collection: Collection, path: Path = FILE) -> list[str]:
    """A line for each case in which a launcher starts or allocates less than its budget says."""
    budgets = _read(path)["calls"].get(collection.triton, {})
    lines = [
        (case, target, phrase)
        for target, calls in collection.calls.items()
        for case, found in calls.items()
        if case in budgets.get(target, {})
        for phrase in compared(found, Calls.from_text(budgets[target][case]))[1]
    ]
    return [f"{case} {targets}: {phrase}" for case, targets, phrase in by_targets(lines)]


def _successors(known: Mapping[str, Any], variants: Iterable[str], signatures: Mapping[str, str]) -> dict[str, str]:
    """For each new variant the budget that it takes over from one which is gone: the most alike of the same kernel."""

    def alike(new: str, old: str) -> tuple[bool, int]:
        parts = [set(name.partition("#")[0].split("[")[-1].rstrip("]").split(" ")) for name in (new, old)]
        return signatures.get(new) == signatures.get(old), len(parts[0] & parts[1])

    new, gone = [name for name in variants if name not in known], [name for name in known if name not in variants]
    pairs = [(one, other) for one in new for other in gone if _kernel(one) == _kernel(other)]
    found: dict[str, str] = {}
    for one, other in sorted(pairs, key=lambda pair: alike(*pair), reverse=True):
        if one not in found and other not in found.values():
            found[one] = other
    return found


def _kernel(variant: str) -> str:
    """The operator and the kernel of a variant."""
    return variant.partition("[")[0]


def _replaces(variant: str) -> str:
    return f"replaces {variant.removeprefix(_kernel(variant))}"


def _beside(old: Any, new: Any) -> str:
    """All figures of two variants, such as `registers 40 -> 48, spills 0`."""
    if isinstance(old, str) or isinstance(new, str):
        return f"{_words(old)} -> {_words(new)}"
    pairs = {key: (old.get(key, 0), new.get(key, 0)) for key in {**old, **new}}
    return ", ".join(f"{key} {was}" + (f" -> {now}" if now != was else "") for key, (was, now) in pairs.items())


def _exceeded(figures: Found, budget: Found, update: str) -> Iterator[str]:
    """One phrase for each way in which the figures violate the budget."""
    if isinstance(figures, str) or isinstance(budget, str):
        if isinstance(figures, str) and not isinstance(budget, str):
            yield f"cannot be compiled any more: {figures}"
        elif isinstance(budget, str) and not isinstance(figures, str):
            yield f"can be compiled now; {update}"
        return
    if figures.wrong:
        yield f"{WRONG} ({figures.wrong} instructions that cannot be right)"
    for name in ("registers", "scalars", "spills", "stack", "shared", "waits"):
        value, limit = getattr(figures, name), getattr(budget, name)
        # a budget may be older than a figure
        if value is not None and limit is not None and value > limit:
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
        # a kernel that loads nothing any more has no narrow load
        if width is not None and least is not None and width < least:
            yield f"{what} load {width:.3g} bytes < budget {least:.3g}"


def update(collection: Collection, path: Path = FILE) -> str:
    """Rewrites the budgets of these operators for this version of Triton.

    Says what changed, in a line a variant, and of which variants the compiler made wrong code.

    The budgets of variants that were not compiled stay as they are. ValueError where the kernels of a case could not be
    recorded, because their budgets would be lost.
    """
    if collection.failures:
        raise ValueError(f"no budgets written: {collection.failures[0]}")
    data = _read(path)
    budgets = data["budgets"].setdefault(collection.triton, {})
    digests = data["digests"].setdefault(collection.triton, {})
    lines = [f"{target}: n/a ({why})" for target, why in collection.unavailable.items()]
    for target, variants in collection.digests.items():
        old, compiled = budgets.get(target, {}), collection.found[target]
        lines += [f"{name} {target}: {WRONG}" for name, x in compiled.items() if not isinstance(x, str) and x.wrong]
        ours = _of_ops(old, collection.ops)
        new = {name: _dump(compiled[name]) if name in compiled else ours[name] for name in variants}
        successors = _successors(ours, new, {**data["signatures"], **collection.signatures})
        lines += [
            f"{name} {target}: {_replaces(previous)}, {_beside(ours[previous], new[name])}"
            for name, previous in successors.items()
        ]
        for name in sorted((ours.keys() | new.keys()) - successors.keys() - set(successors.values())):
            if (change := _change(ours.get(name), new.get(name))) is not None:
                lines.append(f"{name} {target}: {change}")
        budgets[target] = _replaced(old, ours, new)
        known = digests.get(target, {})
        digests[target] = _replaced(known, _of_ops(known, collection.ops), variants)
    signatures = {**data["signatures"], **collection.signatures}
    lines += _update_calls(collection, data["calls"].setdefault(collection.triton, {}))
    used = {name for targets in data["budgets"].values() for known in targets.values() for name in known}
    data["signatures"] = {name: signature for name, signature in sorted(signatures.items()) if name in used}
    # the nesting is as deep as a variant's key
    levels = {"signatures": 1, "budgets": 3, "digests": 3, "calls": 3}
    path.write_text("{" + ",\n".join(f'"{key}": {_format(data[key], depth)}' for key, depth in levels.items()) + "}\n")
    return "\n".join(lines) or "no change"


def _update_calls(collection: Collection, budgets: dict[str, dict[str, str]]) -> list[str]:
    """Writes the budgets of launchers. Returns a line for each case that changed."""
    lines = []
    for target, calls in collection.calls.items():
        known = budgets.get(target, {})
        ours, new = _of_ops(known, collection.ops), {case: str(found) for case, found in calls.items()}
        lines += [
            (case, target, f"{ours.get(case, 'none')} -> {new.get(case, 'none')}")
            for case in sorted(ours.keys() | new.keys())
            if ours.get(case) != new.get(case)
        ]
        budgets[target] = _replaced(known, ours, new)
    return [f"{case} {targets}: {change}" for case, targets, change in by_targets(lines)]


def _replaced(values: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the new entries in place of the old ones, sorted by key."""
    return dict(sorted({**{key: value for key, value in values.items() if key not in old}, **new}.items()))


def _change(old: Any, new: Any) -> str | None:
    """A change in words, such as `registers 40 -> 48, spills 0 -> 2`; None where nothing changed."""
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
    """The budgets of these operators, whose name begins that of a variant and of a case."""
    return {name: value for name, value in budgets.items() if re.split("[/ ]", name)[0] in ops}


def _load(value: Any) -> Found:
    return value if isinstance(value, str) else Figures(**value)


def _dump(found: Found) -> Any:
    """Figures as JSON; those that are zero for nearly every kernel are left out where they are zero."""
    if isinstance(found, str):
        return found
    return {key: value for key, value in asdict(found).items() if key not in ("scalars", "waits", "wrong") or value}


def _read(path: Path) -> dict[str, Any]:
    sections: dict[str, Any] = {"signatures": {}, "budgets": {}, "digests": {}, "calls": {}}
    return sections | (read_object(path) if path.exists() else {})


def _format(value: Any, levels: int, indent: str = "") -> str:
    """JSON with a line for every entry down to the given number of levels."""
    if not levels or not value:
        return json.dumps(value)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(key)}: {_format(item, levels - 1, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
