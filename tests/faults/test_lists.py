"""Every planted fault can be planted; `python -m tests.faults` says whether the tests find it."""

from collections import Counter

from tests.faults.lists import HERE, HOME, read

FAULTS = read()


def test_every_fault_can_be_planted():
    problems = []
    for fault in FAULTS:
        try:
            fault.planted((HOME / fault.file).read_text())
        except (OSError, ValueError) as error:
            problems.append(f"{fault}: {error}")
    assert not problems, "\n".join(problems)


def test_no_line_of_a_list_is_left_out():
    written = sum(line.startswith("- ") for path in HERE.glob("*.txt") for line in path.read_text().splitlines())
    assert sum(fault.old.count("\n") + 1 for fault in FAULTS) == written
    assert all(fault.tests and fault.old != fault.new for fault in FAULTS)


def test_names_are_unique_and_every_operator_has_three_faults():
    assert max(Counter(map(str, FAULTS)).values()) == 1
    operators = {path.parent.name for path in (HOME / "kernels").glob("*/workloads.py")}
    counts = Counter(fault.file.split("/")[1] for fault in FAULTS if fault.file.startswith("kernels/"))
    assert not [name for name in operators if counts[name] < 3]
