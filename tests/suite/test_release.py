"""A release says one thing everywhere: version, date, Python, licence; its forms ask for commands that exist."""

import ast
import datetime
import re
import shlex
import tomllib
from urllib.parse import unquote

import pytest
import yaml

from subquad.run_suite import HOME
from subquad.suite.environment import release
from subquad.suite.packaging import FOLDERS, main, tag, with_addresses
from tests.suite.test_documented_commands import GROUP

PROJECT = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
FORMS = sorted((HOME / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def test_version_and_date_are_the_same_everywhere():
    citation = yaml.safe_load((HOME / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+), (\S+)$", (HOME / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == PROJECT["version"] == newest[1]
    assert citation["date-released"] == datetime.date.fromisoformat(newest[2])
    assert citation["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert tag(HOME) == release() == f"v{PROJECT['version']}"


def test_documents_compare_with_the_rows_of_this_version():
    texts = [(HOME / name).read_text() for name in ("README.md", "results/README.md")]
    assert {tag for text in texts for tag in re.findall(r"compare (v\S+) results/local", text)} == {release()}
    assert all("compare v" in text for text in texts)


def test_another_tag_than_the_version_is_refused_before_anything_is_built(tmp_path):
    with pytest.raises(SystemExit, match=r"the tag is v9\.9\.9, and the version in pyproject\.toml is that of v"):
        main(HOME, tmp_path / "dist", "v9.9.9")
    assert not (tmp_path / "dist").exists()


def test_the_badges_are_true():
    badges = re.findall(r"^\[!\[([^]]*)\]\(([^)]*)\)\]\(([^)]*)\)$", (HOME / "README.md").read_text(), re.MULTILINE)
    assert len(badges) == 5
    for words, picture, page in badges:
        if workflow := re.fullmatch(r"\.\./\.\./(actions/workflows/(\w+)\.yml)/badge\.svg", picture):
            assert page == f"../../{workflow[1]}"
            triggers = yaml.safe_load((HOME / ".github" / "workflows" / f"{workflow[2]}.yml").read_text())[True]
            assert triggers["push"] == {"branches": ["main"]}
        else:
            name, value = (
                unquote(picture).removeprefix("https://img.shields.io/badge/").replace("--", "~").split("-")[:2]
            )
            known = {
                "python": PROJECT["requires-python"].replace(">=", "≥ "),
                "licence": PROJECT["license"].replace("-", "~"),
                "types": "mypy" if (HOME / "suite" / "package" / "subquad" / "py.typed").exists() else "",
            }
            assert value == known[name], words
            assert (HOME / page).exists()
    lowest = PROJECT["requires-python"].removeprefix(">=")
    pythons = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3" in text]
    tested = yaml.safe_load((HOME / ".github" / "workflows" / "check.yml").read_text())
    assert pythons == tested["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert pythons[0] == lowest


def test_no_link_of_the_readme_depends_on_where_it_is_shown():
    text = with_addresses((HOME / "README.md").read_text(), "https://host/o/r", "v1")
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert "](https://host/o/r/raw/v1/docs/scoreboard.png)" in text
    assert "](https://host/o/r/blob/v1/docs/data.md)" in text
    assert "[![check](https://host/o/r/actions/workflows/check.yml/badge.svg)](https://host/o/r/actions/" in text


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_what_its_host_reads_and_asks_for_commands_that_exist(path):
    form = yaml.safe_load(path.read_text())
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["attributes"]["label"] for part in fields)
    assert any(part.get("validations", {}).get("required") for part in fields)
    text = path.read_text()
    calls = [shlex.split(call) for call in re.findall(r"`python run_suite\.py ([^`]+)`", text)]
    assert calls
    for words in calls:
        command, rest = GROUP, words
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(words[0], list(rest))
    for name in re.findall(r"`((?:docs|kernels)/[\w.-]+)`", text):
        assert (HOME / name).exists(), name


def test_there_are_three_forms():
    assert [path.stem for path in FORMS] == ["kernel", "mixer", "result"]


def test_messages_name_commands_as_they_are_called_in_an_installation():
    """A text of a checkout stands in `suite.environment` alone; docstrings and what only maintainers call are none."""
    wrong = []
    for folder in FOLDERS:
        for path in (HOME / folder).rglob("*.py"):
            # a tree of every source would take seconds
            if not re.search(r"run_suite\.py|pip", source := path.read_text()):
                continue
            tree = ast.parse(source)
            said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in said]
            wrong += [
                f"{path.relative_to(HOME)}:{node.lineno}"
                for node in texts
                if isinstance(node.value, str) and re.search(r"python run_suite\.py |pip install", node.value)
            ]
    assert {name.partition(":")[0] for name in wrong} <= {"suite/environment.py", "suite/bench/budgets.py"}, wrong
