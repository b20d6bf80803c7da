"""Documents say the truth of grids, rows and files: how many runs there are, what has no rows yet, which files."""

import pkgutil
import re

import pyarrow.dataset as ds

from subquad.suite.metrics import METRICS
from subquad.suite.plugins import GROUP
from subquad.suite.settings.grid import points, seeds_of
from subquad.suite.store import storage
from tests.reports.committed import CONFIGS, HOME
from tests.reports.test_readme import CONTENTS, REFERENCE, documents

READMES = {name: (HOME / "reports" / name / "README.md").read_text() for name in CONFIGS}
RUNS = (
    re.compile(r"(?:\b[Aa]t |^- )?`(?P<scale>[\w-]+)`(?:| is| has|:) (?P<number>[\d,]+) runs\b", re.MULTILINE),
    re.compile(r"\b(?P<number>[\d,]+) runs(?: of [\w ]+)? at `(?P<scale>[\w-]+)`"),
)
FOLDERS = "docs|examples|kernels|models|reports|results/reference|submissions|suite|tasks|tests"
NAME = re.compile(r"`((?:subquad|suite|tasks|models|kernels|reports)(?:\.[A-Za-z_]\w*)+)(?!\.?[\w/])")
PATH = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\w")
NO_ROWS = re.compile(r"((?:`[\w-]+`(?:, | and ))*`[\w-]+`)(?: take minutes and)? (?:have no rows|are not timed) yet")
NOT_RUN = re.compile(r"(?:^|[.:] )(?:Nothing was|It has not been|Not) run(?: yet)?\.$", re.MULTILINE)


def have_rows(name: str, scale: str = "") -> bool:
    return any(True for _ in storage.files_below(REFERENCE / name / scale))


def test_a_readme_has_the_number_of_runs_of_its_grid():
    wrong, found = [], 0
    for name, config in CONFIGS.items():
        text = READMES[name].partition("## Outcome")[0]
        for match in (match for pattern in RUNS for match in pattern.finditer(text)):
            if (scale := match["scale"]) in config.scales:
                found += 1
                count = len(points(config, scale)) * len(seeds_of(config, scale))
                if int(match["number"].replace(",", "")) != count:
                    wrong.append(f"{name}: {match[0]}, which are {count}")
    assert wrong == []
    assert found > 30


def test_what_a_readme_calls_not_run_has_no_rows():
    wrong, found = [], 0
    for name, text in READMES.items():
        scales = dict(re.findall(r"^- `([\w-]+)`: ((?:.|\n(?!- |\n))*)", text, re.MULTILINE))
        for scale, said in scales.items():
            if NOT_RUN.search(said):
                found += 1
                wrong += [f"{name}, {scale}"] * have_rows(name, scale)
        rest = re.sub(r"^- (?:.|\n(?!- |\n))*", "", text, flags=re.MULTILINE)
        if NOT_RUN.search(rest):
            found += 1
            wrong += [name] * have_rows(name)
    assert wrong == []
    assert found > 5


def test_a_mixer_that_a_readme_calls_without_rows_has_none():
    assert NO_ROWS.findall("`a` and `b`, `c` and `d` are not timed yet") == ["`a` and `b`, `c` and `d`"]
    for name, text in READMES.items():
        missing = {mixer for match in NO_ROWS.finditer(text) for mixer in re.findall(r"`([\w-]+)`", match[1])}
        if missing:
            files = list(map(str, storage.files_below(REFERENCE / name)))
            models = ds.dataset(files).to_table(columns=["model"])["model"].unique().to_pylist()
            assert missing & set(models) == set(), name


def test_the_contents_list_every_experiment_without_rows_that_can_run():
    (listed,) = re.findall(r"No rows yet: (.*) \|", CONTENTS)
    missing = {name for name, config in CONFIGS.items() if config.runnable and not have_rows(name)}
    assert set(re.findall(r"\[([\w/-]+)\]", listed)) == missing


def test_a_path_in_the_code_spans_of_a_document_exists():
    wrong, found = [], 0
    for path in documents():
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for code in re.findall(r"`([^`<>*{}]+)`", text):
            for target in re.findall(PATH, code):
                found += 1
                exists = (HOME / target).exists() or (REFERENCE / target).exists()
                wrong += [] if exists or target.startswith("results/local") else [f"{path}: {target}"]
    assert wrong == []
    assert found > 100


def test_a_sweep_that_a_document_names_has_rows():
    files = list(map(str, storage.files_below(REFERENCE / "kernels" / "sweep")))
    stored = ds.dataset(files).to_table(columns=["run_id"])["run_id"].unique().to_pylist()
    named = {name for path in documents() for name in re.findall(r"`sweep/([\w-]+)`", path.read_text())}
    assert len(named) > 10
    assert named <= set(stored)


def test_the_readme_of_an_operator_names_its_files():
    missing = []
    for readme in (HOME / "kernels").glob("*/README.md"):
        text = readme.read_text()
        files = list(readme.parent.glob("*.py"))
        if re.search(r"docstring (maps the files|lists its modules)", text):
            files += (readme.parent / "triton").glob("*.py")
            text += (readme.parent / "triton" / "__init__.py").read_text()
        missing += [str(file) for file in files if file.name != "__init__.py" and file.name not in text]
    shared = (HOME / "kernels" / "README.md").read_text()
    missing += [file.name for file in (HOME / "kernels").glob("*.py") if f"`{file.name}`" not in shared]
    assert missing == []


def test_the_readme_of_the_results_names_every_metric():
    text = (HOME / "results" / "README.md").read_text()
    assert [metric for metric in METRICS if f"`{metric}`" not in text] == []


def test_a_python_name_in_a_document_can_be_imported():
    """Under the one name `subquad`; a name that begins with a folder is no module for a reader."""
    names = {name for path in documents() for name in NAME.findall(path.read_text())} - {GROUP}
    assert len(names) > 3
    for name in names:
        assert name.startswith("subquad."), f"{name}: write subquad.{name}"
        pkgutil.resolve_name(name)
