"""LaTeX of any table: signs that are shown as such, floats that are not too wide, and every value in them."""

from __future__ import annotations

import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from subquad.reports.render import Document, render
from subquad.reports.render.document import Grid
from subquad.reports.render.latex import tex


def test_latex_shows_signs_as_such():
    assert tex("Mamba | * >= 99.5") == r"Mamba $|$ {*} $\geq$ 99.5"
    assert tex("-0.5") == "$-$0.5"
    assert tex("a-b --only") == "a-b -{}-only"
    assert tex("[990K, 1.02M]_x") == r"{[}990K, 1.02M{]}\_x"


# a slow machine is not a fault of the table
@given(
    st.lists(st.integers(3, 18), min_size=1, max_size=14),
    st.integers(1, 30),
    st.sampled_from([("row",), ("row", "kind"), ("row", "kind", "source")]),
    st.booleans(),
)
def test_latex_tables_fit_their_floats_and_lose_no_value(digits, num_rows, words, grouped):
    lines = [
        (*(f"{10**6 + i // 3 + j}" for j in range(len(words))), *(f"{10**n + 100 * i + n}" for n in digits))
        for i in range(num_rows)
    ]
    groups = (*("" for _ in words), *("a common title" for _ in digits)) if grouped else ()
    names = tuple(f"{n} digits" for n in digits)
    grid = Grid("", (*words, *names), tuple(lines), len(words), ((),) * num_rows, groups)
    text = str(render(Document("n", "t", "w", (grid,), (), ()), "latex"))
    shown = Counter(re.findall(r"\w+", text))
    assert all(shown[value] >= line.count(value) for line in lines for value in line[len(words) :])
    digit = {r"\small": 4.63, r"\footnotesize": 4.25, r"\scriptsize": 3.98}
    rooms = re.findall(r"begin{table(\*?)}.*?(\\small|\\footnotesize|\\scriptsize)\n(.*?)end{table", text, re.DOTALL)
    assert len(rooms) == text.count(r"\begin{table")
    for wide, font, float_body in rooms:
        for kinds, body in re.findall(r"begin{tabular}{@{}([^@]*)@{}}\n(.*?)\\bottomrule", float_body, re.DOTALL):
            columns = re.findall(r"p{(\d+)pt}|([lr])", kinds)
            cells = [line.rsplit(" \\", 1)[0].split(" & ") for line in body.partition("midrule\n")[2].splitlines()]
            cells = [line for line in cells if line != [r"\addlinespace[2pt]"]]
            assert {len(line) for line in cells} == {len(columns)}
            sizes = [
                float(size) if size else digit[font] * max(len(line[i]) for line in cells)
                for i, (size, _) in enumerate(columns)
            ]
            assert sum(sizes) + 6 * (len(sizes) - 1) <= (345 if wide else 229)
