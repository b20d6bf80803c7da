"""The planted faults: the `.txt` lists beside this file, and how an edit of a source is made.

A list is read line by line. A path names the source that the faults after it change, and a line that begins with
`tests/` holds the arguments of pytest for them. Faults of an operator need none: its laws and its own tests judge them.
A fault is a sentence, the text that it replaces (lines that begin with `- `) and what stands there then (`+ `, or
nothing). The text must occur exactly once in its source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from subquad.kernels import OPERATORS

HERE = Path(__file__).parent
HOME = HERE.parents[1]

# tests of an operator in files that are not named after it
ELSEWHERE = {
    "delta_rule": ("tests/kernels/test_generalised_delta_rule.py",),
    "float32_matmul": ("tests/kernels/test_float32_parts.py",),
}


@dataclass(frozen=True)
class Fault:
    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"

    def planted(self, source: str) -> str:
        """The source with the fault; ValueError where its text does not occur exactly once."""
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"its text occurs {found} times in {self.file}, not once")
        return source.replace(self.old, self.new)


def read() -> list[Fault]:
    """All faults of all lists."""
    faults = []
    for path in sorted(HERE.glob("*.txt")):
        for entry in re.findall(r"^.*\.py$|^tests/.*$|^[^-+\n].*\n(?:- .*\n)+(?:\+ .*\n)*", path.read_text(), re.M):
            if entry.startswith("tests/"):
                tests = tuple(entry.split())
            elif "\n" not in entry:
                file, tests = entry, tests_of(entry)
            else:
                what, *lines = entry.splitlines()
                old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
                faults.append(Fault(file, what.rstrip("."), old, new, tests))
    return faults


def tests_of(file: str) -> tuple[str, ...]:
    """The arguments of pytest that select the tests of the operators in whose folder a file is."""
    folder, operator, *_ = *Path(file).parts, ""
    if folder != "kernels" or operator.endswith(".py"):
        return ()
    names = [name for name, (place, _) in OPERATORS.items() if place.startswith(f"subquad.kernels.{operator}.")]
    laws = [f"tests/laws/test_operators.py::test_an_operator_obeys_its_laws[{name}]" for name in names]
    own = sorted((HOME / "tests/kernels").glob(f"test_{operator}*.py"))
    return *laws, *(f"tests/kernels/{path.name}" for path in own), *ELSEWHERE.get(operator, ())
