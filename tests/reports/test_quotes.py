"""A quoted number in a document is that of the rows, and a measured one without a source is found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from subquad.reports.render import quotes as module
from subquad.reports.render.quotes import (
    CODE,
    NUMBER,
    QUOTE,
    CommittedRows,
    Query,
    Quote,
    documents,
    queries_of,
    quoted,
    quotes,
    read_queries,
    update_documents,
    updated,
)
from tests.reports.committed import HOME
from tests.reports.committed import ROWS as SOURCE
from tests.reports.made import swept, three


class Rows:
    """Hand-made rows: the value of a cell says which cell it is."""

    def cell(self, experiment, scale, row, column, what):
        values = {("H3", "a"): 99.54, ("H3", "b"): 12.0, ("S4D", "a"): 2.0}
        if what == "seeds":
            return [1.04, 2.0, 3.5]
        return [{"mean": values[row, column], "sd": 1.25, "paper": 100.0}[what] + (scale == "small")]

    def tried(self, experiment, scale, row, column):
        return [5.0, 3.0]

    def claims(self, experiment, scale):
        return 3, 5

    def runs(self, experiment, scale, selector):
        return [float(selector["seed"])]

    def bench(self, operator, implementation, case, metric="time", device=""):
        return 0.1234 if device == "" else 7.0

    def peer(self, operator, implementation, shape, column):
        return 1234.5


HEADER = "key,experiment,scale,query\n"


@pytest.fixture
def read(tmp_path):
    """Returns the quoted numbers of a text whose queries have the keys 1, 2, and so on."""

    def found(text, *queries, scale="paper"):
        lines = [f'{key},,{scale},"{query}"\n' for key, query in enumerate(queries, 1)]
        (tmp_path / "quotes.csv").write_text(HEADER + "".join(lines))
        return quotes(text, read_queries(tmp_path / "quotes.csv", "h3"), Rows())

    return found


@pytest.mark.parametrize(
    ("written", "expected", "query"),
    [
        ("H3 has 99.9 %.<!--= 1 -->", "H3 has 99.5 %.<!--= 1 -->", "H3 | a"),
        ("99 ± 1 (100.00)<!--= 1 -->", "100 ± 1 (100.00)<!--= 1 -->", "H3 | a | mean & sd & paper"),
        ("at T2048, 7 and 8.0<!--= 1 -->", "at T2048, 100 and 12.0<!--= 1 -->", "H3 | a & b"),
        ("9, 9.0 and 9<!--= 1 -->", "1, 2.0 and 4<!--= 1 -->", "H3 | a | seeds"),
        ("7.0 times<!--= 1 -->", "6.0 times<!--= 1 -->", "H3 | b / S4D | a"),
        ("0 and 0 seeds<!--= 1 -->", "5 and 3 seeds<!--= 1 -->", "tried H3 | a"),
        ("1 of 2 claims<!--= 1 -->", "3 of 5 claims<!--= 1 -->", "claims"),
        ("4 at 2^20<!--= 1 -->", "6 at 2^20<!--= 1 -->", "runs seed=6"),
        ("0.0 ms<!--= 1 -->", "0.1 ms<!--= 1 -->", "bench x | y | z"),
        ("0.0 ms<!--= 1 -->", "7.0 ms<!--= 1 -->", "bench x | y | z | time | H100"),
        ("1,000<!--= 1 -->", "1,234<!--= 1 -->", "peer x | y | z | c"),
        ("`0.5` 5.0<!--= 1 -->", "`0.5` 12.0<!--= 1 -->", "H3 | b"),
        ("`5.0<!--= 1 -->`", "`5.0<!--= 1 -->`", "H3 | b"),
        ("| 1 | 2 |<!--= 1 -->", "| 12 | 2 |<!--= 1 -->", "H3 | b; S4D | a"),
        ("| 1 <!--= 1 --> | 2 |", "| 12 <!--= 1 --> | 2 |", "H3 | b"),
    ],
)  # fmt: skip
def test_a_quoted_number_is_written_as_its_source_has_it(written, expected, query, read):
    assert updated(written, read(written, query)) == expected
    assert updated(expected, read(expected, query)) == expected


def test_a_query_is_of_its_own_experiment_and_scale_or_of_those_of_its_document(tmp_path):
    (tmp_path / "quotes.csv").write_text(HEADER + "1,,,claims\n2,gsa,small,claims\n")
    found = read_queries(tmp_path / "quotes.csv", "h3")
    assert {key: query[:2] for key, query in found.items()} == {"1": ("h3", "paper"), "2": ("gsa", "small")}


def test_a_quote_of_a_reduced_scale_reads_its_rows(read):
    assert [quote.value for quote in read("5.0<!--= 1 -->", "H3 | b", scale="small")] == [13.0]


def test_numbers_of_another_paragraph_or_line_are_out_of_reach(read):
    with pytest.raises(ValueError, match="gives 2 values, and only 1 numbers stand before it"):
        read("7.0\n\n8.0<!--= 1 -->", "H3 | a & b")
    with pytest.raises(ValueError, match="only 1"):
        read("| 7.0 |\n| 8.0<!--= 1 --> |", "H3 | a & b")


def test_a_key_without_a_query_and_a_key_that_stands_twice_are_refused(read, tmp_path):
    with pytest.raises(ValueError, match=r"<!--= 2 --> has no line with this key in the quotes.csv"):
        read("7.0<!--= 2 -->", "H3 | a")
    (tmp_path / "quotes.csv").write_text(HEADER + "1,,,claims\n1,,,claims\n")
    with pytest.raises(ValueError, match=r"line 3: the key 1 stands twice"):
        read_queries(tmp_path / "quotes.csv")


def test_a_quoted_speed_is_of_the_device_that_is_named_or_else_of_the_one_with_the_most_rows():
    step = "h3_inner_step", "triton", "B=64,D=2048,M=64,N=32,dtype=bfloat16,pass=forward"
    one, other = SOURCE.bench(*step, "time", "H200"), SOURCE.bench(*step, "time", "H100")
    assert one != other
    assert SOURCE.bench(*step) == one
    with pytest.raises(ValueError, match=r"no row of .* on H300"):
        SOURCE.bench(*step, "time", "H300")


@pytest.mark.parametrize(
    "query",
    ["bench x | y", "bench x | y | z | time | H100 | more", "peer x | y | z", "H3", "H3 | a | mean | more"],
)
def test_a_quote_with_too_few_or_too_many_parts_is_refused(query, read):
    with pytest.raises(ValueError, match="parts between bars"):
        read("1.0<!--= 1 -->", query)


def test_a_grid_has_the_rate_that_was_chosen_once_all_rates_have_rows(make, monkeypatch):
    good, bad = (
        three(values=(score, score, score), valid={100: score}, train={"lr": lr})
        for score, lr in ((0.9, 1e-3), (0.8, 1e-4))
    )
    line = "- {model.name: h3, train.lr: &h3 0.0005}  # <!--= h3 -->\n"
    queries = {"h3": Query("h3/table2", "paper", "H3 | AR | train.lr")}
    source = CommittedRows(HOME / "results", {})
    written = {}
    for name, runs in {"none": [], "one": good, "both": good + bad}.items():
        report = make(*runs, config=swept())
        monkeypatch.setattr(source, "report", lambda *_, report=report: report)
        written[name] = updated(line, quotes(line, queries, source))
    assert written == {"none": line, "one": line, "both": line.replace("0.0005", "0.0010")}
    with pytest.raises(ValueError, match=r"'train.lrr' is not one of .*train.lr"):
        source.cell("h3/table2", "paper", "H3", "AR", "train.lrr")


def test_no_document_is_written_if_one_has_a_quote_without_a_source(tmp_path, monkeypatch):
    class Source(Rows):
        experiments, report = (), None

        def __init__(self, results, experiments):
            pass

    monkeypatch.setattr(module, "CommittedRows", Source)
    (tmp_path / "reports").mkdir()
    first, last = tmp_path / "A.md", tmp_path / "Z.md"
    (tmp_path / "quotes.csv").write_text(HEADER + "1,,,peer x | y | z | c\n2,,,nothing\n")
    first.write_text("12.9<!--= 1 -->")
    last.write_text("12.9<!--= 2 -->")
    with pytest.raises(ValueError, match="'nothing' has 1 parts"):
        update_documents(tmp_path / "reports")
    assert first.read_text() == "12.9<!--= 1 -->"
    last.write_text("none")
    assert update_documents(tmp_path / "reports") == [first]
    assert first.read_text() == "1234.5<!--= 1 -->"


def unquoted(text: str, quoted: list[Quote]) -> list[str]:
    """Returns the numbers without a source that look measured: with a point or a per cent sign, outside of code."""
    known = {quote.start for quote in quoted}
    hidden = [match.span() for match in CODE.finditer(text)]
    return [
        text[match.start() : match.end() + 20].split("\n")[0]
        for match in NUMBER.finditer(text)
        if match.start() not in known
        and ("." in match.group() or text[match.end() : match.end() + 2] == " %")
        and not any(a <= match.start() < b for a, b in hidden)
    ]


def test_measured_numbers_without_a_source_are_found(read):
    text = "It has 84.5 % and 70 % of 12 rows at `0.02`, rate 4.6e-3, version 2.<!--= 1 -->"
    assert [found.split()[0] for found in unquoted(text, read(text, "H3 | a"))] == ["84.5", "70"]
    assert unquoted("99.5<!--= 1 -->", read("99.5<!--= 1 -->", "H3 | a")) == []


def measured_parts(path: Path) -> str:
    """Returns the part of a document that reports measurements: results.md, and the outcome of an experiment."""
    text = path.read_text()
    if path.name == "results.md":
        # lines that begin with the link to an experiment are looked up by tests/reports/test_readme.py
        return re.sub(r"(?m)^\| \[.*\]\(\.\./results/reference/.*\n", "", text)
    return text.partition("## Outcome")[2].partition("\n## ")[0]


def named(path: Path) -> str:
    return str(path.relative_to(HOME))


def slow_if(reads_the_largest: bool) -> list[Any]:
    """Returns the mark of a test that reads the rows of the largest experiment, which takes about ten seconds."""
    return [pytest.mark.slow] * reads_the_largest


def quoting() -> list[Any]:
    """The documents that quote numbers; results.md by section, since it quotes every experiment."""
    found = []
    for path in documents(HOME):
        text = path.read_text()
        for part in re.split(r"(?m)^(?=## )", text) if path.name == "results.md" else [text]:
            if "<!--= " in part:
                name = f"{named(path)}-{part.splitlines()[0].strip('# ')}"
                largest = "mad/score" in named(path) + part or "What is counted" in name
                found.append(pytest.param(path, part, id=name, marks=slow_if(largest)))
    return found


@pytest.mark.parametrize(("path", "part"), quoting())
def test_quoted_numbers_are_those_of_the_committed_rows(path, part):
    found = quotes(part, queries_of(path, HOME, SOURCE), SOURCE)
    wrong = [f"{quote.text} is {quote.current}: {quote.query}" for quote in found if quote.text != quote.current]
    assert wrong == [], "run `python run_suite.py report --update-docs`"


def test_every_query_is_quoted():
    used: dict[Path, set[str]] = {}
    for path in documents(HOME):
        used.setdefault(path.parent, set()).update(QUOTE.findall(path.read_text()))
    found = [
        path for folder in ("docs", "kernels", "reports", "results") for path in (HOME / folder).rglob("quotes.csv")
    ]
    assert len(found) > 50
    assert {path: set(read_queries(path)) - used[path.parent] for path in found} == {path: set() for path in found}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, id=named(path), marks=slow_if(named(path) in ("docs/results.md", "reports/mad/score/README.md"))
        )
        for path in [HOME / "docs/results.md", *sorted((HOME / "reports").rglob("README.md"))]
    ],
)
def test_every_measured_number_has_a_source(path):
    measured = set(unquoted(measured_parts(path), []))
    assert [found for found in unquoted(path.read_text(), quoted(path, HOME, SOURCE)) if found in measured] == []


@pytest.mark.parametrize("path", sorted((HOME / "kernels").glob("*/README.md")), ids=named)
def test_a_measured_time_in_an_operators_readme_stands_in_its_log(path):
    """The log has version and device of every measurement. `ms at 4.24 TB/s` or `ms at the peak` is computed."""
    log = path.with_name("LOG.md")
    known = set(re.findall(r"\d+(?:\.\d+)?", log.read_text())) if log.exists() else set()
    text = re.sub(r"[\d., and]+ ms at (?:[\d.]+ TB/s|the peak)", "", path.read_text())
    assert [found for found in re.findall(r"(\d+(?:\.\d+)?) ms", text) if found not in known] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"op,implementation,shape\n", "peers.csv: the header has no ms"),
        (b"op,implementation,shape,ms\na,b,c,nan\n", "peers.csv, line 2: ms is 'nan', no number"),
        (b"op,implementation,shape,ms\na,b,d,1\n", "peers.csv: has no a, b, c"),
        (b"\xff", "peers.csv: cannot be read as a CSV file"),
    ],
)
def test_a_line_of_a_peer_that_is_no_number_is_named(tmp_path, content, words):
    (tmp_path / "peers.csv").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        module.CommittedRows(tmp_path, {}).peer("a", "b", "c", "ms")
